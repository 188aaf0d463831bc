// Rows of activations in the form that PanelKernels::multiply or MatrixUnit::multiply reads, and linear layers over
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layer_skip/matrix_unit.h"
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
    const MatrixUnit* unit = nullptr;  // not null: rounded, in its tiles, for bfloat16 panels

    const float* block(int64_t i) const { return data + blocks.begin(i) * width; }

    // Writes values[0:count] as columns `first`... of a row.
    void put(int64_t row, int64_t first, const float* values, int64_t count) const {
        if (unit) return unit->put(data, width, row, first, values, count);
        const int64_t i = blocks.block_of(row), begin = blocks.begin(i), stride = blocks.size(i);
        float* out = data + begin * width + first * stride + (row - begin);
        for (int64_t k = 0; k < count; ++k) out[k * stride] = values[k];
    }
};

struct Linear {
    Coding coding;
    const void* panels;
    const float* bias;  // null: none; padded with zeros to whole panels
    int64_t outputs;
    int64_t depth;

    // Memory for this layer's inputs, in the form that it reads. `unit`, if there is one, serves more than one block.
    PackedRows inputs(float* data, const RowBlocks& blocks, const MatrixUnit* unit) const {
        return {data, depth, blocks, coding == Coding::BFLOAT16 && blocks.num_blocks() > 1 ? unit : nullptr};
    }
};

// A thread's memory for a linear layer: tile[rows][TILE], and panels of floats.
struct LinearScratch {
    float* tile;  // whole tiles of rows
    float* panels;

    static constexpr int64_t CACHED_BYTES = 1 << 19;  // panels that several blocks of rows read should stay in a cache

    // Panels taken together: with one block of rows all that `multiply` takes, with several as many as stay in cache.
    static int64_t group(int64_t depth, int64_t num_blocks) {
        const int64_t fits = CACHED_BYTES / panel_bytes(Coding::FLOAT32, depth) / 2 * 2;
        return num_blocks == 1 ? TILE_PANELS : std::max<int64_t>(2, std::min(TILE_PANELS, fits));
    }

    // Floats of `panels`.
    static int64_t panels_size(int64_t depth) { return group(depth, 2) * panel_bytes(Coding::FLOAT32, depth) / 4; }
};

// This member's outputs of a linear layer, tile by tile. `finish(first_output, num_outputs, tile)` gets
// tile[row][TILE], with the bias added; outputs past the layer's own are zeros. Members take panels in multiples of
// `unit`.
template <class Finish>
void multiply_linear(const PanelKernels& kernels, const Linear& linear, const PackedRows& x, int member,
                     const Team& team, const LinearScratch& scratch, int64_t unit, const Finish& finish) {
    const int64_t bytes = panel_bytes(linear.coding, linear.depth), num_blocks = x.blocks.num_blocks();
    const Share panels = share(round_up(linear.outputs, PANEL) / PANEL, member, team.size, unit);
    const int64_t group = x.unit ? TILE_PANELS : LinearScratch::group(linear.depth, num_blocks);
    for (int64_t p = panels.begin; p < panels.end; p += group) {
        const int64_t count = std::min(group, panels.end - p);
        const char* source = static_cast<const char*>(linear.panels) + p * bytes;
        Coding coding = linear.coding;
        if (x.unit) {
            x.unit->multiply(source, count, linear.depth, x.data, x.blocks.num_rows(), scratch.tile, TILE);
        } else if (num_blocks > 1 && coding != Coding::FLOAT32) {  // decoded once instead of once for each block
            const int64_t size = linear.depth * PANEL;
            for (int64_t i = 0; i < count; ++i) {
                kernels.unpack(coding, source + i * bytes, linear.depth, scratch.panels + i * size);
            }
            source = reinterpret_cast<const char*>(scratch.panels);
            coding = Coding::FLOAT32;
        }
        for (int64_t b = 0; b < num_blocks && !x.unit; ++b) {
            kernels.multiply(coding, source, count, linear.depth, x.block(b), x.blocks.size(b),
                             scratch.tile + x.blocks.begin(b) * TILE, TILE, false);
        }
        if (linear.bias) {
            for (int64_t row = 0; row < x.blocks.num_rows(); ++row) {
                for (int64_t j = 0; j < count * PANEL; ++j) {
                    scratch.tile[row * TILE + j] += linear.bias[p * PANEL + j];
                }
            }
        }
        finish(p * PANEL, count * PANEL, scratch.tile);
    }
}

}  // namespace viasd
