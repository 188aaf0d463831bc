// Tree building and the two verification walks: integers and control only, shared by the CPU and the CUDA code.
// All row indices are local to one sequence; NO_ROW stands for "none".
#pragma once

#include <cstdint>

#include "host_device.h"
#include "sampling/proposal.h"
#include "status.h"

namespace viasd {

constexpr int32_t NO_ROW = -1;
constexpr int64_t UNKNOWN_VOCAB = int64_t{1} << 31;  // more than any id that an int32 holds

struct TreeLinks {
    int64_t* ancestors;  // [num_rows, num_words]
    int32_t* depth;
    int32_t* first_child;
    int32_t* next_sibling;
};

// Rows past max_rows, rows whose parent does not precede them, and their descendants get depth -1 and no links.
HOST_DEVICE inline void build_tree_sequence(const int64_t* parents, int64_t num_rows, int64_t max_rows,
                                            int64_t num_words, TreeLinks tree) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t parent = parents[row];
        const bool is_root = row == 0;
        const bool kept = is_root || (row < max_rows && parent >= 0 && parent < row && tree.depth[parent] >= 0);
        tree.depth[row] = !kept ? -1 : is_root ? 0 : tree.depth[parent] + 1;
        tree.first_child[row] = NO_ROW;
        tree.next_sibling[row] = NO_ROW;
        int64_t* words = tree.ancestors + row * num_words;
        for (int64_t word = 0; word < num_words; ++word) {
            words[word] = kept && !is_root ? tree.ancestors[parent * num_words + word] : 0;
        }
        if (kept && !is_root) words[parent / 64] |= static_cast<int64_t>(uint64_t{1} << (parent % 64));
    }
    // Linking backwards leaves every list of siblings in row order, without a record of its last member.
    for (int64_t row = num_rows - 1; row > 0; --row) {
        if (tree.depth[row] < 0) continue;
        tree.next_sibling[row] = tree.first_child[parents[row]];
        tree.first_child[parents[row]] = static_cast<int32_t>(row);
    }
}

struct TreeRows {
    const int32_t* depth;
    const int32_t* first_child;
    const int32_t* next_sibling;
    const int64_t* tokens;
    int64_t num_rows;
    int64_t vocab;  // UNKNOWN_VOCAB where only the argmax ids are known
};

// A link must lead forward and stay inside the sequence. This also ends every walk, whatever the arrays hold.
HOST_DEVICE inline int64_t follow_link(const TreeRows& rows, int64_t from, int32_t link) {
    return link > from && link < rows.num_rows ? link : NO_ROW;
}

HOST_DEVICE inline bool is_usable(const TreeRows& rows, int64_t row) {
    return rows.depth[row] >= 0 && rows.tokens[row] >= 0 && rows.tokens[row] < rows.vocab;
}

HOST_DEVICE inline int64_t next_usable(const TreeRows& rows, int64_t row) {
    while (row != NO_ROW && !is_usable(rows, row)) row = follow_link(rows, row, rows.next_sibling[row]);
    return row;
}

HOST_DEVICE inline int64_t first_usable_child(const TreeRows& rows, int64_t node) {
    return next_usable(rows, follow_link(rows, node, rows.first_child[node]));
}

HOST_DEVICE inline int64_t next_usable_sibling(const TreeRows& rows, int64_t child) {
    return next_usable(rows, follow_link(rows, child, rows.next_sibling[child]));
}

// TREE_PRUNED if the row is drafted, has a token and cannot be followed, or has a link that leads nowhere. The root's
// token is not read.
HOST_DEVICE inline int32_t inspect_row(const TreeRows& rows, int64_t row) {
    const int32_t child = rows.first_child[row], sibling = rows.next_sibling[row];
    const bool broken = (child != NO_ROW && follow_link(rows, row, child) == NO_ROW) ||
                        (sibling != NO_ROW && follow_link(rows, row, sibling) == NO_ROW);
    const bool pruned = row > 0 && rows.tokens[row] != UNUSED_TOKEN && !is_usable(rows, row);
    return broken || pruned ? STATUS_TREE_PRUNED : 0;
}

