// Entry point of compact_kv on the CPU: both caches, all sequences of a call.
#pragma once

#include <cstdint>

namespace viasd {

// A cache [B, S, num_heads, head_bytes]; strides in bytes, the last dimension contiguous.
struct KVCache {
    char* data;
    int64_t sequence_stride;
    int64_t position_stride;
    int64_t head_stride;
};

struct CompactKVInputs {
    const int64_t* path;          // [R]
    const int64_t* num_accepted;  // [B]
    const int64_t* row_start;     // [B + 1]
    const int64_t* start;         // [B]
    int64_t num_sequences;
    int64_t num_rows;
    int64_t cache_len;
    int64_t num_heads;
    int64_t head_bytes;
};

// Throws std::invalid_argument, before anything moves, for values that lead outside a sequence's rows or its cache.
void compact_kv_cpu(const CompactKVInputs& in, const KVCache& k, const KVCache& v, int num_threads);

}  // namespace viasd
