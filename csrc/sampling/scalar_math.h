// exp and log of single numbers in float64, with the same bits on every machine: those of the C library differ between
// its versions, and between processors with and without fused multiply-adds.
#pragma once

#include <cmath>

#include "sampling/logit_rows.h"

namespace viasd {

// x <= 0; as the row kernels compute it: within 1.1 units in the last place, 0 below -600.
inline double exp_nonpositive(double x) {
    double result;
    row_kernels<double>().weigh(&x, 1, {0, 1}, &result);
    return result;
}

// x > 0; within 2 units in the last place: x = 2^e (1 + s) / (1 - s), log x = e log 2 + 2 (s + s^3 / 3 + s^5 / 5 +
// ...).
inline double log_positive(double x) {
    constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 1.9082149292705878161e-10;
    constexpr int TERMS = 12;  // |s| < 0.172
    int exponent;
    double mantissa = std::frexp(x, &exponent);
    if (mantissa < 0.70710678118654752) {
        mantissa *= 2;
        --exponent;
    }
    const double s = (mantissa - 1) / (mantissa + 1), square = s * s;
    double series = 0;
    for (int term = TERMS; term > 0; --term) series = (series + 2.0 / (2 * term + 1)) * square;
    return exponent * LN2_HIGH + ((series * s + exponent * LN2_LOW) + 2 * s);
}

}  // namespace viasd
