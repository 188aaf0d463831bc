// Kernels over panels, one table per instruction set.
//
// A panel holds 16 outputs of a weight matrix interleaved: for each input k the 16 weights lie side by side, so that a
// row's input is broadcast and 16 sums grow together, each in the order of k. A sum's order therefore depends neither
// on how many rows a pass has nor on the threads: a row yields the same bits whatever its mates are.
//   FLOAT32:  panel[k][16]
//   BFLOAT16: panel[k / 2][16][2], pairs of inputs; an odd last one is paired with zeros
//   LEVELS8:  for every 32 inputs step[16], low[16], words[8][16]: a weight is step * code + low, exactly; an output's
//             word holds the codes of 4 inputs, the first in its lowest bits
//   LEVELS4:  the same with words[4][16] of 8 codes
// Rows enter packed in blocks: of `m` rows, element k of row i lies at [k * m + i].
#pragma once

#include <cstdint>

namespace viasd {

constexpr int64_t PANEL = 16;
constexpr int64_t TILE_PANELS = 8;  // panels that one call computes, at most
constexpr int64_t TILE = PANEL * TILE_PANELS;
constexpr int64_t KEY_TILE = 64;  // keys of one attention tile: one bit each in a row's mask
// Floats from one panel of a tile's values to the next: not a multiple of 4 KiB, or stores and loads would collide.
constexpr int64_t VALUE_PANEL = KEY_TILE * PANEL + PANEL;

enum class Element : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

constexpr int64_t element_bytes(Element element) { return element == Element::FLOAT32 ? 4 : 2; }

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

enum class Coding : int32_t { FLOAT32 = 0, BFLOAT16 = 1, LEVELS8 = 2, LEVELS4 = 3 };

constexpr int64_t LEVEL_BLOCK = 32;  // inputs that share their levels

// Bytes of one panel of `depth` inputs.
constexpr int64_t panel_bytes(Coding coding, int64_t depth) {
    const int64_t blocks = round_up(depth, LEVEL_BLOCK) / LEVEL_BLOCK, levels = 2 * PANEL * 4;
    switch (coding) {
        case Coding::FLOAT32: return depth * PANEL * 4;
        case Coding::BFLOAT16: return (depth + 1) / 2 * PANEL * 4;
        case Coding::LEVELS8: return blocks * (levels + LEVEL_BLOCK * PANEL);
        case Coding::LEVELS4: return blocks * (levels + LEVEL_BLOCK * PANEL / 2);
    }
    return 0;
}

struct PanelKernels {
    int32_t max_block_rows;  // most rows of a packed block

    // y[i][0:16 * num_panels] (+)= sum over k of x[k * m + i] * panel[k][...]; at most TILE_PANELS panels, m <=
    // max_block_rows.
    void (*multiply)(Coding coding, const void* panels, int64_t num_panels, int64_t depth, const float* x, int64_t m,
                     float* y, int64_t y_stride, bool add);

    // y[i][...] += sum over the keys j of a tile of weights[i * KEY_TILE + j] * value j, values in panels.
    void (*add_values)(const float* values, int64_t num_panels, const float* weights, int64_t m, float* y,
                       int64_t y_stride);

    // 16 rows of `depth` elements into one panel of floats; null rows, never the first, enter as zeros.
    void (*pack)(Element from, const void* const rows[PANEL], int64_t depth, float* panel);

    // A panel of any coding into one of floats, and one of floats into one of bfloat16, rounded.
    void (*unpack)(Coding coding, const void* panel, int64_t depth, float* out);
    void (*shorten)(const float* panel, int64_t depth, void* out);

    // A tile of keys into panels of 16 keys; of values into panels of 16 dimensions, VALUE_PANEL apart, the last one
    // padded with zeros. The second says whether all values are finite.
    void (*keys_to_panels)(Element from, const void* const keys[KEY_TILE], int64_t dim, float* panels);
    bool (*values_to_panels)(Element from, const void* const values[KEY_TILE], int64_t dim, float* panels);

    void (*widen)(Element from, const void* in, int64_t count, float* out);
    void (*narrow)(const float* in, int64_t count, Element to, void* out);  // to nearest, ties to even

    void (*rms_norm)(const float* in, const float* weight, int64_t count, float eps, float* out);
    void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);
    void (*gelu_tanh_mul)(const float* gate, const float* up, int64_t count, float* out);
    void (*soft_cap)(float* values, int64_t count, float cap);

    // One query's scores of a tile, in place, into weights exp(score - peak); updates the running peak and sum, and
    // gives the factor that earlier sums take. A key whose bit in `visible` is 0 gets weight 0.
    float (*soften)(float scores[KEY_TILE], uint64_t visible, float scale, float soft_cap, float* peak, float* sum);

    float (*exp)(float x);  // of x <= 0
};

// The variant of this processor (cpu_level.h).
const PanelKernels& panel_kernels();

const PanelKernels& panel_kernels_portable();
#if defined(__x86_64__)
const PanelKernels& panel_kernels_avx2();
const PanelKernels& panel_kernels_avx512();
#endif

}  // namespace viasd
