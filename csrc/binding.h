// What the families' bindings share: raw addresses and sizes in, results written in place. Callers check shapes,
// dtypes and devices.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "sampling/logit_rows.h"

namespace viasd {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// A [rows, width] matrix of logits as Python passes it: (address, row stride, width, dtype code); address 0 is none.
using Matrix = std::tuple<Address, int64_t, int64_t, int32_t>;

inline LogitMatrix logit_matrix(const Matrix& matrix) {
    const auto [address, row_stride, width, dtype] = matrix;
    return {at<const void>(address), row_stride, width, static_cast<Dtype>(dtype)};
}

// Every op works without the interpreter's lock.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

void bind_sampling(pybind11::module_& m);
void bind_tree_verify(pybind11::module_& m);
void bind_acceptance(pybind11::module_& m);
void bind_layer_skip(pybind11::module_& m);

}  // namespace viasd
