#include "tree_verify/compact_kv_cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "sampling/logit_rows.h"
#include "threads.h"
#include "tree_verify/compact_kv.h"

namespace viasd {

namespace {

void require_moves(const CompactKVInputs& in) {
    require_row_start(in.row_start, in.num_sequences, in.num_rows);
    for (int64_t b = 0; b < in.num_sequences; ++b) {
        const int64_t first = in.row_start[b], num_rows = in.row_start[b + 1] - first;
        if (num_rows == 0) continue;
        if (in.start[b] < 0 || in.start[b] > in.cache_len - num_rows) {
            throw std::invalid_argument("a sequence's rows must lie inside the cache");
        }
        if (!moves_stay_inside(in.path + first, in.num_accepted[b] + 1, num_rows)) {
            throw std::invalid_argument("path and num_accepted must name rows of their sequence");
        }
    }
}

// One head's rows of one sequence; `at(row)` is the address of its bytes at that row.
template <class At>
void move_rows(const int64_t* path, int64_t num_moves, int64_t bytes, const At& at, char* staging) {
    if (moves_in_order(path, num_moves)) {
        for (int64_t j = 0; j < num_moves; ++j) {
            if (path[j] != j) std::memcpy(at(j), at(path[j]), bytes);
        }
        return;
    }
    for (int64_t j = 0; j < num_moves; ++j) std::memcpy(staging + j * bytes, at(path[j]), bytes);
    for (int64_t j = 0; j < num_moves; ++j) std::memcpy(at(j), staging + j * bytes, bytes);
}

}  // namespace

void compact_kv_cpu(const CompactKVInputs& in, const KVCache& k, const KVCache& v, int num_threads) {
    require_moves(in);
    // Heads that lie one behind the other move as one.
    const bool dense = k.head_stride == in.head_bytes && v.head_stride == in.head_bytes;
    const int64_t num_pieces = dense ? 1 : in.num_heads;
    const int64_t bytes = dense ? in.num_heads * in.head_bytes : in.head_bytes;
    int64_t longest = 0;
    bool in_order = true;
    for (int64_t b = 0; b < in.num_sequences; ++b) {
        const int64_t first = in.row_start[b];
        if (first == in.row_start[b + 1]) continue;
        longest = std::max(longest, in.num_accepted[b] + 1);
        in_order &= moves_in_order(in.path + first, in.num_accepted[b] + 1);
    }
    constexpr int64_t BYTES_LIKE_A_NUMBER = 4;
    const int64_t num_items = 2 * in.num_sequences;
    const int64_t numbers = in.num_heads * in.head_bytes / BYTES_LIKE_A_NUMBER;
    const ThreadSplit team = share_threads(num_threads, num_items, num_items * longest, numbers);
    const int64_t staging_bytes = in_order ? 0 : longest * bytes;
    const std::unique_ptr<char[]> staging(new char[team.over_items * staging_bytes]);
    parallel_for(num_items, team.over_items, [&](int64_t item, int worker) {
        const KVCache& cache = item % 2 ? v : k;
        const int64_t b = item / 2, first = in.row_start[b];
        if (first == in.row_start[b + 1]) return;
        char* rows = cache.data + b * cache.sequence_stride + in.start[b] * cache.position_stride;
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const auto at = [&](int64_t row) { return rows + row * cache.position_stride + piece * cache.head_stride; };
            move_rows(in.path + first, in.num_accepted[b] + 1, bytes, at, staging.get() + worker * staging_bytes);
        }
    });
}

}  // namespace viasd
