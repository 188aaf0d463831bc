// The accept/stop logic of one drafted chain: control only, shared by the CPU and the CUDA code.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "sampling/proposal.h"
#include "status.h"

namespace viasd {

struct ChainRows {
    const int64_t* tokens;
    const double* coins;
    int64_t num_rows;
    int64_t vocab;
    bool has_draft;
};

// Judges `token`, drafted after `node`, whose target row `laws` holds. A rejection for a stated reason leaves the
// target as it is; an ordinary one leaves the residual.
template <class Laws>
HOST_DEVICE inline bool accept_drafted(const ChainRows& rows, int64_t node, int64_t token, Laws& laws,
                                       int32_t* status) {
    double draft = 1.0;
    if (rows.has_draft) {
        if (!laws.open_draft(node)) {
            *status |= STATUS_DRAFT_INVALID;
            return false;
        }
        draft = laws.draft_prob(token);
        if (draft <= 0) {
            *status |= STATUS_DRAFT_ZERO;
            return false;
        }
    }
    if (rows.coins[node + 1] * draft < laws.target_prob(token)) return true;
    const Proposal proposal = rows.has_draft ? Proposal::WITH_REPLACEMENT : Proposal::DETERMINISTIC;
    if (!laws.reject(token, proposal)) *status |= STATUS_RESIDUAL_EMPTY;
    return false;
}

// At least one row. `laws` is that of tree_verify/tree_verify.h.
template <class Laws>
HOST_DEVICE inline SequenceVerdict walk_chain(const ChainRows& rows, bool greedy, Laws& laws) {
    SequenceVerdict verdict;
    for (int64_t node = 0;; ++node) {
        const bool has_token = node + 1 < rows.num_rows && rows.tokens[node + 1] != UNUSED_TOKEN;
        const int64_t token = has_token ? rows.tokens[node + 1] : UNUSED_TOKEN;
        if (has_token && (token < 0 || token >= rows.vocab)) {
            verdict.status |= STATUS_TOKEN_OUT_OF_RANGE;
            return verdict;
        }
        int64_t best = -1;
        if (greedy) {
            best = laws.argmax(node, &verdict.status);
            if (best < 0) return verdict;
        } else if (const int32_t fatal = laws.open_target(node)) {
            verdict.status |= fatal;
            return verdict;
        }
        const bool accepted =
            has_token && (greedy ? token == best : accept_drafted(rows, node, token, laws, &verdict.status));
        if (!accepted) {
            verdict.next_token = static_cast<int32_t>(greedy ? best : laws.draw(rows.coins[0]));
            return verdict;
        }
        ++verdict.num_accepted;
    }
}

}  // namespace viasd
