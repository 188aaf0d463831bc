#include "layer_skip/decoder_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "sampling/node_laws.h"
#include "tree_verify/tree_verify.h"

namespace viasd {

namespace {

// Memory that only grows, so that a step of the usual size allocates nothing.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    float* floats(int64_t count) {
        if (count > size_) {
            std::free(data_);
            size_ = 0;
            data_ = static_cast<float*>(std::aligned_alloc(64, round_up(count * sizeof(float), 64)));
            if (!data_) throw std::bad_alloc();
            size_ = count;
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

// Rows that keep a sub-layer. Sub-layers kept by the same rows share one set.
struct RowSet {
    std::vector<int64_t> rows;
    RowBlocks blocks;
    std::unique_ptr<AttentionPlan> plan;
};

}  // namespace

struct Decoder::Workspace {
    Buffer hidden, packed, inner, qkv, delta, turns, peaks, sums, outs;
    struct Member {
        Buffer tile, panels, row;
        AttentionScratch attention;
    };
    std::vector<std::unique_ptr<Member>> members;
};

// One step: what is known before the threads start, then the phases that they run.
struct Decoder::Pass {
    Pass(const DecoderModel& model, const DecoderStep& step, Workspace& memory);
    void run(int member, Team& team);

  private:
    void check_bounds() const;
    void build_trees();
    int row_set(int64_t layer, int64_t sub_layer);
    void reserve();

    void embed(int member, const Team& team);
    PackedRows norm_rows(const RowSet& set, const float* weight, const Linear& next, int member, const Team& team);
    void attention(int64_t index, const RowSet& set, int member, Team& team);
    void mlp(int64_t index, const RowSet& set, int member, Team& team);
    void rotate_and_store(const DecoderLayer& layer, int64_t index, const RowSet& set, int member, const Team& team);
    void add_output(const Linear& linear, const float* post_norm, const PackedRows& in, const RowSet& set, int member,
                    Team& team);
    void capture(int64_t layer, int member, const Team& team);
    void finish(int member, Team& team);

    LinearScratch scratch(int member) const {
        Workspace::Member& own = *memory_.members[member];
        return {own.tile.floats(0), own.panels.floats(0)};
    }
    float* hidden_row(int64_t row) const { return hidden_ + row * sizes_.hidden; }
    char* pool(void* base, int64_t layer) const {
        return static_cast<char*>(base) +
               layer * step_.num_slots * sizes_.num_kv_heads * sizes_.head_dim * element_bytes(model_.element);
    }

    const DecoderModel& model_;
    const DecoderStep& step_;
    Workspace& memory_;
    const PanelKernels& kernels_;
    const MatrixUnit* const unit_;  // of models in bfloat16 only: float32 keeps every digit
    const DecoderSizes& sizes_;
    const AttentionShape shape_;
    const int64_t qkv_width_, inner_width_;

    std::vector<SequenceView> sequences_;
    std::vector<int64_t> row_slots_, ancestors_;
    std::vector<RowSet> sets_;
    std::vector<int> layer_sets_;  // [L, 2]: number of the set, -1 where no row keeps the sub-layer

