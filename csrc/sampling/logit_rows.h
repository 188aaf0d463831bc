// Rows of logits on the CPU, read in chunks of the accumulation dtype, whatever they are stored in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "sampling/row_kernels.h"
#include "status.h"

namespace viasd {

// Ids per chunk: its logits and weights stay in the first-level cache. Results are put together from chunks in order,
// so they do not depend on who computed them.
constexpr int64_t CHUNK = 4096;

// A [num_rows, width] tensor with contiguous rows; data is null where the caller gave none.
struct LogitMatrix {
    const void* data;
    int64_t row_stride;  // in elements
    int64_t width;
    Dtype dtype;
};

inline bool is_double(const LogitMatrix& logits) { return logits.data && logits.dtype == Dtype::FLOAT64; }

// The kernels of this processor.
const RowKernelTable& row_kernel_table();

template <class Real>
const RowKernels<Real>& row_kernels();

template <>
inline const RowKernels<float>& row_kernels<float>() {
    return row_kernel_table().for_float;
}

template <>
inline const RowKernels<double>& row_kernels<double>() {
    return row_kernel_table().for_double;
}

// Memory for one chunk, on the stack of whoever works on it.
template <class Real>
struct ChunkBuffer {
    alignas(64) Real values[CHUNK];
};

template <class Real>
class LogitRow {
  public:
    LogitRow(const LogitMatrix& logits, int64_t row)
        : data_(static_cast<const char*>(logits.data) + row * logits.row_stride * size_of(logits.dtype)),
          width_(logits.width),
          dtype_(logits.dtype) {}

    // `count` logits from `first` on: where they lie if they are of type Real, else converted into `buffer`.
    const Real* read(int64_t first, int64_t count, Real* buffer) const {
        const char* stored = data_ + first * size_of(dtype_);
        if (dtype_ == own_dtype()) return reinterpret_cast<const Real*>(stored);
        row_kernels<Real>().read[static_cast<int>(dtype_)](stored, count, buffer);
        return buffer;
    }

    Real at(int64_t index) const {
        Real value;
        return *read(index, 1, &value);
    }

    int64_t width() const { return width_; }

  private:
    static constexpr Dtype own_dtype() { return sizeof(Real) == 8 ? Dtype::FLOAT64 : Dtype::FLOAT32; }

    static int64_t size_of(Dtype dtype) {
        switch (dtype) {
            case Dtype::FLOAT32: return 4;
            case Dtype::FLOAT64: return 8;
            case Dtype::FLOAT16: return 2;
            case Dtype::BFLOAT16: return 2;
        }
        throw std::invalid_argument("unknown dtype of logits");
    }

    const char* data_;
    int64_t width_;
    Dtype dtype_;
};

// Rows are addressed through row_start, so a wrong one must not get as far as memory.
inline void require_row_start(const int64_t* row_start, int64_t num_sequences, int64_t num_rows) {
    const bool ascending = std::is_sorted(row_start, row_start + num_sequences + 1);
    if (!ascending || row_start[0] != 0 || row_start[num_sequences] != num_rows) {
        throw std::invalid_argument("row_start must run from 0 to the number of rows, ascending");
    }
}

// Is any sequence sampled? The others are greedy, and need no memory for weights.
inline bool has_sampled(const double* temperature, int64_t num_sequences) {
    return std::any_of(temperature, temperature + num_sequences, [](double value) { return value > 0; });
}

}  // namespace viasd
