// Which moves of a cache's rows are safe, shared by the CPU and the CUDA code.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace viasd {

// Do all of a sequence's moves, path[j] to j, lead to its own rows? `num_moves` is the number of accepted rows and the
// root.
HOST_DEVICE inline bool moves_stay_inside(const int64_t* path, int64_t num_moves, int64_t num_rows) {
    if (num_moves < 1 || num_moves > num_rows) return false;
    for (int64_t j = 0; j < num_moves; ++j) {
        if (path[j] < 0 || path[j] >= num_rows) return false;
    }
    return true;
}

// Done one after the other, no move overwrites a row that a later one reads: by then only rows below j are written.
// True for every path of verify_tree, whose rows ascend.
HOST_DEVICE inline bool moves_in_order(const int64_t* path, int64_t num_moves) {
    for (int64_t j = 0; j < num_moves; ++j) {
        if (path[j] < j) return false;
    }
    return true;
}

}  // namespace viasd
