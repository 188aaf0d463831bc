// What the walks of chains and trees call `laws`, for a team of threads: target and proposal at the row under
// judgement. Rows are read once each; only a rejection in a tree writes weights down, into memory that the caller
// gives.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "sampling/proposal.h"
#include "sampling/team.h"
#include "status.h"

namespace viasd {

// A [num_rows, width] matrix of logits.
template <class T>
struct TeamMatrix {
    const T* data;
    int64_t row_stride;
    int64_t width;
};

// softmax(logits / temperature) of one row, and what rejections left of it.
template <class T, class Team>
class TeamRow {
  public:
    HOST_DEVICE TeamRow(Team& team, const TeamMatrix<T>& logits, float* weights)
        : team_(team), logits_(logits), weights_(weights) {}

    // The highest logit and the sum of the weights. 0, or a fatal status: NaN or +inf in the row, or all of it -inf.
    HOST_DEVICE int32_t open(int64_t row, float temperature) {
        select(row);
        inverse_temperature_ = 1 / fmaxf(temperature, FLT_MIN);  // finite, as 0 times infinity is no weight
        float highest = -infinity(), sum = 0;
        int32_t broken = 0;
        visit_row(team_, row_, logits_.width, [&](int64_t, float x) {
            if (!(x < infinity())) {
                broken = 1;
            } else if (x > highest) {
                sum = sum * expf((highest - x) * inverse_temperature_) + 1;
                highest = x;
            } else if (x > -infinity()) {
                sum += expf((x - highest) * inverse_temperature_);
            }
        });
        const int32_t status = close(highest, broken);
        if (status) return status;
        const double mass = highest > -infinity() ? sum * expf((highest - highest_) * inverse_temperature_) : 0;
        total_ = team_.all_reduce(mass, Sum());
        return 0;
    }

    // The lowest id of the highest logit, or -1 with a fatal status.
    HOST_DEVICE int64_t argmax(int64_t row, int32_t* status) {
        select(row);
        float highest = -infinity();
        int64_t where = logits_.width;
        int32_t broken = 0;
        visit_row(team_, row_, logits_.width, [&](int64_t id, float x) {
            if (!(x < infinity())) {
                broken = 1;
            } else if (x > highest) {
                highest = x;
                where = id;
            }
        });
        const int32_t found = close(highest, broken);
        *status |= found;
        const int64_t lowest = team_.all_reduce(highest == highest_ ? where : logits_.width, Smaller());
        return found ? -1 : lowest;
    }

    HOST_DEVICE double prob(int64_t id) const {
        return id < logits_.width && total_ > 0 ? static_cast<float>(weight(id) / total_) : 0.0;
    }

    // Writes the weights down, so that they can be changed.
    HOST_DEVICE void write_weights() {
        if (written_) return;
        visit_row(team_, row_, logits_.width, [&](int64_t id, float x) { weights_[id] = weight_of(x); });
        written_ = true;
        team_.sync();
        total_ = sum_weights();
    }

    // id's written weight becomes 0; if nothing else is left and `keep_last`, it stays. Says whether anything is left.
    HOST_DEVICE bool remove(int64_t id, bool keep_last) {
        const float own = weights_[id];
        const double total = total_;
        team_.sync();
        if (team_.rank() == 0) weights_[id] = 0;
        team_.sync();
        total_ = sum_weights();
        if (total_ > 0) return true;
        if (keep_last) {
            if (team_.rank() == 0) weights_[id] = own;
            total_ = total;
            team_.sync();
        }
        return false;
    }

    // This law, written, becomes norm(max(0, this - other)) if that has mass, and says so.
    HOST_DEVICE bool subtract(const TeamRow& other) {
        const float factor = static_cast<float>(total_ / other.total_);
        const auto left = [&](int64_t id) {
            const float taken = id < other.logits_.width ? factor * other.weights_[id] : 0;
            return weights_[id] > taken ? weights_[id] - taken : 0;
        };
        double mass = 0;
        for (int64_t id = team_.rank(); id < logits_.width; id += team_.size()) mass += left(id);
        mass = team_.all_reduce(mass, Sum());
        if (!(mass > 0)) return false;
        for (int64_t id = team_.rank(); id < logits_.width; id += team_.size()) weights_[id] = left(id);
        team_.sync();
        total_ = mass;
        return true;
    }