    float *hidden_, *packed_, *inner_, *qkv_, *delta_, *turns_;
    SoftmaxState partials_;
};

Decoder::Pass::Pass(const DecoderModel& model, const DecoderStep& step, Workspace& memory)
    : model_(model),
      step_(step),
      memory_(memory),
      kernels_(panel_kernels()),
      unit_(model.element == Element::BFLOAT16 ? matrix_unit() : nullptr),
      sizes_(model.sizes),
      shape_{model.element,   sizes_.num_kv_heads, sizes_.num_heads / sizes_.num_kv_heads,
             sizes_.head_dim, model.score_scale,   model.attention_soft_cap},
      qkv_width_(round_up(model.layers[0].qkv.outputs, PANEL)),
      inner_width_(round_up(sizes_.intermediate, PANEL)) {
    check_bounds();
    build_trees();
    for (int64_t layer = 0; layer < static_cast<int64_t>(model.layers.size()); ++layer) {
        for (int64_t sub_layer = 0; sub_layer < 2; ++sub_layer) layer_sets_.push_back(row_set(layer, sub_layer));
    }
    reserve();
}

void Decoder::Pass::check_bounds() const {
    require_row_start(step_.row_start, step_.num_sequences, step_.num_rows);
    require_slots(step_.slots, step_.max_len, step_.context_len, step_.row_start, step_.num_sequences, step_.num_slots);
    for (int64_t i = 0; step_.logits_rows && i < step_.num_logits; ++i) {
        if (step_.logits_rows[i] < 0 || step_.logits_rows[i] >= step_.num_rows) {
            throw std::invalid_argument("logits_rows must be in [0, R)");
        }
    }
}

void Decoder::Pass::build_trees() {
    int64_t longest = 1;
    for (int64_t b = 0; b < step_.num_sequences; ++b) {
        longest = std::max(longest, step_.row_start[b + 1] - step_.row_start[b]);
    }
    const int64_t num_words = (longest + 63) / 64;
    std::vector<int32_t> links;
    if (step_.parents) {
        ancestors_.resize(step_.num_rows * num_words);
        links.resize(3 * longest);
    }
    for (int64_t b = 0; b < step_.num_sequences; ++b) {
        const int64_t first = step_.row_start[b], num_rows = step_.row_start[b + 1] - first;
        const int32_t* slots = step_.slots + b * step_.max_len;
        int64_t* words = nullptr;
        if (step_.parents) {
            words = ancestors_.data() + first * num_words;
            build_tree_sequence(step_.parents + first, num_rows, longest, num_words,
                                {words, links.data(), links.data() + longest, links.data() + 2 * longest});
        }
        sequences_.push_back({slots, step_.context_len[b], num_rows, words, num_words});
        for (int64_t row = 0; row < num_rows; ++row) row_slots_.push_back(slots[step_.context_len[b] + row]);
    }
}

int Decoder::Pass::row_set(int64_t layer, int64_t sub_layer) {
    const int64_t num_layers = model_.layers.size();
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < step_.num_rows; ++row) {
        const bool* route = step_.row_route ? step_.row_route + row * num_layers * 2 : step_.route;
        if (route[layer * 2 + sub_layer]) rows.push_back(row);
    }
    if (rows.empty()) return -1;
    auto same = std::find_if(sets_.begin(), sets_.end(), [&](const RowSet& set) { return set.rows == rows; });
    if (same == sets_.end()) {
        RowSet set;
        set.blocks = RowBlocks(rows.size(), kernels_.max_block_rows);
        set.plan =
            std::make_unique<AttentionPlan>(shape_, sequences_, step_.row_start, rows, std::max(1, step_.num_threads));
        set.rows = std::move(rows);
        sets_.push_back(std::move(set));
        return static_cast<int>(sets_.size()) - 1;
    }
    return static_cast<int>(same - sets_.begin());
}

void Decoder::Pass::reserve() {
    const int64_t num_rows = step_.num_rows, logits_rows = step_.num_logits;
    int64_t pairs = 0, partials = 0, unit_rows = 0;
    for (const Rope& rope : model_.ropes) pairs += rope.num_pairs;
    for (const RowSet& set : sets_) {
        partials = std::max(partials, set.plan->num_partials);
        unit_rows = std::max(unit_rows, set.plan->max_rows);
    }
    hidden_ = memory_.hidden.floats(num_rows * sizes_.hidden);
    packed_ = memory_.packed.floats(tiles_size(std::max(num_rows, logits_rows), sizes_.hidden));
    inner_ = memory_.inner.floats(tiles_size(num_rows, std::max(inner_width_, sizes_.num_heads * sizes_.head_dim)));
    qkv_ = memory_.qkv.floats(num_rows * qkv_width_);
    delta_ = memory_.delta.floats(num_rows * round_up(sizes_.hidden, PANEL));
    turns_ = memory_.turns.floats(num_rows * pairs * 2);
    const int64_t padded = round_up(sizes_.head_dim, PANEL);
    partials_ = {memory_.peaks.floats(partials), memory_.sums.floats(partials), memory_.outs.floats(partials * padded)};
    int64_t panels_size = 0;
    for (const int64_t depth : {sizes_.hidden, sizes_.intermediate, sizes_.num_heads * sizes_.head_dim}) {
        panels_size = std::max(panels_size, LinearScratch::panels_size(depth));
    }
    const int64_t row_width = std::max({sizes_.hidden, sizes_.head_dim, TILE});
    while (static_cast<int>(memory_.members.size()) < std::max(1, step_.num_threads)) {
        memory_.members.push_back(std::make_unique<Workspace::Member>());
    }
    for (auto& member : memory_.members) {
        member->tile.floats(round_up(std::max(num_rows, logits_rows), UNIT_ROWS) * TILE);
        member->panels.floats(panels_size);
        member->row.floats(row_width);
        member->attention.reserve(shape_, unit_rows);
    }
}

void Decoder::Pass::run(int member, Team& team) {
    if (unit_) unit_->begin();
    embed(member, team);
    team.barrier();
    for (int64_t layer = 0; layer < static_cast<int64_t>(model_.layers.size()); ++layer) {
        capture(layer, member, team);
        const int attending = layer_sets_[2 * layer], feeding = layer_sets_[2 * layer + 1];
        if (attending >= 0) attention(layer, sets_[attending], member, team);
        if (feeding >= 0) mlp(layer, sets_[feeding], member, team);
    }
    capture(model_.layers.size(), member, team);
    finish(member, team);
    if (unit_) unit_->end();
}

void Decoder::Pass::embed(int member, const Team& team) {
    const int64_t width = sizes_.hidden;
    const Share rows = share(step_.num_rows, member, team.size);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* out = hidden_row(row);
        const int64_t token = step_.tokens[row];
        if (token < 0 || token >= sizes_.vocab) {
            std::fill_n(out, width, 0.0f);
        } else if (model_.embedding) {
            const char* table = static_cast<const char*>(model_.embedding);
            kernels_.widen(model_.element, table + token * width * element_bytes(model_.element), width, out);
        } else {
            const int64_t bytes = panel_bytes(model_.head.coding, width);
            kernels_.unpack(model_.head.coding, static_cast<const char*>(model_.head.panels) + token / PANEL * bytes,
                            width, scratch(member).panels);
            for (int64_t k = 0; k < width; ++k) out[k] = scratch(member).panels[k * PANEL + token % PANEL];
        }
        if (model_.embedding_scale != 1) {
            for (int64_t k = 0; k < width; ++k) out[k] *= model_.embedding_scale;
        }
        float* turns = turns_;
        for (const Rope& rope : model_.ropes) {
            for (int64_t j = 0; j < rope.num_pairs; ++j) {
                const float angle = static_cast<float>(step_.positions[row]) * rope.frequencies[j];
                turns[row * rope.num_pairs * 2 + j] = std::cos(angle);
                turns[row * rope.num_pairs * 2 + rope.num_pairs + j] = std::sin(angle);
            }
            turns += step_.num_rows * rope.num_pairs * 2;
        }
    }
}

