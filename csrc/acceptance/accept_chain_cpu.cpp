#include "acceptance/accept_chain_cpu.h"

#include <algorithm>
#include <vector>

#include "acceptance/accept_chain.h"
#include "sampling/node_laws.h"

namespace viasd {

namespace {

template <class Real>
SequenceVerdict verify_sequence(const AcceptChainInputs& in, int64_t b, NodeLaws<Real>& laws) {
    const int64_t first = in.row_start[b], num_rows = in.row_start[b + 1] - first;
    if (num_rows == 0) return {};
    const Real temperature = static_cast<Real>(in.temperature[b]);
    laws.start_sequence(first, temperature);
    const ChainRows rows = {in.row_tokens + first, in.uniforms + first, num_rows, in.target_logits.width,
                            in.draft_logits.data != nullptr};
    return walk_chain(rows, !(temperature > 0), laws);
}

template <class Real>
void accept_chains(const AcceptChainInputs& in, const AcceptChainOutputs& out, int num_threads) {
    const ThreadSplit team = share_threads(num_threads, in.num_sequences, in.num_rows, in.target_logits.width);
    const bool samples = has_sampled(in.temperature, in.num_sequences);
    std::vector<NodeLaws<Real>> laws;
    for (int worker = 0; worker < team.over_items; ++worker) {
        laws.emplace_back(in.target_logits, in.draft_logits, samples, team.within_row);
    }
    parallel_for(in.num_sequences, team.over_items, [&](int64_t b, int worker) {
        const SequenceVerdict verdict = verify_sequence(in, b, laws[worker]);
        out.num_accepted[b] = verdict.num_accepted;
        out.next_token[b] = verdict.next_token;
        out.status[b] = verdict.status;
    });
}

}  // namespace

void accept_chain_cpu(const AcceptChainInputs& in, const AcceptChainOutputs& out, int num_threads) {
    require_row_start(in.row_start, in.num_sequences, in.num_rows);
    if (is_double(in.target_logits) || is_double(in.draft_logits)) {
        accept_chains<double>(in, out, num_threads);
    } else {
        accept_chains<float>(in, out, num_threads);
    }
}

}  // namespace viasd
