#include "acceptance/accept_chain_cpu.h"
#include "binding.h"

namespace py = pybind11;

namespace viasd {

namespace {

void accept_chain(Address row_tokens, Address uniforms, Address row_start, Address temperature, int64_t num_sequences,
                  int64_t num_rows, const Matrix& target_logits, const Matrix& draft_logits, Address num_accepted,
                  Address next_token, Address status) {
    accept_chain_cpu({at<const int64_t>(row_tokens), at<const double>(uniforms), at<const int64_t>(row_start),
                      at<const double>(temperature), num_sequences, num_rows, logit_matrix(target_logits),
                      logit_matrix(draft_logits)},
                     {at<int32_t>(num_accepted), at<int32_t>(next_token), at<int32_t>(status)});
}

}  // namespace

void bind_acceptance(py::module_& m) {
    m.def("accept_chain", &accept_chain, NoGil(), py::kw_only(), py::arg("row_tokens"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("num_rows"),
          py::arg("target_logits"), py::arg("draft_logits"), py::arg("num_accepted"), py::arg("next_token"),
          py::arg("status"));
}

}  // namespace viasd
