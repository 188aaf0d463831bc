// The distribution of one row: softmax(logits / temperature), never written down unless a rejection changes it.
#pragma once

#include <limits>
#include <memory>

#include "sampling/scalar_math.h"
#include "threads.h"

namespace viasd {

// Inverse CDF among `count` weights: the smallest index whose running sum exceeds `threshold`, else the highest with
// mass, else -1. Sums of stretches skip what comes before the crossing.
template <class Real>
int64_t find_crossing(const Real* weights, int64_t count, double threshold) {
    constexpr int64_t STRETCH = 256;
    const RowKernels<Real>& kernels = row_kernels<Real>();
    double running = 0;
    for (int64_t first = 0; first < count; first += STRETCH) {
        const int64_t end = std::min(first + STRETCH, count);
        const double mass = kernels.sum(weights + first, end - first);
        if (running + mass > threshold) {
            double within = running;
            for (int64_t i = first; i < end; ++i) {
                within += weights[i];
                if (weights[i] > 0 && within > threshold) return i;
            }
        }
        running += mass;
    }
    int64_t highest = count - 1;
    while (highest >= 0 && !(weights[highest] > 0)) --highest;
    return highest;
}

template <class Real>
class RowLaw {
  public:
    // `can_change`: whether `write_weights` will be called. All memory is taken here: the rest does not throw.
    RowLaw(const LogitMatrix& logits, bool can_change)
        : logits_(logits),
          num_chunks_((logits.width + CHUNK - 1) / CHUNK),
          chunks_(new Chunk[num_chunks_]),
          weights_(can_change ? new Real[logits.width] : nullptr) {}

    // Only the highest logit of each chunk. Returns 0 or a fatal status: NaN or +inf in the row, or all of it -inf.
    int32_t open_peaks(int64_t row, int num_threads) {
        row_ = LogitRow<Real>(logits_, row);
        written_ = false;
        parallel_for(num_chunks_, num_threads, [&](int64_t c, int) {
            ChunkBuffer<Real> buffer;
            const Real* logits = row_.read(first(c), size(c), buffer.values);
            chunks_[c].peak = kernels_.peak(logits, size(c));
        });
        return find_status();
    }

    // Everything, in one pass over the logits: each chunk's weights are relative to its own highest logit.
    int32_t open(int64_t row, Real temperature, int num_threads) {
        row_ = LogitRow<Real>(logits_, row);
        written_ = false;
        temperature_ = temperature;
        parallel_for(num_chunks_, num_threads, [&](int64_t c, int) {
            ChunkBuffer<Real> buffer;
            const Real* logits = row_.read(first(c), size(c), buffer.values);
            const RowPeak<Real> peak = kernels_.peak(logits, size(c));
            const bool has_mass = !peak.invalid && peak.highest > -INFINITE;
            chunks_[c] = {peak, has_mass ? kernels_.sum_weights(logits, size(c), {peak.highest, temperature}) : 0, 1};
        });
        const int32_t status = find_status();
        if (status) return status;
        for (int64_t c = 0; c < num_chunks_; ++c) chunks_[c].scale = exp_nonpositive(scaled(chunks_[c].peak.highest));
        add_masses();
        return 0;
    }

    // Valid after either opening without a finding; ties go to the lower id.
    int64_t argmax() const {
        int64_t c = 0;
        while (chunks_[c].peak.highest != highest_) ++c;
        ChunkBuffer<Real> buffer;
        return first(c) + kernels_.find_first(row_.read(first(c), size(c), buffer.values), size(c), highest_);
    }

    // (logit - highest) / temperature, in the accumulation dtype.
    double scaled(Real logit) const { return (logit - highest_) / temperature_; }

    // Rounded to the accumulation dtype, in which it can be 0 where no logit is -inf.
    double prob(int64_t id) const {
        if (!written_) return static_cast<Real>(exp_nonpositive(scaled(row_.at(id))) / total_);
        return total_ > 0 ? static_cast<Real>(weights_[id] / total_) : 0;
    }

