// Entry point of accept_chain on the CPU: all sequences of a call.
#pragma once

#include <cstdint>

#include "sampling/logit_rows.h"

namespace viasd {

struct AcceptChainInputs {
    const int64_t* row_tokens;  // [R]
    const double* uniforms;     // [R]
    const int64_t* row_start;   // [B + 1]
    const double* temperature;  // [B]
    int64_t num_sequences;
    int64_t num_rows;
    LogitMatrix target_logits;
    LogitMatrix draft_logits;
};

struct AcceptChainOutputs {
    int32_t* num_accepted;  // [B], as the others
    int32_t* next_token;
    int32_t* status;
};

void accept_chain_cpu(const AcceptChainInputs& in, const AcceptChainOutputs& out, int num_threads);

}  // namespace viasd