// Argmax ids that the caller brought; no logits are read.
struct GivenArgmax {
    const int64_t* ids;
    int64_t vocab;

    HOST_DEVICE int64_t argmax(int64_t node, int32_t* status) const {
        if (ids[node] >= 0 && ids[node] < vocab) return ids[node];
        *status |= STATUS_TOKEN_OUT_OF_RANGE;
        return -1;
    }
};

// `target.argmax(node, &status)` gives the target's id after the node, or -1 with a fatal status.
template <class Target>
HOST_DEVICE inline SequenceVerdict walk_greedy(const TreeRows& rows, Target& target, int32_t* path) {
    SequenceVerdict verdict;
    int64_t node = 0;
    path[0] = 0;
    for (;;) {
        const int64_t token = target.argmax(node, &verdict.status);
        if (token < 0) return verdict;
        int64_t child = first_usable_child(rows, node);
        while (child != NO_ROW && rows.tokens[child] != token) child = next_usable_sibling(rows, child);
        if (child == NO_ROW) {
            verdict.next_token = static_cast<int32_t>(token);
            return verdict;
        }
        path[++verdict.num_accepted] = static_cast<int32_t>(child);
        node = child;
    }
}

HOST_DEVICE inline bool is_duplicate(const TreeRows& rows, int64_t node, int64_t child) {
    int64_t earlier = first_usable_child(rows, node);
    while (earlier != child && rows.tokens[earlier] != rows.tokens[child]) earlier = next_usable_sibling(rows, earlier);
    return earlier != child;
}

// The first accepted child of `node`, or NO_ROW. `laws` holds the node's target r, and its proposal d once opened:
// r(token), d(token), and reject(token, proposal), which updates both and says whether r had mass left.
template <class Laws>
HOST_DEVICE inline int64_t judge_children(const TreeRows& rows, int64_t node, const double* coins, Proposal proposal,
                                          Laws& laws, int32_t* status) {
    int64_t child = first_usable_child(rows, node);
    const bool has_draft = proposal != Proposal::DETERMINISTIC;
    if (child != NO_ROW && has_draft && !laws.open_draft(node)) {
        *status |= STATUS_DRAFT_INVALID;
        return NO_ROW;
    }
    for (; child != NO_ROW; child = next_usable_sibling(rows, child)) {
        const int64_t token = rows.tokens[child];
        const double draft = has_draft ? laws.draft_prob(token) : 1.0;
        if (draft <= 0) {
            // A repeated sibling was emptied by the rule itself; any other id was never the proposal's to draw.
            if (!is_duplicate(rows, node, child)) *status |= STATUS_DRAFT_ZERO;
            continue;
        }
        if (coins[child] * draft < laws.target_prob(token)) return child;
        if (!laws.reject(token, proposal)) *status |= STATUS_RESIDUAL_EMPTY;
    }
    return NO_ROW;
}

// `laws.open_target(node)` gives a fatal status or 0; `laws.draw(coin)` samples from what is left of the target.
template <class Laws>
HOST_DEVICE inline SequenceVerdict walk_sampled(const TreeRows& rows, const double* coins, Proposal proposal,
                                                Laws& laws, int32_t* path) {
    SequenceVerdict verdict;
    int64_t node = 0;
    path[0] = 0;
    for (;;) {
        const int32_t fatal = laws.open_target(node);
        verdict.status |= fatal;
        if (fatal != 0) return verdict;
        const int64_t child = judge_children(rows, node, coins, proposal, laws, &verdict.status);
        if (child == NO_ROW) {
            verdict.next_token = static_cast<int32_t>(laws.draw(coins[0]));
            return verdict;
        }
        path[++verdict.num_accepted] = static_cast<int32_t>(child);
        node = child;
    }
}

}  // namespace viasd
