#include "tree_verify/tree_verify_cpu.h"

#include <algorithm>
#include <vector>

#include "sampling/node_laws.h"

namespace viasd {

namespace {

template <class Real>
SequenceVerdict verify_sequence(const VerifyTreeInputs& in, const TreeRows& rows, int64_t first_row, Real temperature,
                                NodeLaws<Real>& laws, int32_t* path) {
    laws.start_sequence(first_row, temperature);
    if (temperature > 0) {
        if (in.full_logits.data) return walk_sampled(rows, in.uniforms + first_row, in.proposal, laws, path);
        SequenceVerdict nothing_to_sample;
        path[0] = 0;
        nothing_to_sample.status = STATUS_TARGET_EMPTY;
        return nothing_to_sample;
    }
    if (!in.full_argmax) return walk_greedy(rows, laws, path);
    GivenArgmax given = {in.full_argmax + first_row, rows.vocab};
    return walk_greedy(rows, given, path);
}

template <class Real>
void verify_sequences(const VerifyTreeInputs& in, const VerifyTreeOutputs& out, int num_threads) {
    const int64_t width = in.full_logits.width;
    const int64_t vocab = in.full_logits.data ? width : UNKNOWN_VOCAB;
    const ThreadSplit team = share_threads(num_threads, in.num_sequences, in.num_rows, width);
    const bool samples = has_sampled(in.temperature, in.num_sequences);
    std::vector<NodeLaws<Real>> laws;
    for (int worker = 0; worker < team.over_items; ++worker) {
        laws.emplace_back(in.full_logits, in.draft_logits, samples, team.within_row);
    }
    std::fill_n(out.path, in.num_rows, NO_ROW);
    parallel_for(in.num_sequences, team.over_items, [&](int64_t b, int worker) {
        const int64_t first = in.row_start[b], num_rows = in.row_start[b + 1] - first;
        SequenceVerdict verdict;
        if (num_rows > 0) {
            const TreeRows rows = {in.depth + first,
                                   in.first_child + first,
                                   in.next_sibling + first,
                                   in.row_tokens + first,
                                   num_rows,
                                   vocab};
            const Real temperature = static_cast<Real>(in.temperature[b]);
            verdict = verify_sequence(in, rows, first, temperature, laws[worker], out.path + first);
            for (int64_t row = 0; row < num_rows; ++row) verdict.status |= inspect_row(rows, row);
        }
        out.num_accepted[b] = verdict.num_accepted;
        out.next_token[b] = verdict.next_token;
        out.status[b] = verdict.status;
    });
}

}  // namespace

void build_tree_cpu(const int64_t* parents, const int64_t* row_start, int64_t num_sequences, int64_t num_rows,
                    int64_t max_rows, TreeLinks tree) {
    require_row_start(row_start, num_sequences, num_rows);
    const int64_t num_words = (max_rows + 63) / 64;
    for (int64_t b = 0; b < num_sequences; ++b) {
        const int64_t first = row_start[b];
        const TreeLinks links = {tree.ancestors + first * num_words, tree.depth + first, tree.first_child + first,
                                 tree.next_sibling + first};
        build_tree_sequence(parents + first, row_start[b + 1] - first, max_rows, num_words, links);
    }
}

void verify_tree_cpu(const VerifyTreeInputs& in, const VerifyTreeOutputs& out, int num_threads) {
    require_row_start(in.row_start, in.num_sequences, in.num_rows);
    if (in.full_logits.data && (is_double(in.full_logits) || is_double(in.draft_logits))) {
        verify_sequences<double>(in, out, num_threads);
    } else {
        verify_sequences<float>(in, out, num_threads);
    }
}

}  // namespace viasd
