// The loops over parts of a row of logits: one thread, any length. Compiled for several processors with the same
// results, bit for bit (row_kernels.inc). No function may be defined here: it would be compiled with the variants'
// flags, and the linker may keep any one of the copies.
#pragma once

#include <stdint.h>

namespace viasd {

enum class Dtype : int32_t { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

template <class Real>
struct RowPeak {
    Real highest;     // of what is not NaN; -inf for a row of nothing else
    int32_t invalid;  // not 0: there is a NaN or +inf
};

// One row turned into weights: exp((logit - highest) / temperature).
template <class Real>
struct RowScale {
    Real highest;
    Real temperature;
};

// A row p of a drafter and a row q of a target; what `pair_sums` needs to know of both.
template <class Real>
struct RowPair {
    RowScale<Real> draft;
    RowScale<Real> target;
    Real total_ratio;  // total of the draft's weights / total of the target's
    Real log_shift;    // its logarithm: log p - log q is the difference of the scaled logits less this
    Real draft_floor;  // a scaled logit above it is a probability above 0 in Real, however small
    Real target_floor;
    Real log_keep;     // log(1 - alpha) of the cost's first term
    Real log_beta;     // of its second
    Real second_sign;  // +1: overshoot, -1: undershoot
};

// What `pair_sums` adds up; w are weights, s scaled logits, 0 * anything = 0.
enum PairSum {
    SUM_KL_DRAFT_TARGET,  // w_p (log p - log q)
    SUM_KL_TARGET_DRAFT,  // w_q (log q - log p)
    SUM_DIFFERENCE,       // |w_p - total_ratio w_q|, which is |p - q| times the draft's total
    SUM_COST_DRAFT,       // w_p relu(log_keep + log p - log q)
    SUM_COST_TARGET,      // w_q relu(log_beta +- (log p - log q))
    SUM_DRAFT_LOGITS,     // w_p s_p
    SUM_TARGET_LOGITS,    // w_q s_q
    NUM_PAIR_SUMS,
};

template <class Real>
struct RowKernels {
    // Logits of a dtype (the index) to Real.
    void (*read[4])(const void* stored, int64_t count, Real* out);
    RowPeak<Real> (*peak)(const Real* logits, int64_t count);
    // The lowest index that holds `value`, -1 for none.
    int64_t (*find_first)(const Real* row, int64_t count, Real value);
    // Sum of the weights, in float64; `weigh` stores them too.
    double (*sum_weights)(const Real* logits, int64_t count, RowScale<Real> scale);
    double (*weigh)(const Real* logits, int64_t count, RowScale<Real> scale, Real* weights);
    // Sum in float64.
    double (*sum)(const Real* row, int64_t count);
    // remaining = max(0, weights - factor * subtracted); returns its sum.
    double (*subtract)(const Real* weights, const Real* subtracted, int64_t count, Real factor, Real* remaining);
    // Sum of weight times scaled logit.
    double (*sum_weighted_logits)(const Real* logits, int64_t count, RowScale<Real> scale);
    void (*pair_sums)(const Real* draft, const Real* target, int64_t count, const RowPair<Real>& pair, double* sums);
};

struct RowKernelTable {
    RowKernels<float> for_float;
    RowKernels<double> for_double;
};

extern const RowKernelTable row_kernels_portable;
#ifdef __x86_64__
extern const RowKernelTable row_kernels_avx2, row_kernels_avx512;
#endif

}  // namespace viasd
