// Rows of activations in the form that PanelKernels::multiply reads, and linear layers over them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layer_skip/panel_kernels.h"
#include "threads.h"

namespace viasd {

// How a number of rows is cut into blocks of nearly equal size.
class RowBlocks {
  public:
    RowBlocks() = default;
    RowBlocks(int64_t num_rows, int64_t max_rows) : num_rows_(num_rows) {
        num_blocks_ = (num_rows + max_rows - 1) / max_rows;
    }

    int64_t num_rows() const { return num_rows_; }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t begin(int64_t block) const { return num_rows_ * block / num_blocks_; }
    int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
    int64_t block_of(int64_t row) const {
        int64_t block = row * num_blocks_ / num_rows_;
        while (begin(block + 1) <= row) ++block;
        return block;
    }

  private:
    int64_t num_rows_ = 0, num_blocks_ = 0;
};

struct PackedRows {
    float* data;
    int64_t width;
    RowBlocks blocks;

    const float* block(int64_t i) const { return data + blocks.begin(i) * width; }

    // Writes values[0:count] as columns `first`... of a row.
    void put(int64_t row, int64_t first, const float* values, int64_t count) const {
        const int64_t i = blocks.block_of(row), begin = blocks.begin(i), stride = blocks.size(i);
        float* out = data + begin * width + first * stride + (row - begin);
        for (int64_t k = 0; k < count; ++k) out[k * stride] = values[k];
    }
};

struct Linear {
    const void* panels;
    const float* bias;  // null: none; padded with zeros to whole panels
    int64_t outputs;
    int64_t depth;
};

// This member's outputs of a linear layer, tile by tile. `finish(first_output, num_outputs, tile)` gets
// tile[row][TILE], with the bias added; outputs past the layer's own are zeros. Members take panels in multiples of
// `unit`.
template <class Finish>
void multiply_linear(const PanelKernels& kernels, Element element, const Linear& linear, const PackedRows& x,
                     int member, const Team& team, float* tile, int64_t unit, const Finish& finish) {
    const int64_t bytes = panel_bytes(element, linear.depth), num_rows = x.blocks.num_rows();
    const Share panels = share(round_up(linear.outputs, PANEL) / PANEL, member, team.size, unit);
    // With several blocks a group of panels is read once for each: it should stay in the second-level cache.
    const int64_t fits = std::max<int64_t>(2, std::min<int64_t>(TILE_PANELS, (int64_t{1} << 19) / bytes / 2 * 2));
    const int64_t group = x.blocks.num_blocks() > 1 ? fits : TILE_PANELS;
    for (int64_t p = panels.begin; p < panels.end; p += group) {
        const int64_t count = std::min(group, panels.end - p);
        for (int64_t b = 0; b < x.blocks.num_blocks(); ++b) {
            kernels.multiply(element, static_cast<const char*>(linear.panels) + p * bytes, count, linear.depth,
                             x.block(b), x.blocks.size(b), tile + x.blocks.begin(b) * TILE, TILE, false);
        }
        if (linear.bias) {
            for (int64_t row = 0; row < num_rows; ++row) {
                for (int64_t j = 0; j < count * PANEL; ++j) tile[row * TILE + j] += linear.bias[p * PANEL + j];
            }
        }
        finish(p * PANEL, count * PANEL, tile);
    }
}

}  // namespace viasd
