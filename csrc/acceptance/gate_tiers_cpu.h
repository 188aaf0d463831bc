// Entry point of gate_tiers on the CPU: all sequences of a call.
#pragma once

#include <cstdint>

#include "acceptance/gate_tiers.h"
#include "acceptance/pair_stats.h"

namespace viasd {

struct GateTiersInputs {
    const int64_t* row_tokens;  // [R]
    const double* uniforms;     // [R]
    const int64_t* row_start;   // [B + 1]
    const double* accept;       // [B], as the two below
    const double* escalate;
    const double* temperature;
    int64_t num_sequences;
    int64_t num_rows;
    Criterion criterion;
    LogitMatrix slim_logits;
    LogitMatrix draft_logits;
};

struct GateTiersOutputs {
    int32_t* tokens;       // [R]
    int8_t* regions;       // [R]
    int32_t* num_emitted;  // [B], as the two below
    bool* escalate;
    int32_t* status;
    StatsOutputs stats;
};

void gate_tiers_cpu(const GateTiersInputs& in, const GateTiersOutputs& out, int num_threads);

}  // namespace viasd
