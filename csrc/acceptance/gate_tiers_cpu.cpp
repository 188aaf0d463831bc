#include "acceptance/gate_tiers_cpu.h"

#include <cmath>
#include <vector>

namespace viasd {

namespace {

// Rows of slim and draft logits as the walk asks for them: judged at temperature 1, drawn from at the sequence's.
template <class Real>
class GateLaws {
  public:
    GateLaws(const GateTiersInputs& in, const StatsOutputs& out, int num_threads)
        : pair_(in.draft_logits, in.slim_logits, num_threads),
          criterion_(in.criterion),
          needs_draft_(in.criterion != Criterion::RATIO),
          out_(out),
          num_threads_(num_threads) {}

    void start_sequence(int64_t first_row, Real temperature) {
        first_row_ = first_row;
        temperature_ = temperature;
    }

    GateFinding<Real> judge(int64_t node, int64_t token) {
        const RowStats<Real> stats = pair_.judge(first_row_ + node, token, 1, {});
        out_.write(first_row_ + node, stats);
        int32_t status = stats.target_status;
        if (!status && needs_draft_ && stats.draft_status) status = STATUS_DRAFT_INVALID;
        const Stat statistics[] = {STAT_RATIO, STAT_TV, STAT_KL_DRAFT_TARGET};
        return {status, std::isinf(stats.value[STAT_TARGET_LOGPROB]),
                stats.value[statistics[static_cast<int>(criterion_)]]};
    }

    int64_t draw(int64_t node, double coin, int32_t* status) {
        RowLaw<Real>& slim = pair_.target();
        const bool greedy = !(temperature_ > 0);
        const int64_t row = first_row_ + node;
        const int32_t fatal = greedy ? slim.open_peaks(row, num_threads_) : slim.open(row, temperature_, num_threads_);
        *status |= fatal;
        if (fatal) return -1;
        return greedy ? slim.argmax() : slim.draw(coin);
    }

  private:
    PairStats<Real> pair_;
    Criterion criterion_;
    bool needs_draft_;
    StatsOutputs out_;
    int num_threads_;
    int64_t first_row_ = 0;
    Real temperature_ = 1;
};

template <class Real>
GateOutcome walk_sequence(const GateTiersInputs& in, const GateTiersOutputs& out, int64_t b, GateLaws<Real>& laws) {
    const int64_t first = in.row_start[b], num_rows = in.row_start[b + 1] - first;
    for (int64_t row = first; row < first + num_rows; ++row) {
        out.tokens[row] = -1;
        out.regions[row] = static_cast<int8_t>(Region::NOT_WALKED);
        out.stats.write(row, RowStats<Real>());
    }
    if (num_rows == 0) return {};
    laws.start_sequence(first, static_cast<Real>(in.temperature[b]));
    const GateRows rows = {in.row_tokens + first, in.uniforms + first, num_rows, in.slim_logits.width};
    const GateRule<Real> rule = {in.criterion, static_cast<Real>(in.accept[b]), static_cast<Real>(in.escalate[b])};
    return walk_gate(rows, rule, laws, out.tokens + first, out.regions + first);
}

template <class Real>
void walk_sequences(const GateTiersInputs& in, const GateTiersOutputs& out, int num_threads) {
    const int64_t both_widths = in.draft_logits.width + in.slim_logits.width;
    const ThreadSplit team = share_threads(num_threads, in.num_sequences, in.num_rows, both_widths);
    std::vector<GateLaws<Real>> laws;
    for (int worker = 0; worker < team.over_items; ++worker) laws.emplace_back(in, out.stats, team.within_row);
    parallel_for(in.num_sequences, team.over_items, [&](int64_t b, int worker) {
        const GateOutcome outcome = walk_sequence(in, out, b, laws[worker]);
        out.num_emitted[b] = outcome.num_emitted;
        out.escalate[b] = outcome.escalate;
        out.status[b] = outcome.status;
    });
}

}  // namespace

void gate_tiers_cpu(const GateTiersInputs& in, const GateTiersOutputs& out, int num_threads) {
    require_row_start(in.row_start, in.num_sequences, in.num_rows);
    if (is_double(in.slim_logits) || is_double(in.draft_logits)) {
        walk_sequences<double>(in, out, num_threads);
    } else {
        walk_sequences<float>(in, out, num_threads);
    }
}

}  // namespace viasd
