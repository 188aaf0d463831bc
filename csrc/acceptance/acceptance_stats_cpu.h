// Entry point of acceptance_stats on the CPU: all rows of a call.
#pragma once

#include <cstdint>

#include "acceptance/pair_stats.h"

namespace viasd {

struct AcceptanceStatsInputs {
    LogitMatrix draft_logits;
    LogitMatrix target_logits;
    const int64_t* tokens;      // [R]
    const double* temperature;  // [R]
    CostOptions options;
};

// The statistics are float64 if any logits are, else float32.
void acceptance_stats_cpu(const AcceptanceStatsInputs& in, const StatsOutputs& out, int num_threads);

}  // namespace viasd
