// Entry points of bypass_norm and bypass_linear on the CPU.
#pragma once

#include <cstdint>

#include "layer_skip/panel_kernels.h"

namespace viasd {

// A [rows, width] matrix with contiguous rows; null where the caller gave none. Strides in elements.
struct RowMatrix {
    char* data;
    int64_t row_stride;

    char* row(Element element, int64_t i) const { return data + i * row_stride * element_bytes(element); }
};

struct BypassNorm {
    Element element;
    int64_t num_rows, width;
    RowMatrix hidden, delta;
    const bool* keep;           // [R]
    const float* weight;        // [D] with the offset added, as delta_weight
    const float* delta_weight;  // null: none
    float eps;
    RowMatrix hidden_out, normed;
    int num_threads;
};
void bypass_norm_cpu(const BypassNorm& op);

enum class Epilogue : int32_t { NONE = 0, SILU_MUL = 1, GELU_TANH_MUL = 2 };

struct BypassLinear {
    Element element;
    int64_t num_rows, depth, num_outputs;  // outputs of the product; twice the result's width with an activation
    RowMatrix x, weight;
    const bool* keep;   // [R]
    const float* bias;  // [Dout], null: none
    RowMatrix residual;
    Epilogue epilogue;
    RowMatrix out;
    int num_threads;
};
void bypass_linear_cpu(const BypassLinear& op);

}  // namespace viasd
