// The bits of an op's status output, with the values of viasd_kernels/status.py, where each is explained; and how a
// verification ends.
#pragma once

#include <cstdint>

namespace viasd {

constexpr int32_t STATUS_TARGET_NOT_FINITE = 1;
constexpr int32_t STATUS_TARGET_EMPTY = 2;
constexpr int32_t STATUS_TOKEN_OUT_OF_RANGE = 4;
constexpr int32_t STATUS_DRAFT_INVALID = 8;
constexpr int32_t STATUS_DRAFT_ZERO = 16;
constexpr int32_t STATUS_RESIDUAL_EMPTY = 32;
constexpr int32_t STATUS_TREE_PRUNED = 64;

// How one sequence's verification ended; next_token stays -1 after a fatal status.
struct SequenceVerdict {
    int32_t num_accepted = 0;
    int32_t next_token = -1;
    int32_t status = 0;
};

}  // namespace viasd