PackedRows Decoder::Pass::norm_rows(const RowSet& set, const float* weight, const Linear& next, int member,
                                    const Team& team) {
    const PackedRows out = next.inputs(packed_, set.blocks, unit_);
    float* row = memory_.members[member]->row.floats(0);
    const Share rows = share(set.rows.size(), member, team.size);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        kernels_.rms_norm(hidden_row(set.rows[i]), weight, sizes_.hidden, model_.eps, row);
        out.put(i, 0, row, sizes_.hidden);
    }
    return out;
}

void Decoder::Pass::attention(int64_t index, const RowSet& set, int member, Team& team) {
    const DecoderLayer& layer = model_.layers[index];
    Workspace::Member& own = *memory_.members[member];
    const int64_t num_rows = set.rows.size(), dim = sizes_.head_dim;
    const int64_t slot_stride = sizes_.num_kv_heads * dim;
    const AttentionCall call = {kernels_,
                                shape_,
                                *set.plan,
                                {pool(step_.keys, index), slot_stride, dim},
                                {pool(step_.values, index), slot_stride, dim},
                                qkv_,
                                qkv_width_,
                                layer.window,
                                partials_,
                                set.blocks.num_blocks() > 1 ? unit_ : nullptr};
    const PackedRows normed = norm_rows(set, layer.attention_norm, layer.qkv, member, team);
    team.barrier();
    multiply_linear(kernels_, layer.qkv, normed, member, team, scratch(member), 1,
                    [&](int64_t first, int64_t count, const float* tile) {
                        for (int64_t i = 0; i < num_rows; ++i) {
                            std::copy_n(tile + i * TILE, count, qkv_ + i * qkv_width_ + first);
                        }
                    });
    team.barrier();
    rotate_and_store(layer, index, set, member, team);
    team.barrier();
    const PackedRows attended = layer.attention_out.inputs(inner_, set.blocks, unit_);
    attend(call, member, team, own.attention,
           [&](int64_t row, int64_t head, const float* values) { attended.put(row, head * dim, values, dim); });
    team.barrier();
    add_output(layer.attention_out, layer.attention_post_norm, attended, set, member, team);
}

