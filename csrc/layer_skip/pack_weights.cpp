#include "layer_skip/pack_weights.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "threads.h"

namespace viasd {

namespace {

struct Levels {
    float step = 0, low = 0;
    uint8_t codes[LEVEL_BLOCK] = {};
};

// Writes each of `count` values as step * code + low, if that can be exact with codes up to 255.
bool find_levels(const float* values, int64_t count, Levels* out) {
    float low = values[0];
    int unit = 128;  // power of two that divides every value
    for (int64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) return false;
        low = std::min(low, values[i]);
        if (values[i] == 0) continue;
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        const int exponent = std::max<int>(bits >> 23 & 255, 1);
        const uint32_t digits = (bits & 0x7FFFFF) | (bits >> 23 & 255 ? 0x800000 : 0);
        unit = std::min(unit, exponent - 150 + __builtin_ctz(digits));
    }
    const double scale = std::ldexp(1.0, unit), inverse = std::ldexp(1.0, -unit);
    int64_t above[LEVEL_BLOCK], step = 0;  // in units
    double per_step = 0;
    // Divisions by `step` are products here: every quotient is checked by multiplying back.
    auto steps_in = [&](int64_t distance) { return static_cast<int64_t>(distance * per_step + 0.5); };
    for (int64_t i = 0; i < count; ++i) {
        const double distance = (static_cast<double>(values[i]) - low) * inverse;
        if (distance > 0x1p52) return false;
        above[i] = static_cast<int64_t>(distance);
        if (steps_in(above[i]) * step == above[i]) continue;
        step = std::gcd(step, above[i]);
        per_step = 1.0 / step;
    }
    const double exact_step = static_cast<double>(step) * scale;
    out->step = static_cast<float>(exact_step);
    out->low = low;
    if (out->step != exact_step) return false;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t code = steps_in(above[i]);
        if (code * step != above[i] || code > 255) return false;
        out->codes[i] = static_cast<uint8_t>(code);
        const float product = out->step * static_cast<float>(code);
        if (product != exact_step * code || product + low != values[i]) return false;
    }
    return true;
}

// Calls body(number, panel of floats) for every panel until one says false; says whether none did.
template <class Body>
bool for_panels(const WeightMatrix& matrix, int num_threads, const Body& body) {
    const PanelKernels& kernels = panel_kernels();
    const int64_t outputs = matrix.halves ? matrix.num_outputs / 2 : matrix.num_outputs;  // of one half
    const int64_t bytes = element_bytes(matrix.element);
    std::vector<float> memory(num_threads * matrix.depth * PANEL);
    std::atomic<bool> going{true};
    run_team(num_threads, [&](int member, Team& team) {
        float* panel = memory.data() + member * matrix.depth * PANEL;
        const Share panels = share(matrix.num_panels(), member, team.size);
        for (int64_t p = panels.begin; p < panels.end && going; ++p) {
            const int64_t first = (matrix.halves ? p / 2 : p) * PANEL, offset = matrix.halves && p % 2 ? outputs : 0;
            const void* rows[PANEL];
            for (int64_t i = 0; i < PANEL; ++i) {
                const char* row =
                    static_cast<const char*>(matrix.data) + (offset + first + i) * matrix.row_stride * bytes;
                rows[i] = first + i < outputs ? row : nullptr;
            }
            kernels.pack(matrix.element, rows, matrix.depth, panel);
            if (!body(p, panel)) going = false;
        }
    });
    return going;
}

// Calls body(block, output, levels) for a panel's blocks; false where one has no exact levels.
template <class Body>
bool for_blocks(const float* panel, int64_t depth, const Body& body) {
    for (int64_t first = 0; first < depth; first += LEVEL_BLOCK) {
        const int64_t count = std::min(LEVEL_BLOCK, depth - first);
        for (int64_t i = 0; i < PANEL; ++i) {
            float values[LEVEL_BLOCK];
            for (int64_t k = 0; k < count; ++k) values[k] = panel[(first + k) * PANEL + i];
            Levels levels;
            if (!find_levels(values, count, &levels)) return false;
            body(first / LEVEL_BLOCK, i, levels);
        }
    }
    return true;
}

void write_levels(const float* panel, int64_t depth, Coding coding, char* out) {
    for_blocks(panel, depth, [&](int64_t block, int64_t i, const Levels& levels) {
        float* steps = reinterpret_cast<float*>(out + block * panel_bytes(coding, LEVEL_BLOCK));
        uint32_t* words = reinterpret_cast<uint32_t*>(steps + 2 * PANEL) + i;
        const int64_t width = coding == Coding::LEVELS8 ? 8 : 4, per_word = 32 / width;
        steps[i] = levels.step;
        steps[PANEL + i] = levels.low;
        for (int64_t k = 0; k < LEVEL_BLOCK; k += per_word) {
            uint32_t word = 0;
            for (int64_t j = 0; j < per_word; ++j) word |= static_cast<uint32_t>(levels.codes[k + j]) << (j * width);
            words[k / per_word * PANEL] = word;
        }
    });
}

}  // namespace

Coding smallest_coding(const WeightMatrix& matrix, int num_threads) {
    std::atomic<int> highest{0};
    const bool on_levels = for_panels(matrix, num_threads, [&](int64_t, const float* panel) {
        int own = 0;
        const bool exact = for_blocks(panel, matrix.depth, [&](int64_t, int64_t, const Levels& levels) {
            own = std::max<int>(own, *std::max_element(levels.codes, levels.codes + LEVEL_BLOCK));
        });
        for (int seen = highest; seen < own && !highest.compare_exchange_weak(seen, own);) {
        }
        return exact;
    });
    if (on_levels) return highest < 16 ? Coding::LEVELS4 : Coding::LEVELS8;
    if (matrix.element == Element::BFLOAT16) return Coding::BFLOAT16;
    const bool short_enough = for_panels(matrix, num_threads, [&](int64_t, const float* panel) {
        return std::all_of(panel, panel + matrix.depth * PANEL, [](float weight) {
            uint32_t bits;
            std::memcpy(&bits, &weight, sizeof bits);
            return (bits & 0xFFFF) == 0;
        });
    });
    return short_enough ? Coding::BFLOAT16 : Coding::FLOAT32;
}

void pack_weights(const WeightMatrix& matrix, Coding coding, void* panels, int num_threads) {
    const PanelKernels& kernels = panel_kernels();
    const int64_t bytes = panel_bytes(coding, matrix.depth);
    for_panels(matrix, num_threads, [&](int64_t p, const float* panel) {
        char* out = static_cast<char*>(panels) + p * bytes;
        if (coding == Coding::FLOAT32) {
            std::memcpy(out, panel, bytes);
        } else if (coding == Coding::BFLOAT16) {
            kernels.shorten(panel, matrix.depth, out);
        } else {
            write_levels(panel, matrix.depth, coding, out);
        }
        return true;
    });
}

}  // namespace viasd