    // By the one sampling rule. Each member sums a stretch; the coin falls into one of them.
    HOST_DEVICE int64_t draw(double coin) {
        const int64_t stretch = (logits_.width + team_.size() - 1) / team_.size();
        const int64_t first = stretch * team_.rank(), past = first + stretch;
        const int64_t end = past < logits_.width ? past : logits_.width;
        double own = 0;
        for (int64_t id = first; id < end; ++id) own += weight(id);
        const TeamScan scan = team_.scan(own);
        const double threshold = coin * scan.total;
        const bool has_mass = own > 0;
        const int nobody = team_.size();
        const int crossing =
            team_.all_reduce(has_mass && scan.before + own > threshold ? team_.rank() : nobody, Smaller());
        const int last = team_.all_reduce(has_mass ? team_.rank() : -1, Larger());
        int64_t drawn = -1;
        if (team_.rank() == (crossing < nobody ? crossing : last)) {
            double running = scan.before;
            for (int64_t id = first; id < end && (drawn < 0 || running <= threshold); ++id) {
                const float mass = weight(id);
                running += mass;
                if (mass > 0) drawn = id;
            }
        }
        return team_.all_reduce(drawn, Larger());
    }

  private:
    HOST_DEVICE static constexpr float infinity() { return __builtin_huge_valf(); }

    HOST_DEVICE void select(int64_t row) {
        row_ = logits_.data + row * logits_.row_stride;
        written_ = false;
        total_ = 0;
    }

    HOST_DEVICE int32_t close(float highest, int32_t broken) {
        highest_ = team_.all_reduce(highest, Larger());
        if (team_.all_reduce(broken, Larger())) return STATUS_TARGET_NOT_FINITE;
        return highest_ > -infinity() ? 0 : STATUS_TARGET_EMPTY;
    }

    HOST_DEVICE float weight_of(float x) const {
        return x > -infinity() ? expf((x - highest_) * inverse_temperature_) : 0;
    }

    HOST_DEVICE float weight(int64_t id) const { return written_ ? weights_[id] : weight_of(to_float(row_[id])); }

    HOST_DEVICE double sum_weights() {
        double mass = 0;
        for (int64_t id = team_.rank(); id < logits_.width; id += team_.size()) mass += weights_[id];
        return team_.all_reduce(mass, Sum());
    }

    Team& team_;
    TeamMatrix<T> logits_;
    float* weights_;  // [width]
    const T* row_ = nullptr;
    float highest_ = 0, inverse_temperature_ = 1;
    double total_ = 0;
    bool written_ = false;
};

template <class T, class Team>
class TeamLaws {
  public:
    // `weights` has room for a target row and a draft row.
    HOST_DEVICE TeamLaws(Team& team, const TeamMatrix<T>& target, const TeamMatrix<T>& draft, float* weights,
                         int64_t first_row, float temperature)
        : target_(team, target, weights),
          draft_(team, draft, weights + target.width),
          first_row_(first_row),
          temperature_(temperature) {}

    HOST_DEVICE int64_t argmax(int64_t node, int32_t* status) { return target_.argmax(first_row_ + node, status); }
    HOST_DEVICE int32_t open_target(int64_t node) { return target_.open(first_row_ + node, temperature_); }
    HOST_DEVICE bool open_draft(int64_t node) { return draft_.open(first_row_ + node, temperature_) == 0; }
    HOST_DEVICE double target_prob(int64_t token) const { return target_.prob(token); }
    HOST_DEVICE double draft_prob(int64_t token) const { return draft_.prob(token); }
    HOST_DEVICE int64_t draw(double coin) { return target_.draw(coin); }

    HOST_DEVICE bool reject(int64_t token, Proposal proposal) {
        target_.write_weights();
        if (proposal == Proposal::DETERMINISTIC) return target_.remove(token, true);
        draft_.write_weights();
        const bool has_mass = target_.subtract(draft_);
        if (proposal == Proposal::WITHOUT_REPLACEMENT) draft_.remove(token, false);
        return has_mass;
    }

  private:
    TeamRow<T, Team> target_, draft_;
    int64_t first_row_;
    float temperature_;
};

}  // namespace viasd