void Decoder::Pass::rotate_and_store(const DecoderLayer& layer, int64_t index, const RowSet& set, int member,
                                     const Team& team) {
    const int64_t dim = sizes_.head_dim, heads = sizes_.num_heads, kv_heads = sizes_.num_kv_heads;
    const float* turns = turns_;
    for (int32_t i = 0; i < layer.rope; ++i) turns += step_.num_rows * model_.ropes[i].num_pairs * 2;
    const int64_t pairs = model_.ropes[layer.rope].num_pairs;
    const int64_t head_bytes = dim * element_bytes(model_.element);
    float* row_buffer = memory_.members[member]->row.floats(0);
    const int64_t per_row = heads + 2 * kv_heads;
    const Share items = share(set.rows.size() * per_row, member, team.size);
    for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t i = item / per_row, head = item % per_row, row = set.rows[i];
        float* x = qkv_ + i * qkv_width_ + head * dim;
        if (head < heads + kv_heads) {
            const float* norm = head < heads ? layer.q_norm : layer.k_norm;
            if (norm) {
                kernels_.rms_norm(x, norm, dim, model_.eps, row_buffer);
                std::copy_n(row_buffer, dim, x);
            }
            const float *cosine = turns + row * pairs * 2, *sine = cosine + pairs;
            for (int64_t j = 0; j < pairs; ++j) {
                const float a = x[j], b = x[pairs + j];
                x[j] = a * cosine[j] - b * sine[j];
                x[pairs + j] = b * cosine[j] + a * sine[j];
            }
        }
        if (head < heads) continue;
        const bool is_key = head < heads + kv_heads;
        const int64_t kv_head = head - heads - (is_key ? 0 : kv_heads);
        char* out = pool(is_key ? step_.keys : step_.values, index);
        kernels_.narrow(x, dim, model_.element, out + (row_slots_[row] * kv_heads + kv_head) * head_bytes);
    }
}

void Decoder::Pass::add_output(const Linear& linear, const float* post_norm, const PackedRows& in, const RowSet& set,
                               int member, Team& team) {
    Workspace::Member& own = *memory_.members[member];
    const int64_t num_rows = set.rows.size(), stride = round_up(sizes_.hidden, PANEL);
    multiply_linear(kernels_, linear, in, member, team, scratch(member), 1,
                    [&](int64_t first, int64_t count, const float* tile) {
                        const int64_t inside = std::min(count, sizes_.hidden - first);
                        for (int64_t i = 0; i < num_rows; ++i) {
                            if (post_norm) {
                                std::copy_n(tile + i * TILE, inside, delta_ + i * stride + first);
                                continue;
                            }
                            float* out = hidden_row(set.rows[i]) + first;
                            for (int64_t j = 0; j < inside; ++j) out[j] += tile[i * TILE + j];
                        }
                    });
    team.barrier();
    if (!post_norm) return;
    float* row = own.row.floats(0);
    const Share rows = share(num_rows, member, team.size);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        kernels_.rms_norm(delta_ + i * stride, post_norm, sizes_.hidden, model_.eps, row);
        float* out = hidden_row(set.rows[i]);
        for (int64_t k = 0; k < sizes_.hidden; ++k) out[k] += row[k];
    }
    team.barrier();
}

