// The tiered rule for one sequence: control only, shared by the CPU and the CUDA code.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "sampling/proposal.h"
#include "status.h"

namespace viasd {

// The values of viasd_kernels.acceptance.Region.
enum class Region : int8_t { NOT_WALKED = -1, ACCEPT = 0, REGENERATE = 1, ESCALATE = 2 };

enum class Criterion : int32_t { RATIO = 0, TV = 1, KL = 2 };

template <class Real>
struct GateRule {
    Criterion criterion;
    Real accept;
    Real escalate;
};

// What the statistics say about a drafted token.
template <class Real>
struct GateFinding {
    int32_t status;  // of the rows; 0 if both can be judged
    bool masked;     // the slim row gives the token no mass
    Real statistic;  // the criterion's
};

struct GateRows {
    const int64_t* tokens;
    const double* coins;
    int64_t num_rows;
    int64_t vocab;
};

struct GateOutcome {
    int32_t num_emitted = 0;
    bool escalate = false;
    int32_t status = 0;
};

// NaN is neither kept nor stopped: B. It comes with a finding, which is C.
template <class Real>
HOST_DEVICE inline Region region_of(const GateRule<Real>& rule, Real statistic) {
    const bool ratio = rule.criterion == Criterion::RATIO;
    if (ratio ? statistic >= rule.accept : statistic <= rule.accept) return Region::ACCEPT;
    if (ratio ? statistic < rule.escalate : statistic > rule.escalate) return Region::ESCALATE;
    return Region::REGENERATE;
}

// At least one row. `laws.judge(node, token)` gives the finding on `token`, drafted after `node`; `laws.draw(node,
// coin, &status)` a token from the slim row at the sequence's temperature, or -1 with a fatal status. `tokens` and
// `regions` hold "none" in every row at the start.
template <class Real, class Laws>
HOST_DEVICE inline GateOutcome walk_gate(const GateRows& rows, const GateRule<Real>& rule, Laws& laws, int32_t* tokens,
                                         int8_t* regions) {
    GateOutcome outcome;
    for (int64_t node = 0;; ++node) {
        const int64_t drafted = node + 1 < rows.num_rows ? rows.tokens[node + 1] : UNUSED_TOKEN;
        Region region = Region::NOT_WALKED;
        if (drafted != UNUSED_TOKEN) {
            const GateFinding<Real> finding = laws.judge(node, drafted);
            const bool outside = drafted < 0 || drafted >= rows.vocab;
            const int32_t found = outside ? STATUS_TOKEN_OUT_OF_RANGE : finding.status;
            outcome.status |= found;
            region = found || finding.masked ? Region::ESCALATE : region_of(rule, finding.statistic);
            regions[node + 1] = static_cast<int8_t>(region);
            if (region == Region::ESCALATE) {
                outcome.escalate = true;
                return outcome;
            }
        }
        int64_t emitted = drafted;
        if (region != Region::ACCEPT) {
            const int64_t own_row = drafted == UNUSED_TOKEN ? 0 : node + 1;  // the bonus takes the root's coin
            emitted = laws.draw(node, rows.coins[own_row], &outcome.status);
            if (emitted < 0) {
                outcome.escalate = true;
                return outcome;
            }
        }
        tokens[node] = static_cast<int32_t>(emitted);
        ++outcome.num_emitted;
        if (emitted != drafted) return outcome;
    }
}

}  // namespace viasd
