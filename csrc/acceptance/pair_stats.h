// The statistics of a draft row p and a target row q, and of a token judged under them: two passes over the logits.
#pragma once

#include <limits>
#include <memory>

#include "sampling/row_law.h"

namespace viasd {

// The order of the rows of the packed statistics (viasd_kernels/acceptance/op.py).
enum Stat {
    STAT_KL_DRAFT_TARGET,
    STAT_KL_TARGET_DRAFT,
    STAT_TV,
    STAT_COST,
    STAT_RATIO,
    STAT_DRAFT_LOGPROB,
    STAT_TARGET_LOGPROB,
    STAT_DRAFT_ENTROPY,
    STAT_TARGET_ENTROPY,
    NUM_STATS,
};

struct CostOptions {
    double alpha = 0.5;
    double beta = 0.3;
    bool undershoot = false;
};

// Everything is NaN (the argmax -1) until a row says otherwise.
template <class Real>
struct RowStats {
    Real value[NUM_STATS];
    int32_t target_argmax = -1;
    int32_t target_status = 0;
    int32_t draft_status = 0;

    RowStats() {
        for (Real& each : value) each = std::numeric_limits<Real>::quiet_NaN();
    }
};

template <class Real>
class PairStats {
  public:
    // Without draft logits, what needs them stays NaN. All memory is taken here.
    PairStats(const LogitMatrix& draft_logits, const LogitMatrix& target_logits, int num_threads)
        : draft_(draft_logits, false),
          target_(target_logits, false),
          has_draft_(draft_logits.data),
          sums_(new Sums[target_.num_chunks()]),
          num_threads_(num_threads) {}

    // Row `row` of both; an id outside the target's vocabulary has no statistics. Temperature 0 counts as 1.
    RowStats<Real> judge(int64_t row, int64_t token, Real temperature, const CostOptions& options) {
        if (temperature == 0) temperature = 1;
        RowStats<Real> stats;
        const bool has_token = token >= 0 && token < target_.row().width();
        stats.target_status = target_.open(row, temperature, num_threads_);
        if (!stats.target_status) {
            stats.target_argmax = static_cast<int32_t>(target_.argmax());
            if (has_token) {
                const double logit = target_.scaled(target_.row().at(token));
                stats.value[STAT_RATIO] = static_cast<Real>(exp_nonpositive(logit));
                stats.value[STAT_TARGET_LOGPROB] = static_cast<Real>(logit - log_positive(target_.total()));
            }
        }
        if (has_draft_) {
            stats.draft_status = draft_.open(row, temperature, num_threads_);
            if (!stats.draft_status && has_token) stats.value[STAT_DRAFT_LOGPROB] = draft_logprob(token);
        }
        const bool use_target = !stats.target_status, use_draft = has_draft_ && !stats.draft_status;
        if (use_target && use_draft) {
            compare(options, stats);
        } else if (use_target) {
            stats.value[STAT_TARGET_ENTROPY] = entropy(target_);
        } else if (use_draft) {
            stats.value[STAT_DRAFT_ENTROPY] = entropy(draft_);
        }
        return stats;
    }

    // As `judge` left it, or opened by the caller since.
    RowLaw<Real>& target() { return target_; }

  private:
    // Half the smallest positive number, where exp begins to round to it: log(2^-150) or log(2^-1075).
    static constexpr double LOG_SMALLEST = sizeof(Real) == 8 ? -745.13321910194122 : -103.97207708399179;

    struct Sums {
        double sum[NUM_PAIR_SUMS];
    };

    Real draft_logprob(int64_t token) const {
        if (token >= draft_.row().width()) return -std::numeric_limits<Real>::infinity();
        return static_cast<Real>(draft_.scaled(draft_.row().at(token)) - log_positive(draft_.total()));
    }

    // - sum p log p = log(total) - sum of weight * scaled logit / total: nothing cancels.
    static Real entropy_of(const RowLaw<Real>& law, double weighted_logits) {
        return static_cast<Real>(log_positive(law.total()) - weighted_logits / law.total());
    }

