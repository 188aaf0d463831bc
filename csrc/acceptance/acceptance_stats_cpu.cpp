#include "acceptance/acceptance_stats_cpu.h"

#include <vector>

namespace viasd {

namespace {

template <class Real>
void judge_rows(const AcceptanceStatsInputs& in, const StatsOutputs& out, int num_threads) {
    const int64_t both_widths = in.draft_logits.width + in.target_logits.width;
    const ThreadSplit team = share_threads(num_threads, out.num_rows, out.num_rows, both_widths);
    std::vector<PairStats<Real>> pairs;
    for (int worker = 0; worker < team.over_items; ++worker) {
        pairs.emplace_back(in.draft_logits, in.target_logits, team.within_row);
    }
    parallel_for(out.num_rows, team.over_items, [&](int64_t row, int worker) {
        const Real temperature = static_cast<Real>(in.temperature[row]);
        out.write(row, pairs[worker].judge(row, in.tokens[row], temperature, in.options));
    });
}

}  // namespace

void acceptance_stats_cpu(const AcceptanceStatsInputs& in, const StatsOutputs& out, int num_threads) {
    if (is_double(in.target_logits) || is_double(in.draft_logits)) {
        judge_rows<double>(in, out, num_threads);
    } else {
        judge_rows<float>(in, out, num_threads);
    }
}

}  // namespace viasd