    // By the one sampling rule; -1 where nothing has mass.
    int64_t draw(double coin) const {
        const double threshold = coin * total_;
        double running = 0, before = 0;
        int64_t crossed = -1;
        for (int64_t c = 0; c < num_chunks_ && (crossed < 0 || running <= threshold); ++c) {
            if (!(chunks_[c].mass * chunks_[c].scale > 0)) continue;
            crossed = c;
            before = running;
            running += chunks_[c].mass * chunks_[c].scale;
        }
        if (crossed < 0) return -1;
        const Chunk& chunk = chunks_[crossed];
        const double within = (threshold - before) / chunk.scale;
        if (written_) return first(crossed) + find_crossing(&weights_[first(crossed)], size(crossed), within);
        ChunkBuffer<Real> buffer;
        const Real* logits = row_.read(first(crossed), size(crossed), buffer.values);
        kernels_.weigh(logits, size(crossed), {chunk.peak.highest, temperature_}, buffer.values);
        return first(crossed) + find_crossing(buffer.values, size(crossed), within);
    }

    // Writes the weights down, relative to the row's highest logit, so that they can be changed.
    void write_weights(int num_threads) {
        if (written_) return;
        written_ = true;
        parallel_for(num_chunks_, num_threads, [&](int64_t c, int) {
            Real* weights = &weights_[first(c)];
            const Real* logits = row_.read(first(c), size(c), weights);
            chunks_[c].mass = kernels_.weigh(logits, size(c), {highest_, temperature_}, weights);
            chunks_[c].scale = 1;
        });
        add_masses();
    }

    // id's written weight becomes 0; if nothing else is left and `keep_last`, it stays. Says whether anything is left.
    bool remove(int64_t id, bool keep_last) {
        const Real weight = weights_[id];
        const int64_t c = id / CHUNK;
        weights_[id] = 0;
        chunks_[c].mass = kernels_.sum(&weights_[first(c)], size(c));
        add_masses();
        if (total_ > 0) return true;
        if (keep_last) {
            weights_[id] = weight;
            chunks_[c].mass = weight;
            add_masses();
        }
        return false;
    }

    // This law, written, becomes norm(max(0, this - other)) if that has mass, and says so.
    bool subtract(const RowLaw& other, RowLaw& scratch, int num_threads) {
        const Real factor = static_cast<Real>(total_ / other.total_);
        parallel_for(num_chunks_, num_threads, [&](int64_t c, int) {
            const int64_t shared = std::clamp<int64_t>(other.logits_.width - first(c), 0, size(c));
            const Real *own = &weights_[first(c)], *taken = other.weights_.get() + first(c);
            Real* left = &scratch.weights_[first(c)];
            double mass = kernels_.subtract(own, taken, shared, factor, left);
            std::copy(own + shared, own + size(c), left + shared);
            mass += kernels_.sum(own + shared, size(c) - shared);
            scratch.chunks_[c].mass = mass;
            scratch.chunks_[c].scale = 1;
        });
        scratch.add_masses();
        if (!(scratch.total_ > 0)) return false;
        weights_.swap(scratch.weights_);
        chunks_.swap(scratch.chunks_);
        total_ = scratch.total_;
        return true;
    }

    // For the statistics, which read the logits themselves.
    const LogitRow<Real>& row() const { return row_; }
    RowScale<Real> scale() const { return {highest_, temperature_}; }
    double total() const { return total_; }
    int64_t num_chunks() const { return num_chunks_; }
    int64_t first(int64_t chunk) const { return chunk * CHUNK; }
    int64_t size(int64_t chunk) const { return std::min(CHUNK, logits_.width - chunk * CHUNK); }

  private:
    static constexpr Real INFINITE = std::numeric_limits<Real>::infinity();

    struct Chunk {
        RowPeak<Real> peak;
        double mass;   // sum of the chunk's weights
        double scale;  // what makes them weights relative to the row's highest logit
    };

    int32_t find_status() {
        highest_ = -INFINITE;
        int32_t invalid = 0;
        for (int64_t c = 0; c < num_chunks_; ++c) {
            highest_ = std::max(highest_, chunks_[c].peak.highest);
            invalid |= chunks_[c].peak.invalid;
        }
        if (invalid) return STATUS_TARGET_NOT_FINITE;
        return highest_ > -INFINITE ? 0 : STATUS_TARGET_EMPTY;
    }

    void add_masses() {
        total_ = 0;
        for (int64_t c = 0; c < num_chunks_; ++c) total_ += chunks_[c].mass * chunks_[c].scale;
    }

    LogitMatrix logits_;
    int64_t num_chunks_;
    std::unique_ptr<Chunk[]> chunks_;
    std::unique_ptr<Real[]> weights_;
    const RowKernels<Real>& kernels_ = row_kernels<Real>();
    LogitRow<Real> row_{logits_, 0};
    Real highest_ = 0, temperature_ = 1;
    double total_ = 0;
    bool written_ = false;
};

}  // namespace viasd