void Decoder::Pass::mlp(int64_t index, const RowSet& set, int member, Team& team) {
    const DecoderLayer& layer = model_.layers[index];
    Workspace::Member& own = *memory_.members[member];
    const PackedRows normed = norm_rows(set, layer.mlp_norm, layer.gate_up, member, team);
    team.barrier();
    const PackedRows inner = layer.mlp_out.inputs(inner_, set.blocks, unit_);
    const auto activate = model_.activation == Activation::SILU_MUL ? kernels_.silu_mul : kernels_.gelu_tanh_mul;
    float* values = own.row.floats(0);
    multiply_linear(kernels_, layer.gate_up, normed, member, team, scratch(member), 2,
                    [&](int64_t first, int64_t count, const float* tile) {
                        for (int64_t i = 0; i < inner.blocks.num_rows(); ++i) {
                            for (int64_t j = 0; j < count; j += 2 * PANEL) {
                                const float* gate = tile + i * TILE + j;
                                activate(gate, gate + PANEL, PANEL, values + j / 2);
                            }
                            inner.put(i, first / 2, values, std::min(count / 2, sizes_.intermediate - first / 2));
                        }
                    });
    team.barrier();
    add_output(layer.mlp_out, layer.mlp_post_norm, inner, set, member, team);
}

void Decoder::Pass::capture(int64_t layer, int member, const Team& team) {
    const Share rows = share(step_.num_rows, member, team.size);
    const int64_t bytes = sizes_.hidden * element_bytes(model_.element);
    for (const Capture& wanted : step_.captures) {
        if (wanted.layer != layer) continue;
        for (int64_t row = rows.begin; row < rows.end; ++row) {
            kernels_.narrow(hidden_row(row), sizes_.hidden, model_.element,
                            static_cast<char*>(wanted.out) + row * bytes);
        }
    }
}

void Decoder::Pass::finish(int member, Team& team) {
    Workspace::Member& own = *memory_.members[member];
    float* normed = own.row.floats(0);
    const int64_t bytes = element_bytes(model_.element), width = sizes_.hidden;
    const Share rows = share(step_.num_rows, member, team.size);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        kernels_.rms_norm(hidden_row(row), model_.final_norm, width, model_.eps, normed);
        kernels_.narrow(normed, width, model_.element, static_cast<char*>(step_.hidden) + row * width * bytes);
    }
    if (step_.num_logits == 0) return;
    const PackedRows scored = model_.head.inputs(packed_, RowBlocks(step_.num_logits, kernels_.max_block_rows), unit_);
    const Share wanted = share(step_.num_logits, member, team.size);
    for (int64_t i = wanted.begin; i < wanted.end; ++i) {
        const int64_t row = step_.logits_rows ? step_.logits_rows[i] : i;
        kernels_.rms_norm(hidden_row(row), model_.final_norm, width, model_.eps, normed);
        scored.put(i, 0, normed, width);
    }
    team.barrier();
    multiply_linear(kernels_, model_.head, scored, member, team, scratch(member), 1,
                    [&](int64_t first, int64_t count, float* values) {
                        const int64_t inside = std::min(count, sizes_.vocab - first);
                        for (int64_t i = 0; i < step_.num_logits; ++i) {
                            float* row = values + i * TILE;
                            if (model_.logit_soft_cap > 0) kernels_.soft_cap(row, inside, model_.logit_soft_cap);
                            kernels_.narrow(row, inside, model_.element,
                                            static_cast<char*>(step_.logits) + (i * sizes_.vocab + first) * bytes);
                        }
                    });
}

Decoder::Decoder(DecoderModel model) : model_(std::move(model)) {}

Decoder::~Decoder() = default;

void Decoder::step(const DecoderStep& step) {
    std::unique_ptr<Workspace> memory;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!idle_.empty()) {
            memory = std::move(idle_.back());
            idle_.pop_back();
        }
    }
    if (!memory) memory = std::make_unique<Workspace>();
    Pass pass(model_, step, *memory);
    run_team(step.num_threads, [&](int member, Team& team) { pass.run(member, team); });
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(memory));
}

}  // namespace viasd
