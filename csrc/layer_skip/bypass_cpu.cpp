#include "layer_skip/bypass_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "layer_skip/packed_rows.h"
#include "threads.h"

namespace viasd {

namespace {

constexpr int64_t SMALL = 1 << 15;  // elements below which threads cost more than they save

int threads_for(int64_t elements, int num_threads) { return elements < SMALL ? 1 : num_threads; }

}  // namespace

void bypass_norm_cpu(const BypassNorm& op) {
    const PanelKernels& kernels = panel_kernels();
    const int num_threads = threads_for(op.num_rows * op.width, op.num_threads);
    std::vector<float> memory(num_threads * 3 * op.width);
    run_team(num_threads, [&](int member, Team& team) {
        float *hidden = memory.data() + member * 3 * op.width, *delta = hidden + op.width, *normed = delta + op.width;
        const Share rows = share(op.num_rows, member, team.size);
        for (int64_t i = rows.begin; i < rows.end; ++i) {
            const char* in = op.hidden.row(op.element, i);
            char* out = op.hidden_out.row(op.element, i);
            kernels.widen(op.element, in, op.width, hidden);
            if (op.delta.data && op.keep[i]) {
                kernels.widen(op.element, op.delta.row(op.element, i), op.width, delta);
                if (op.delta_weight) {
                    kernels.rms_norm(delta, op.delta_weight, op.width, op.eps, normed);
                    kernels.narrow(normed, op.width, op.element, out);  // what is added is rounded, as any delta
                    kernels.widen(op.element, out, op.width, delta);
                }
                for (int64_t k = 0; k < op.width; ++k) hidden[k] += delta[k];
                kernels.narrow(hidden, op.width, op.element, out);
                kernels.widen(op.element, out, op.width, hidden);
            } else {
                std::memcpy(out, in, op.width * element_bytes(op.element));
            }
            kernels.rms_norm(hidden, op.weight, op.width, op.eps, normed);
            kernels.narrow(normed, op.width, op.element, op.normed.row(op.element, i));
        }
    });
}

void bypass_linear_cpu(const BypassLinear& op) {
    const PanelKernels& kernels = panel_kernels();
    const bool paired = op.epilogue != Epilogue::NONE;
    const int64_t width = paired ? op.num_outputs / 2 : op.num_outputs;
    std::vector<int64_t> kept;
    for (int64_t i = 0; i < op.num_rows; ++i) {
        if (op.keep[i]) {
            kept.push_back(i);
        } else if (op.residual.data) {
            std::memcpy(op.out.row(op.element, i), op.residual.row(op.element, i), width * element_bytes(op.element));
        } else {
            std::memset(op.out.row(op.element, i), 0, width * element_bytes(op.element));
        }
    }
    if (kept.empty()) return;
    const int64_t num_kept = kept.size();
    std::vector<float> inputs(num_kept * op.depth), row(op.depth);
    const PackedRows x = {inputs.data(), op.depth, RowBlocks(num_kept, kernels.max_block_rows)};
    for (int64_t i = 0; i < num_kept; ++i) {
        kernels.widen(op.element, op.x.row(op.element, kept[i]), op.depth, row.data());
        x.put(i, 0, row.data(), op.depth);
    }
    // The weights come in rows: each member turns the few that it works on into panels, in its cache.
    const int64_t halves = paired ? 2 : 1, group = TILE_PANELS / 2 / halves;
    const int64_t num_groups = (width + group * PANEL - 1) / (group * PANEL);
    const int num_threads = threads_for(op.num_outputs * op.depth, op.num_threads);
    const int64_t panels_size = group * halves * PANEL * op.depth, tile_size = num_kept * TILE;
    std::vector<float> memory(num_threads * (panels_size + tile_size + 2 * TILE));
    const auto activate = op.epilogue == Epilogue::SILU_MUL ? kernels.silu_mul : kernels.gelu_tanh_mul;
    run_team(num_threads, [&](int member, Team& team) {
        float* panels = memory.data() + member * (panels_size + tile_size + 2 * TILE);
        float *tile = panels + panels_size, *residual = tile + tile_size, *result = residual + TILE;
        const Share groups = share(num_groups, member, team.size);
        for (int64_t g = groups.begin; g < groups.end; ++g) {
            const int64_t first = g * group * PANEL, count = std::min(group * PANEL, width - first);
            const int64_t half_panels = (count + PANEL - 1) / PANEL;
            for (int64_t p = 0; p < half_panels * halves; ++p) {
                const int64_t begin = p / half_panels * width + first + p % half_panels * PANEL;
                const void* rows[PANEL];
                for (int64_t i = 0; i < PANEL; ++i) {
                    const bool inside = p % half_panels * PANEL + i < count;
                    rows[i] = inside ? op.weight.row(op.element, begin + i) : nullptr;
                }
                kernels.pack(op.element, rows, op.depth, panels + p * PANEL * op.depth);
            }
            for (int64_t b = 0; b < x.blocks.num_blocks(); ++b) {
                kernels.multiply(Coding::FLOAT32, panels, half_panels * halves, op.depth, x.block(b), x.blocks.size(b),
                                 tile + x.blocks.begin(b) * TILE, TILE, false);
            }
            for (int64_t i = 0; i < num_kept; ++i) {
                float* values = tile + i * TILE;
                for (int64_t half = 0; op.bias && half < halves; ++half) {
                    float* own = values + half * half_panels * PANEL;
                    for (int64_t j = 0; j < count; ++j) own[j] += op.bias[half * width + first + j];
                }
                const float* out = values;
                if (paired) {
                    activate(values, values + half_panels * PANEL, count, result);
                    out = result;
                } else if (op.residual.data) {
                    kernels.widen(op.element, op.residual.row(op.element, kept[i]) + first * element_bytes(op.element),
                                  count, residual);
                    for (int64_t j = 0; j < count; ++j) values[j] += residual[j];
                }
                kernels.narrow(out, count, op.element,
                               op.out.row(op.element, kept[i]) + first * element_bytes(op.element));
            }
        }
    });
}

}  // namespace viasd
