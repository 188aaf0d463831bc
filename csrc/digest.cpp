#include "digest.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "threads.h"

namespace viasd {

namespace {

constexpr int64_t BLOCK_WORDS = 128, BLOCK_BYTES = 8 * BLOCK_WORDS;
constexpr int64_t PIECE_BLOCKS = 256;           // what a thread takes at a time
constexpr int64_t WORTH_A_THREAD = 256 * 1024;  // bytes; with fewer, waking a thread takes longer than reading them

constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

constexpr std::array<uint64_t, BLOCK_WORDS> make_keys() {
    std::array<uint64_t, BLOCK_WORDS> keys{};
    for (int64_t i = 0; i < BLOCK_WORDS; ++i) keys[i] = mix(i + 1);
    return keys;
}

alignas(16) constexpr std::array<uint64_t, BLOCK_WORDS> KEYS = make_keys();

// Sum of lo(w + k) * hi(w + k) over the block's words w and the keys k, halves added in 32 bits each.
uint64_t sum_of_products(const char* block) {
    uint64_t sum = 0;
#if defined(__SSE2__)  // compilers do not see that 32 bits are multiplied, and take three products for each
    __m128i sums = _mm_setzero_si128();
    for (int64_t i = 0; i < BLOCK_WORDS; i += 2) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 8 * i));
        const __m128i keys = _mm_load_si128(reinterpret_cast<const __m128i*>(&KEYS[i]));
        const __m128i halves = _mm_add_epi32(words, keys);
        sums = _mm_add_epi64(sums, _mm_mul_epu32(halves, _mm_srli_epi64(halves, 32)));
    }
    uint64_t lanes[2];
    std::memcpy(lanes, &sums, sizeof lanes);
    sum = lanes[0] + lanes[1];
#else
    for (int64_t i = 0; i < BLOCK_WORDS; ++i) {
        uint64_t word;
        std::memcpy(&word, block + 8 * i, 8);
        const uint64_t low = static_cast<uint32_t>(word + KEYS[i]);
        const uint64_t high = static_cast<uint32_t>((word >> 32) + (KEYS[i] >> 32));
        sum += low * high;
    }
#endif
    return sum;
}

uint64_t digest_of_block(const char* block, int64_t index) { return mix(sum_of_products(block) + mix(index + 1)); }

}  // namespace

uint64_t digest(const void* data, int64_t num_bytes, int num_threads) {
    const char* bytes = static_cast<const char*>(data);
    const int64_t num_blocks = num_bytes / BLOCK_BYTES, num_pieces = (num_blocks + PIECE_BLOCKS - 1) / PIECE_BLOCKS;
    std::atomic<uint64_t> total{mix(num_bytes)};
    const int useful = static_cast<int>(std::min<int64_t>(num_threads, num_bytes / WORTH_A_THREAD));
    parallel_for(num_pieces, useful, [&](int64_t piece, int) {
        uint64_t sum = 0;
        const int64_t end = std::min((piece + 1) * PIECE_BLOCKS, num_blocks);
        for (int64_t i = piece * PIECE_BLOCKS; i < end; ++i) sum += digest_of_block(bytes + i * BLOCK_BYTES, i);
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    const int64_t rest = num_bytes % BLOCK_BYTES;
    if (rest) {
        char block[BLOCK_BYTES] = {};
        std::memcpy(block, bytes + num_blocks * BLOCK_BYTES, rest);
        total += digest_of_block(block, num_blocks);
    }
    return total;
}

}  // namespace viasd
