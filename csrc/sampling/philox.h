// Coins keyed by (seed, draw, slot): Philox-4x32-10 (Salmon et al., SC 2011), bit for bit as viasd_kernels.sampling.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace viasd {

struct PhiloxBlock {
    uint32_t word[4];
};

HOST_DEVICE inline PhiloxBlock philox(uint64_t key, uint64_t draw, uint32_t block) {
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    PhiloxBlock x = {{static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), block, 0}};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * x.word[0];
        const uint64_t second = uint64_t{0xCD9E8D57} * x.word[2];
        x = {{static_cast<uint32_t>(second >> 32) ^ x.word[1] ^ key0, static_cast<uint32_t>(second),
              static_cast<uint32_t>(first >> 32) ^ x.word[3] ^ key1, static_cast<uint32_t>(first)}};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return x;
}

// A double in [0, 1) with 53 random bits: 27 from the high word, 26 from the low one.
HOST_DEVICE inline double philox_coin(uint32_t high, uint32_t low) {
    const uint64_t bits = (static_cast<uint64_t>(high >> 5) << 26) | (low >> 6);
    return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

// seeds, draws: [num_sequences]; out: [num_sequences, num_slots]. Two slots share one block.
inline void uniforms_cpu(const int64_t* seeds, const int64_t* draws, double* out, int64_t num_sequences,
                         int64_t num_slots) {
    for (int64_t b = 0; b < num_sequences; ++b) {
        double* row = out + b * num_slots;
        for (int64_t slot = 0; slot < num_slots; slot += 2) {
            const PhiloxBlock x = philox(static_cast<uint64_t>(seeds[b]), static_cast<uint64_t>(draws[b]),
                                         static_cast<uint32_t>(slot / 2));
            row[slot] = philox_coin(x.word[0], x.word[1]);
            if (slot + 1 < num_slots) row[slot + 1] = philox_coin(x.word[2], x.word[3]);
        }
    }
}

}  // namespace viasd
