// Entry points of tree building and verification on the CPU: all sequences of a call.
#pragma once

#include <cstdint>

#include "sampling/logit_rows.h"
#include "tree_verify/tree_verify.h"

namespace viasd {

void build_tree_cpu(const int64_t* parents, const int64_t* row_start, int64_t num_sequences, int64_t num_rows,
                    int64_t max_rows, TreeLinks tree);

struct VerifyTreeInputs {
    const int32_t* depth;  // [R], as every pointer up to uniforms
    const int32_t* first_child;
    const int32_t* next_sibling;
    const int64_t* row_tokens;
    const int64_t* full_argmax;  // null: taken from full_logits
    const double* uniforms;
    const int64_t* row_start;   // [B + 1]
    const double* temperature;  // [B]
    int64_t num_sequences;
    int64_t num_rows;
    LogitMatrix full_logits;
    LogitMatrix draft_logits;
    Proposal proposal;
};

struct VerifyTreeOutputs {
    int32_t* path;          // [R]
    int32_t* num_accepted;  // [B], as the two below
    int32_t* next_token;
    int32_t* status;
};

void verify_tree_cpu(const VerifyTreeInputs& in, const VerifyTreeOutputs& out, int num_threads);

}  // namespace viasd
