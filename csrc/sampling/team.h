// Work that a team of threads does together: a block on a GPU, or, where its code is tested without one, threads of the
// CPU. Every member runs the same code and takes the same branches; a team offers
//
//   rank(), size()               this member's number, and how many there are
//   sync()                       waits for all; what others wrote before it can be read after it
//   all_reduce(value, combine)   the same result in every member; `combine` must not mind the order
//   scan(value)                  {sum of the values of lower ranks, sum of all}
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace viasd {

struct TeamScan {
    double before;
    double total;
};

struct Larger {
    template <class T>
    HOST_DEVICE T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};

struct Smaller {
    template <class T>
    HOST_DEVICE T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};

struct Sum {
    template <class T>
    HOST_DEVICE T operator()(T a, T b) const {
        return a + b;
    }
};

// Stored logits: float itself, or 16 bits.
struct Half {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

HOST_DEVICE inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

HOST_DEVICE inline float to_float(float value) { return value; }

HOST_DEVICE inline float to_float(BFloat16 value) { return float_of_bits(uint32_t{value.bits} << 16); }

HOST_DEVICE inline float to_float(Half value) {
#ifdef __CUDA_ARCH__
    float converted;
    asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(value.bits));
    return converted;
#else
    const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest << 13));  // infinities and NaN
    // As if the exponent counted from float's bias; the product puts it right, for subnormal numbers too.
    const float magnitude = float_of_bits(rest << 13) * float_of_bits(0x77800000u);  // 2^112
    return sign ? -magnitude : magnitude;
#endif
}

// Calls visit(id, value) once for each of row[0:width], spread over the team; where the row allows it in pieces of 16
// bytes, of which a member asks for several before it waits for the first. A member's ids ascend.
template <class T, class Team, class Visit>
HOST_DEVICE inline void visit_row(const Team& team, const T* row, int64_t width, const Visit& visit) {
    struct alignas(16) Piece {
        T values[16 / sizeof(T)];
    };
    constexpr int64_t LANES = 16 / sizeof(T);
    constexpr int AHEAD = sizeof(T);  // fewer where a piece holds more: what they hold stays in registers
    const int64_t num_pieces = reinterpret_cast<uintptr_t>(row) % 16 == 0 ? width / LANES : 0;
    for (int64_t first = team.rank(); first < num_pieces; first += AHEAD * team.size()) {
        Piece pieces[AHEAD];
        for (int i = 0; i < AHEAD; ++i) {
            const int64_t piece = first + i * team.size();
            if (piece < num_pieces) memcpy(&pieces[i], __builtin_assume_aligned(row + piece * LANES, 16), 16);
        }
        for (int i = 0; i < AHEAD; ++i) {
            const int64_t piece = first + i * team.size();
            for (int64_t lane = 0; piece < num_pieces && lane < LANES; ++lane) {
                visit(piece * LANES + lane, to_float(pieces[i].values[lane]));
            }
        }
    }
    for (int64_t id = num_pieces * LANES + team.rank(); id < width; id += team.size()) visit(id, to_float(row[id]));
}

}  // namespace viasd
