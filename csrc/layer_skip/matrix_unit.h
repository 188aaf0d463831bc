// Linear layers on the processor's matrix unit (AMX): bfloat16 weights times activations rounded to bfloat16, as other
// engines round them too, summed in float32.
//
// A panel of bfloat16 weights (panel_kernels.h) is, for every 32 inputs, a tile of the unit already. Activations come
// in tiles of 16 rows and 32 inputs. The unit is for many rows: of few, the time goes into reading the weights, and the
// other kernels round nothing.
#pragma once

#include <cstdint>

#include "layer_skip/panel_kernels.h"

namespace viasd {

constexpr int64_t UNIT_ROWS = 16;                           // rows of a tile
constexpr int64_t UNIT_INPUTS = 32;                         // inputs of a tile
constexpr int64_t UNIT_TILE = UNIT_ROWS * UNIT_INPUTS * 2;  // bytes

// Floats that hold `num_rows` rows in either form, in whole tiles.
constexpr int64_t tiles_size(int64_t num_rows, int64_t width) {
    return round_up(num_rows, UNIT_ROWS) * round_up(width, UNIT_INPUTS);
}

struct MatrixUnit {
    // A thread calls the one before its first `multiply`, the other after its last.
    void (*begin)();
    void (*end)();

    // Rounds values[0:count] into columns `first`... of a row; what the row's last tile has beyond `width` becomes 0.
    void (*put)(float* tiles, int64_t width, int64_t row, int64_t first, const float* values, int64_t count);

    // A panel of floats that are bfloat16 numbers into one of bfloat16.
    void (*shorten)(const float* panel, int64_t depth, void* out);

    // y[i][0:16 * num_panels] = sum over k of x[i][k] * panel[k][...], of bfloat16 panels; at most TILE_PANELS of them.
    // y has room for whole tiles of rows.
    void (*multiply)(const void* panels, int64_t num_panels, int64_t depth, const float* tiles, int64_t num_rows,
                     float* y, int64_t y_stride);
};

// Null where this processor has none, or a lesser variant was chosen (cpu_level.h).
const MatrixUnit* matrix_unit();

}  // namespace viasd
