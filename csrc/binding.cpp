// viasd_kernels._native: raw addresses and sizes in, results written in place. Callers check shapes, dtypes, devices.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "acceptance/accept_chain_cpu.h"
#include "sampling/philox.h"
#include "tree_verify/tree_verify_cpu.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void uniforms(Address seeds, Address draws, Address out, int64_t num_sequences, int64_t num_slots) {
    viasd::uniforms_cpu(at<const int64_t>(seeds), at<const int64_t>(draws), at<double>(out), num_sequences, num_slots);
}

void build_tree(Address parents, Address row_start, int64_t num_sequences, int64_t num_rows, int64_t max_rows,
                Address ancestors, Address depth, Address first_child, Address next_sibling) {
    viasd::build_tree_cpu(
        at<const int64_t>(parents), at<const int64_t>(row_start), num_sequences, num_rows, max_rows,
        {at<int64_t>(ancestors), at<int32_t>(depth), at<int32_t>(first_child), at<int32_t>(next_sibling)});
}

// A [rows, width] matrix of logits as Python passes it: (address, row stride, width, dtype code); address 0 is none.
using Matrix = std::tuple<Address, int64_t, int64_t, int32_t>;

viasd::LogitMatrix logit_matrix(const Matrix& matrix) {
    const auto [address, row_stride, width, dtype] = matrix;
    return {at<const void>(address), row_stride, width, static_cast<viasd::Dtype>(dtype)};
}

void verify_tree(Address depth, Address first_child, Address next_sibling, Address row_tokens, Address full_argmax,
                 Address uniforms, Address row_start, Address temperature, int64_t num_sequences, int64_t num_rows,
                 const Matrix& full_logits, const Matrix& draft_logits, int32_t proposal, Address path,
                 Address num_accepted, Address next_token, Address status) {
    viasd::verify_tree_cpu({at<const int32_t>(depth), at<const int32_t>(first_child), at<const int32_t>(next_sibling),
                            at<const int64_t>(row_tokens), at<const int64_t>(full_argmax), at<const double>(uniforms),
                            at<const int64_t>(row_start), at<const double>(temperature), num_sequences, num_rows,
                            logit_matrix(full_logits), logit_matrix(draft_logits),
                            static_cast<viasd::Proposal>(proposal)},
                           {at<int32_t>(path), at<int32_t>(num_accepted), at<int32_t>(next_token),
                            at<int32_t>(status)});
}

void accept_chain(Address row_tokens, Address uniforms, Address row_start, Address temperature, int64_t num_sequences,
                  int64_t num_rows, const Matrix& target_logits, const Matrix& draft_logits, Address num_accepted,
                  Address next_token, Address status) {
    viasd::accept_chain_cpu({at<const int64_t>(row_tokens), at<const double>(uniforms), at<const int64_t>(row_start),
                             at<const double>(temperature), num_sequences, num_rows, logit_matrix(target_logits),
                             logit_matrix(draft_logits)},
                            {at<int32_t>(num_accepted), at<int32_t>(next_token), at<int32_t>(status)});
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "CPU implementations of the viasd_kernels ops; call them through the package's public functions.";
    const auto no_gil = py::call_guard<py::gil_scoped_release>();

    m.def("uniforms", &uniforms, no_gil, py::arg("seeds"), py::arg("draws"), py::arg("out"), py::arg("num_sequences"),
          py::arg("num_slots"));
    m.def("build_tree", &build_tree, no_gil, py::kw_only(), py::arg("parents"), py::arg("row_start"),
          py::arg("num_sequences"), py::arg("num_rows"), py::arg("max_rows"), py::arg("ancestors"), py::arg("depth"),
          py::arg("first_child"), py::arg("next_sibling"));
    m.def("verify_tree", &verify_tree, no_gil, py::kw_only(), py::arg("depth"), py::arg("first_child"),
          py::arg("next_sibling"), py::arg("row_tokens"), py::arg("full_argmax"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("num_rows"),
          py::arg("full_logits"), py::arg("draft_logits"), py::arg("proposal"), py::arg("path"),
          py::arg("num_accepted"), py::arg("next_token"), py::arg("status"));
    m.def("accept_chain", &accept_chain, no_gil, py::kw_only(), py::arg("row_tokens"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("num_rows"),
          py::arg("target_logits"), py::arg("draft_logits"), py::arg("num_accepted"), py::arg("next_token"),
          py::arg("status"));
}
