// Rows of logits on the CPU: read in any dtype, checked, turned into probabilities, sampled. One rule for every op.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "status.h"

namespace viasd {

enum class Dtype : int32_t { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

// A [num_rows, width] tensor with contiguous rows; data is null where the caller gave none.
struct LogitMatrix {
    const void* data;
    int64_t row_stride;  // in elements
    int64_t width;
    Dtype dtype;
};

inline bool is_double(const LogitMatrix& logits) { return logits.data && logits.dtype == Dtype::FLOAT64; }

inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Half {
    uint16_t bits;
};

struct Bfloat16 {
    uint16_t bits;
};

inline float to_real(float value) { return value; }
inline double to_real(double value) { return value; }
inline float to_real(Bfloat16 value) { return float_from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float to_real(Half value) {
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFF) << 13;
    const bool special = (value.bits & 0x7C00) == 0x7C00;  // infinity or NaN
    // The exponent's bias moves from 15 to 127 by a multiplication, which is right for subnormals too.
    const float size = special ? float_from_bits(magnitude | 0x7F800000) : float_from_bits(magnitude) * 0x1p112f;
    return (value.bits & 0x8000) ? -size : size;
}

// exp(x) for x <= 0 within about one unit in the last place, 0 below -87. A loop over it vectorises, over std::exp not.
inline float exp_nonpositive(float x) {
    const float clamped = x > -87.0f ? x : -87.0f;
    const float shifted = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float poly = 1.9875691500e-4f;
    poly = poly * r + 1.3981999507e-3f;
    poly = poly * r + 8.3334519073e-3f;
    poly = poly * r + 4.1665795894e-2f;
    poly = poly * r + 1.6666665459e-1f;
    poly = poly * r + 5.0000001201e-1f;
    const float fraction = poly * r * r + r + 1.0f;
    const uint32_t exponent = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    return x > -87.0f ? fraction * float_from_bits(exponent) : 0.0f;
}

inline double exp_nonpositive(double x) { return std::exp(x); }

constexpr int LANES = 16;  // independent accumulators, so that reductions vectorise without reordering flags

template <class Real>
struct RowPeak {
    Real highest;
    int32_t status;  // 0, STATUS_TARGET_NOT_FINITE or STATUS_TARGET_EMPTY
};

template <class Real, class Stored>
RowPeak<Real> read_row(const Stored* in, int64_t width, Real* out) {
    constexpr Real infinity = std::numeric_limits<Real>::infinity();
    Real highest[LANES];
    int32_t invalid[LANES] = {};
    for (Real& lane : highest) lane = -infinity;
    auto take = [&](int64_t i, int lane) {
        const Real x = static_cast<Real>(to_real(in[i]));
        out[i] = x;
        highest[lane] = x > highest[lane] ? x : highest[lane];
        invalid[lane] |= x < infinity ? 0 : 1;  // NaN and +inf alike
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) take(i + lane, lane);
    }
    for (; i < width; ++i) take(i, 0);
    RowPeak<Real> peak = {-infinity, 0};
    int32_t any_invalid = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        peak.highest = highest[lane] > peak.highest ? highest[lane] : peak.highest;
        any_invalid |= invalid[lane];
    }
    if (any_invalid) {
        peak.status = STATUS_TARGET_NOT_FINITE;
    } else if (peak.highest == -infinity) {
        peak.status = STATUS_TARGET_EMPTY;
    }
    return peak;
}

// Copies a row into `out` in the accumulation dtype and says whether it is a usable distribution.
template <class Real>
RowPeak<Real> read_row(const LogitMatrix& logits, int64_t row, Real* out) {
    const int64_t offset = row * logits.row_stride, width = logits.width;
    switch (logits.dtype) {
        case Dtype::FLOAT32: return read_row(static_cast<const float*>(logits.data) + offset, width, out);
        case Dtype::FLOAT64: return read_row(static_cast<const double*>(logits.data) + offset, width, out);
        case Dtype::FLOAT16: return read_row(static_cast<const Half*>(logits.data) + offset, width, out);
        case Dtype::BFLOAT16: return read_row(static_cast<const Bfloat16*>(logits.data) + offset, width, out);
    }
    throw std::invalid_argument("unknown dtype of logits");
}

template <class Real>
int64_t find_first(const Real* row, int64_t width, Real value) {
    for (int64_t i = 0; i < width; ++i) {
        if (row[i] == value) return i;
    }
    return -1;
}

template <class Real>
double sum_row(const Real* row, int64_t width) {
    double sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += row[i + lane];
    }
    for (; i < width; ++i) sums[0] += row[i];
    double total = 0;
    for (double lane : sums) total += lane;
    return total;
}

template <class Real>
void divide_row(Real* row, int64_t width, double total) {
    const Real divisor = static_cast<Real>(total);
    for (int64_t i = 0; i < width; ++i) row[i] /= divisor;
}

// Logits to probabilities, in place. `highest` is finite and temperature above 0.
template <class Real>
void softmax_row(Real* row, int64_t width, Real highest, Real temperature) {
    for (int64_t i = 0; i < width; ++i) row[i] = exp_nonpositive((row[i] - highest) / temperature);
    divide_row(row, width, sum_row(row, width));
}

// Inverse CDF: the smallest id whose running sum exceeds coin * total, else the highest id with mass, else -1.
template <class Real>
int64_t draw_from_row(const Real* weights, int64_t width, double coin) {
    double total = 0;
    for (int64_t i = 0; i < width; ++i) total += weights[i];
    const double threshold = coin * total;
    double running = 0;
    int64_t highest = -1;
    for (int64_t i = 0; i < width; ++i) {
        if (!(weights[i] > 0)) continue;
        running += weights[i];
        if (running > threshold) return i;
        highest = i;
    }
    return highest;
}

}  // namespace viasd
