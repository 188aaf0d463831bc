// Target and proposal at the row under judgement, on the CPU; what the walks of chains and trees call `laws`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "sampling/logit_rows.h"
#include "sampling/proposal.h"

namespace viasd {

// Rows are addressed through row_start, so a wrong one must not get as far as memory.
inline void require_row_start(const int64_t* row_start, int64_t num_sequences, int64_t num_rows) {
    const bool ascending = std::is_sorted(row_start, row_start + num_sequences + 1);
    if (!ascending || row_start[0] != 0 || row_start[num_sequences] != num_rows) {
        throw std::invalid_argument("row_start must run from 0 to the number of rows, ascending");
    }
}

// What is left of the target r and of the proposal d at the node under judgement.
template <class Real>
class NodeLaws {
  public:
    NodeLaws(const LogitMatrix& full_logits, const LogitMatrix& draft_logits)
        : full_logits_(full_logits), draft_logits_(draft_logits) {}

    void start_sequence(int64_t first_row, Real temperature) {
        first_row_ = first_row;
        temperature_ = temperature;
    }

    int64_t argmax(int64_t node, int32_t* status) {
        const RowPeak<Real> peak = read_target(node);
        *status |= peak.status;
        return peak.status ? -1 : find_first(target_.data(), full_logits_.width, peak.highest);
    }

    int32_t open_target(int64_t node) {
        const RowPeak<Real> peak = read_target(node);
        if (!peak.status) softmax_row(target_.data(), full_logits_.width, peak.highest, temperature_);
        return peak.status;
    }

    bool open_draft(int64_t node) {
        draft_.resize(draft_logits_.width);
        const RowPeak<Real> peak = read_row(draft_logits_, first_row_ + node, draft_.data());
        if (peak.status) return false;
        softmax_row(draft_.data(), draft_logits_.width, peak.highest, temperature_);
        return true;
    }

    double target_prob(int64_t token) const { return target_[token]; }
    double draft_prob(int64_t token) const { return token < draft_logits_.width ? draft_[token] : 0.0; }
    int64_t draw(double coin) const { return draw_from_row(target_.data(), full_logits_.width, coin); }

    bool reject(int64_t token, Proposal proposal) {
        residual_ = target_;
        if (proposal == Proposal::DETERMINISTIC) {
            residual_[token] = 0;
        } else {
            for (int64_t i = 0; i < draft_logits_.width; ++i) {
                const Real left = residual_[i] - draft_[i];
                residual_[i] = left > 0 ? left : 0;
            }
        }
        const double mass = sum_row(residual_.data(), full_logits_.width);
        if (mass > 0) {
            divide_row(residual_.data(), full_logits_.width, mass);
            target_.swap(residual_);
        }
        if (proposal == Proposal::WITHOUT_REPLACEMENT) {
            draft_[token] = 0;
            const double draft_mass = sum_row(draft_.data(), draft_logits_.width);
            if (draft_mass > 0) divide_row(draft_.data(), draft_logits_.width, draft_mass);
        }
        return mass > 0;
    }

  private:
    RowPeak<Real> read_target(int64_t node) {
        target_.resize(full_logits_.width);
        return read_row(full_logits_, first_row_ + node, target_.data());
    }

    const LogitMatrix full_logits_, draft_logits_;
    int64_t first_row_ = 0;
    Real temperature_ = 0;
    std::vector<Real> target_, draft_, residual_;
};

}  // namespace viasd