    Real entropy(const RowLaw<Real>& law) {
        parallel_for(law.num_chunks(), num_threads_, [&](int64_t c, int) {
            ChunkBuffer<Real> buffer;
            const Real* logits = law.row().read(law.first(c), law.size(c), buffer.values);
            sums_[c].sum[0] = kernels_.sum_weighted_logits(logits, law.size(c), law.scale());
        });
        double weighted_logits = 0;
        for (int64_t c = 0; c < law.num_chunks(); ++c) weighted_logits += sums_[c].sum[0];
        return entropy_of(law, weighted_logits);
    }

    // The draft's logits of a chunk of the target's, -inf past the end of its own vocabulary.
    const Real* read_draft(int64_t first, int64_t size, Real* buffer) const {
        const int64_t known = std::clamp<int64_t>(draft_.row().width() - first, 0, size);
        const Real* logits = known > 0 ? draft_.row().read(first, known, buffer) : buffer;
        if (known == size) return logits;
        if (logits != buffer) std::copy(logits, logits + known, buffer);
        std::fill(buffer + known, buffer + size, -std::numeric_limits<Real>::infinity());
        return buffer;
    }

    void compare(const CostOptions& options, RowStats<Real>& stats) {
        RowPair<Real> pair;
        pair.draft = draft_.scale();
        pair.target = target_.scale();
        pair.total_ratio = static_cast<Real>(draft_.total() / target_.total());
        pair.log_shift = static_cast<Real>(log_positive(draft_.total() / target_.total()));
        pair.draft_floor = static_cast<Real>(LOG_SMALLEST + log_positive(draft_.total()));
        pair.target_floor = static_cast<Real>(LOG_SMALLEST + log_positive(target_.total()));
        pair.log_keep = static_cast<Real>(log_positive(1 - options.alpha));
        pair.log_beta = static_cast<Real>(log_positive(options.beta));
        pair.second_sign = options.undershoot ? -1 : 1;
        parallel_for(target_.num_chunks(), num_threads_, [&](int64_t c, int) {
            ChunkBuffer<Real> draft_buffer, target_buffer;
            const int64_t first = target_.first(c), size = target_.size(c);
            const Real* draft = read_draft(first, size, draft_buffer.values);
            const Real* target = target_.row().read(first, size, target_buffer.values);
            kernels_.pair_sums(draft, target, size, pair, sums_[c].sum);
        });
        double sum[NUM_PAIR_SUMS] = {};
        for (int64_t c = 0; c < target_.num_chunks(); ++c) {
            for (int which = 0; which < NUM_PAIR_SUMS; ++which) sum[which] += sums_[c].sum[which];
        }
        const double of_draft = 1 / draft_.total(), of_target = 1 / target_.total();
        stats.value[STAT_KL_DRAFT_TARGET] = static_cast<Real>(sum[SUM_KL_DRAFT_TARGET] * of_draft);
        stats.value[STAT_KL_TARGET_DRAFT] = static_cast<Real>(sum[SUM_KL_TARGET_DRAFT] * of_target);
        stats.value[STAT_TV] = static_cast<Real>(sum[SUM_DIFFERENCE] * of_draft / 2);
        stats.value[STAT_COST] = static_cast<Real>(sum[SUM_COST_DRAFT] * of_draft + sum[SUM_COST_TARGET] * of_target);
        stats.value[STAT_DRAFT_ENTROPY] = entropy_of(draft_, sum[SUM_DRAFT_LOGITS]);
        stats.value[STAT_TARGET_ENTROPY] = entropy_of(target_, sum[SUM_TARGET_LOGITS]);
    }

    RowLaw<Real> draft_, target_;
    bool has_draft_;
    std::unique_ptr<Sums[]> sums_;
    const RowKernels<Real>& kernels_ = row_kernels<Real>();
    int num_threads_;
};

// Where a call's statistics go: NUM_STATS rows of num_rows numbers of type Real, and the argmax of each target row.
struct StatsOutputs {
    void* stats;
    int32_t* target_argmax;
    int64_t num_rows;

    template <class Real>
    void write(int64_t row, const RowStats<Real>& found) const {
        for (int which = 0; which < NUM_STATS; ++which) {
            static_cast<Real*>(stats)[which * num_rows + row] = found.value[which];
        }
        target_argmax[row] = found.target_argmax;
    }
};

}  // namespace viasd
