// Target and proposal at the row under judgement, on the CPU; what the walks of chains and trees call `laws`.
#pragma once

#include "sampling/proposal.h"
#include "sampling/row_law.h"

namespace viasd {

// What is left of the target r and of the proposal d at the node under judgement. Memory for changed rows is taken only
// where rows are sampled.
template <class Real>
class NodeLaws {
  public:
    NodeLaws(const LogitMatrix& full_logits, const LogitMatrix& draft_logits, bool samples, int num_threads)
        : target_(full_logits, samples),
          draft_(draft_logits, samples),
          scratch_(full_logits, samples && draft_logits.data),
          num_threads_(num_threads) {}

    void start_sequence(int64_t first_row, Real temperature) {
        first_row_ = first_row;
        temperature_ = temperature;
    }

    int64_t argmax(int64_t node, int32_t* status) {
        const int32_t fatal = target_.open_peaks(first_row_ + node, num_threads_);
        *status |= fatal;
        return fatal ? -1 : target_.argmax();
    }

    int32_t open_target(int64_t node) { return target_.open(first_row_ + node, temperature_, num_threads_); }
    bool open_draft(int64_t node) { return draft_.open(first_row_ + node, temperature_, num_threads_) == 0; }
    double target_prob(int64_t token) const { return target_.prob(token); }
    double draft_prob(int64_t token) const { return token < draft_.row().width() ? draft_.prob(token) : 0.0; }
    int64_t draw(double coin) const { return target_.draw(coin); }

    bool reject(int64_t token, Proposal proposal) {
        target_.write_weights(num_threads_);
        if (proposal == Proposal::DETERMINISTIC) return target_.remove(token, true);
        draft_.write_weights(num_threads_);
        const bool has_mass = target_.subtract(draft_, scratch_, num_threads_);
        if (proposal == Proposal::WITHOUT_REPLACEMENT) draft_.remove(token, false);
        return has_mass;
    }

  private:
    RowLaw<Real> target_, draft_, scratch_;
    int num_threads_;
    int64_t first_row_ = 0;
    Real temperature_ = 1;
};

}  // namespace viasd
