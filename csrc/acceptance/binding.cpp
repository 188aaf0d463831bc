#include "binding.h"
#include "acceptance/accept_chain_cpu.h"
#include "acceptance/acceptance_stats_cpu.h"
#include "acceptance/gate_tiers_cpu.h"

namespace py = pybind11;

namespace viasd {

namespace {

void accept_chain(Address row_tokens, Address uniforms, Address row_start, Address temperature, int64_t num_sequences,
                  int64_t num_rows, const Matrix& target_logits, const Matrix& draft_logits, Address num_accepted,
                  Address next_token, Address status, int num_threads) {
    accept_chain_cpu({at<const int64_t>(row_tokens), at<const double>(uniforms), at<const int64_t>(row_start),
                      at<const double>(temperature), num_sequences, num_rows, logit_matrix(target_logits),
                      logit_matrix(draft_logits)},
                     {at<int32_t>(num_accepted), at<int32_t>(next_token), at<int32_t>(status)}, num_threads);
}

void acceptance_stats(const Matrix& draft_logits, const Matrix& target_logits, Address tokens, Address temperature,
                      int64_t num_rows, double alpha, double beta, bool undershoot, Address stats,
                      Address target_argmax, int num_threads) {
    acceptance_stats_cpu({logit_matrix(draft_logits),
                          logit_matrix(target_logits),
                          at<const int64_t>(tokens),
                          at<const double>(temperature),
                          {alpha, beta, undershoot}},
                         {at<void>(stats), at<int32_t>(target_argmax), num_rows}, num_threads);
}

void gate_tiers(Address row_tokens, Address uniforms, Address row_start, Address accept, Address escalate,
                Address temperature, int64_t num_sequences, int64_t num_rows, int32_t criterion,
                const Matrix& slim_logits, const Matrix& draft_logits, Address tokens, Address regions,
                Address num_emitted, Address escalate_flags, Address status, Address stats, Address target_argmax,
                int num_threads) {
    gate_tiers_cpu({at<const int64_t>(row_tokens), at<const double>(uniforms), at<const int64_t>(row_start),
                    at<const double>(accept), at<const double>(escalate), at<const double>(temperature), num_sequences,
                    num_rows, static_cast<Criterion>(criterion), logit_matrix(slim_logits), logit_matrix(draft_logits)},
                   {at<int32_t>(tokens),
                    at<int8_t>(regions),
                    at<int32_t>(num_emitted),
                    at<bool>(escalate_flags),
                    at<int32_t>(status),
                    {at<void>(stats), at<int32_t>(target_argmax), num_rows}},
                   num_threads);
}

}  // namespace

void bind_acceptance(py::module_& m) {
    m.def("accept_chain", &accept_chain, NoGil(), py::kw_only(), py::arg("row_tokens"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("num_rows"),
          py::arg("target_logits"), py::arg("draft_logits"), py::arg("num_accepted"), py::arg("next_token"),
          py::arg("status"), py::arg("num_threads"));
    m.def("acceptance_stats", &acceptance_stats, NoGil(), py::kw_only(), py::arg("draft_logits"),
          py::arg("target_logits"), py::arg("tokens"), py::arg("temperature"), py::arg("num_rows"), py::arg("alpha"),
          py::arg("beta"), py::arg("undershoot"), py::arg("stats"), py::arg("target_argmax"), py::arg("num_threads"));
    m.def("gate_tiers", &gate_tiers, NoGil(), py::kw_only(), py::arg("row_tokens"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("accept"), py::arg("escalate"), py::arg("temperature"),
          py::arg("num_sequences"), py::arg("num_rows"), py::arg("criterion"), py::arg("slim_logits"),
          py::arg("draft_logits"), py::arg("tokens"), py::arg("regions"), py::arg("num_emitted"),
          py::arg("escalate_flags"), py::arg("status"), py::arg("stats"), py::arg("target_argmax"),
          py::arg("num_threads"));
}

}  // namespace viasd
