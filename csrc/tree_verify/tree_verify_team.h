// build_tree, verify_tree and compact_kv by teams of threads, one for a sequence (compact_kv: and a cache). The walks
// are those of tree_verify.h; members take the same steps and share what reads rows of logits or moves keys.
#pragma once

#include "sampling/team_laws.h"
#include "tree_verify/compact_kv.h"
#include "tree_verify/tree_verify.h"

namespace viasd {

template <class T>
struct VerifyTreeTask {
    const int32_t* depth;  // [R], as the next six
    const int32_t* first_child;
    const int32_t* next_sibling;
    const int64_t* row_tokens;
    const int64_t* full_argmax;  // null where the caller gave none
    const double* uniforms;
    int32_t* path;
    const int64_t* row_start;   // [B + 1]
    const double* temperature;  // [B]
    TeamMatrix<T> full_logits;  // data is null where the caller gave none
    TeamMatrix<T> draft_logits;
    Proposal proposal;
    float* weights;         // [B, V + Vd]
    int32_t* num_accepted;  // [B], as the others
    int32_t* next_token;
    int32_t* status;
};

template <class T, class Team>
HOST_DEVICE inline SequenceVerdict walk_tree(Team& team, const VerifyTreeTask<T>& task, const TreeRows& rows, int64_t b,
                                             int64_t first, int32_t* path) {
    const float temperature = static_cast<float>(task.temperature[b]);
    const bool greedy = !(temperature > 0);
    if (greedy && task.full_argmax) {
        GivenArgmax given = {task.full_argmax + first, rows.vocab};
        return walk_greedy(rows, given, path);
    }
    if (!task.full_logits.data) {
        SequenceVerdict nothing_to_sample;
        path[0] = 0;
        nothing_to_sample.status = STATUS_TARGET_EMPTY;
        return nothing_to_sample;
    }
    float* weights = task.weights + b * (task.full_logits.width + task.draft_logits.width);
    TeamLaws<T, Team> laws(team, task.full_logits, task.draft_logits, weights, first, temperature);
    if (greedy) return walk_greedy(rows, laws, path);
    return walk_sampled(rows, task.uniforms + first, task.proposal, laws, path);
}

template <class T, class Team>
HOST_DEVICE inline void verify_tree_sequence(Team& team, const VerifyTreeTask<T>& task, int64_t b) {
    const int64_t first = task.row_start[b], num_rows = task.row_start[b + 1] - first;
    SequenceVerdict verdict;
    if (num_rows > 0) {
        const int64_t vocab = task.full_logits.data ? task.full_logits.width : UNKNOWN_VOCAB;
        const TreeRows rows = {task.depth + first,
                               task.first_child + first,
                               task.next_sibling + first,
                               task.row_tokens + first,
                               num_rows,
                               vocab};
        int32_t* path = task.path + first;
        int32_t found = 0;
        for (int64_t row = team.rank(); row < num_rows; row += team.size()) {
            path[row] = NO_ROW;
            found |= inspect_row(rows, row);
        }
        found = team.all_reduce(found, Larger());  // one bit; and all of the path is written before the walk goes on
        verdict = walk_tree(team, task, rows, b, first, path);
        verdict.status |= found;
    }
    if (team.rank() == 0) {
        task.num_accepted[b] = verdict.num_accepted;
        task.next_token[b] = verdict.next_token;
        task.status[b] = verdict.status;
    }
}

// What a cache is moved in: 16 bytes where every address allows it, else single ones.
struct alignas(16) WidePiece {
    uint32_t words[4];
};
using NarrowPiece = uint8_t;

// A cache [B, S, num_heads, head_bytes] in pieces of a type that moves as one; strides in pieces.
template <class Piece>
struct TeamCache {
    Piece* data;
    int64_t sequence_stride;
    int64_t position_stride;
    int64_t head_stride;
};

template <class Piece>
struct CompactKVTask {
    const int64_t* path;          // [R]
    const int64_t* num_accepted;  // [B]
    const int64_t* row_start;     // [B + 1]
    const int64_t* start;         // [B]
    int64_t cache_len;
    int64_t num_heads;
    int64_t head_pieces;
    Piece* staging;  // [R, num_heads, head_pieces]
};

// A member moves the same pieces of every row, so nobody waits for another. Sequences whose moves would leave their
// rows or the cache stay as they are.
template <class Piece, class Team>
HOST_DEVICE inline void compact_kv_sequence(const Team& team, const CompactKVTask<Piece>& task,
                                            const TeamCache<Piece>& cache, int64_t b) {
    const int64_t first = task.row_start[b], num_rows = task.row_start[b + 1] - first, start = task.start[b];
    const int64_t num_moves = task.num_accepted[b] + 1;
    const int64_t* path = task.path + first;
    if (num_rows == 0 || start < 0 || start > task.cache_len - num_rows) return;
    if (!moves_stay_inside(path, num_moves, num_rows)) return;
    const bool in_order = moves_in_order(path, num_moves);
    const int64_t row_pieces = task.num_heads * task.head_pieces;
    Piece* rows = cache.data + b * cache.sequence_stride + start * cache.position_stride;
    for (int64_t p = team.rank(); p < row_pieces; p += team.size()) {
        Piece* own = rows + p / task.head_pieces * cache.head_stride + p % task.head_pieces;
        Piece* staged = task.staging + first * row_pieces + p;
        for (int64_t j = 0; j < num_moves; ++j) {
            const Piece piece = own[path[j] * cache.position_stride];
            (in_order ? own[j * cache.position_stride] : staged[j * row_pieces]) = piece;
        }
        for (int64_t j = 0; !in_order && j < num_moves; ++j) {
            own[j * cache.position_stride] = staged[j * row_pieces];
        }
    }
}

}  // namespace viasd
