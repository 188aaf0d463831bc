#include "tree_verify/tree_attention_cpu.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "sampling/node_laws.h"

namespace viasd {

namespace {

constexpr int64_t MAX_HEAD_QUERIES = 192;  // query vectors that share a tile of a head's keys
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Bits [first, first + KEY_TILE) of bit words; bits outside them are 0.
uint64_t bits_from(const int64_t* words, int64_t num_words, int64_t first) {
    auto word = [&](int64_t i) { return i >= 0 && i < num_words ? static_cast<uint64_t>(words[i]) : 0; };
    const int64_t index = first >= 0 ? first / 64 : -((63 - first) / 64);
    const int64_t shift = first - index * 64;
    return shift == 0 ? word(index) : word(index) >> shift | word(index + 1) << (64 - shift);
}

// Ones at [0, count).
uint64_t low_bits(int64_t count) { return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

}  // namespace

int64_t SequenceView::depth(int64_t row) const {
    if (!ancestors) return row;
    int64_t depth = 0;
    for (int64_t i = 0; i < num_words; ++i) depth += __builtin_popcountll(ancestors[row * num_words + i]);
    return depth;
}

uint64_t SequenceView::visible(int64_t row, int64_t tile, int64_t window) const {
    const int64_t base = tile * KEY_TILE, position = context + depth(row);
    const int64_t oldest = window ? position - window + 1 : 0;  // position of the oldest key in reach
    const uint64_t in_context = low_bits(context - base);
    uint64_t bits = in_context & ~low_bits(oldest - base);
    if (!ancestors) return bits | (low_bits(context + row + 1 - base) & ~in_context & ~low_bits(oldest - base));
    uint64_t rows = bits_from(ancestors + row * num_words, num_words, base - context);
    const int64_t self = context + row - base;
    if (self >= 0 && self < KEY_TILE) rows |= uint64_t{1} << self;
    rows &= low_bits(num_keys() - base);  // bits of rows that are not there lead nowhere
    if (oldest > context) {
        for (uint64_t left = rows; left; left &= left - 1) {
            const int64_t j = __builtin_ctzll(left);
            if (context + depth(base + j - context) < oldest) rows &= ~(uint64_t{1} << j);
        }
    }
    return bits | rows;
}

AttentionPlan::AttentionPlan(const AttentionShape& shape, const std::vector<SequenceView>& all,
                             const int64_t* row_start, const std::vector<int64_t>& rows, int num_threads)
    : sequences(all) {
    const int64_t block_rows = std::max<int64_t>(1, MAX_HEAD_QUERIES / shape.group);
    int64_t sequence = 0;
    for (size_t i = 0; i < rows.size();) {
        while (rows[i] >= row_start[sequence + 1]) ++sequence;
        size_t end = i;
        while (end < rows.size() && rows[end] < row_start[sequence + 1]) ++end;
        for (size_t j = i; j < end; ++j) local_rows.push_back(rows[j] - row_start[sequence]);
        const int64_t splits = (all[sequence].num_keys() + KEY_TILE * SPLIT_TILES - 1) / (KEY_TILE * SPLIT_TILES);
        for (size_t j = i; j < end; j += block_rows) {
            const int64_t count = std::min<int64_t>(block_rows, end - j);
            max_rows = std::max(max_rows, count);
            units.push_back({sequence, static_cast<int64_t>(j), count, 0, splits, -1});
        }
        i = end;
    }
    const bool can_split =
        std::any_of(units.begin(), units.end(), [](const Unit& unit) { return unit.num_splits > 1; });
    if (!can_split || num_threads == 1 || units.size() >= static_cast<size_t>(4 * num_threads)) return;
    merges.swap(units);
    for (Unit& whole : merges) {
        whole.partial = num_partials;
        for (int64_t split = 0; split < whole.num_splits; ++split) {
            Unit part = whole;
            part.first_split = split;
            part.num_splits = 1;
            part.partial = num_partials;
            num_partials += whole.count * shape.group * shape.num_kv_heads;
            units.push_back(part);
        }
    }
}

void AttentionScratch::reserve(const AttentionShape& shape, int64_t max_rows) {
    const int64_t padded = round_up(shape.head_dim, PANEL), per_head = max_rows * shape.group;
    const int64_t all = per_head * shape.num_kv_heads;
    auto grow = [](std::vector<float>& buffer, int64_t size) {
        if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
    };
    grow(queries, tiles_size(per_head, shape.head_dim) * shape.num_kv_heads);
    grow(keys, KEY_TILE * shape.head_dim);
    grow(values, padded / PANEL * VALUE_PANEL);
    grow(clean_values, padded / PANEL * VALUE_PANEL);
    grow(scores, round_up(per_head, UNIT_ROWS) * KEY_TILE);
    grow(short_keys, KEY_TILE / PANEL * panel_bytes(Coding::BFLOAT16, shape.head_dim) / 4);
    grow(short_values, padded / PANEL * panel_bytes(Coding::BFLOAT16, KEY_TILE) / 4);
    grow(short_weights, tiles_size(per_head, KEY_TILE));
    grow(added, round_up(per_head, UNIT_ROWS) * padded);
    for (auto* one : {&peaks, &sums, &other_peaks, &other_sums}) grow(*one, all);
    for (auto* each : {&outs, &other_outs}) grow(*each, all * padded);
}

namespace {

SoftmaxState from_query(const SoftmaxState& state, int64_t query, int64_t padded) {
    return {state.peak + query, state.sum + query, state.out + query * padded};
}

// One unit's work. A key head's queries are packed in blocks as PanelKernels::multiply wants its rows.
class UnitWork {
  public:
    UnitWork(const AttentionCall& call, const AttentionPlan::Unit& unit, AttentionScratch& scratch)
        : call_(call),
          unit_(unit),
          scratch_(scratch),
          sequence_(call.plan.sequences[unit.sequence]),
          per_head_(unit.count * call.shape.group),
          padded_(round_up(call.shape.head_dim, PANEL)),
          matrix_unit_(per_head_ > call.kernels.max_block_rows ? call.unit : nullptr) {}

    int64_t num_queries() const { return per_head_ * call_.shape.num_kv_heads; }
    int64_t padded() const { return padded_; }

    void pack_queries() {
        const int64_t dim = call_.shape.head_dim;
        for (int64_t kv_head = 0; kv_head < call_.shape.num_kv_heads; ++kv_head) {
            for (int64_t i = 0; matrix_unit_ && i < per_head_; ++i) {
                matrix_unit_->put(head_queries(kv_head), dim, i, 0, query(kv_head, i), dim);
            }
            if (matrix_unit_) continue;
            for_blocks([&](int64_t begin, int64_t size) {
                float* out = head_queries(kv_head) + begin * dim;
                for (int64_t i = 0; i < size; ++i) {
                    const float* q = query(kv_head, begin + i);
                    for (int64_t d = 0; d < dim; ++d) out[d * size + i] = q[d];
                }
            });
        }
    }

    // The state of one split of the keys, from nothing.
    void run_split(int64_t split, const SoftmaxState& state) {
        for (int64_t i = 0; i < num_queries(); ++i) {
            state.peak[i] = -INFINITE;
            state.sum[i] = 0;
        }
        std::fill_n(state.out, num_queries() * padded_, 0.0f);
        const int64_t last = std::min((split + 1) * SPLIT_TILES, (sequence_.num_keys() + KEY_TILE - 1) / KEY_TILE);
        for (int64_t tile = split * SPLIT_TILES; tile < last; ++tile) run_tile(tile, state);
    }

    // state <- state and `later`, whose keys come after.
    void merge(const SoftmaxState& state, const SoftmaxState& later) {
        for (int64_t i = 0; i < num_queries(); ++i) {
            if (later.peak[i] == -INFINITE && later.sum[i] == 0) continue;
            const float peak = std::max(state.peak[i], later.peak[i]), shift = peak == -INFINITE ? 0 : peak;
            const float ours = call_.kernels.exp(state.peak[i] - shift);
            const float theirs = call_.kernels.exp(later.peak[i] - shift);
            state.peak[i] = peak;
            state.sum[i] = state.sum[i] * ours + later.sum[i] * theirs;
            float* out = state.out + i * padded_;
            const float* other = later.out + i * padded_;
            for (int64_t d = 0; d < padded_; ++d) out[d] = out[d] * ours + other[d] * theirs;
        }
    }

    void normalise(const SoftmaxState& state) {
        for (int64_t i = 0; i < num_queries(); ++i) {
            const float inverse = 1.0f / state.sum[i];
            for (int64_t d = 0; d < padded_; ++d) state.out[i * padded_ + d] *= inverse;
        }
    }

  private:
    template <class Body>
    void for_blocks(const Body& body) const {
        const int64_t most = call_.kernels.max_block_rows, blocks = (per_head_ + most - 1) / most;
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t begin = per_head_ * b / blocks;
            body(begin, per_head_ * (b + 1) / blocks - begin);
        }
    }

    const float* query(int64_t kv_head, int64_t i) const {
        const int64_t group = call_.shape.group, head = kv_head * group + i % group;
        return call_.q + (unit_.first + i / group) * call_.q_stride + head * call_.shape.head_dim;
    }

    float* head_queries(int64_t kv_head) const {
        return scratch_.queries.data() + kv_head * tiles_size(per_head_, call_.shape.head_dim);
    }

    void run_tile(int64_t tile, const SoftmaxState& state) {
        uint64_t masks[MAX_HEAD_QUERIES], any = 0;
        for (int64_t row = 0; row < unit_.count; ++row) {
            masks[row] = sequence_.visible(call_.plan.local_rows[unit_.first + row], tile, call_.window);
            any |= masks[row];
        }
        if (!any) return;
        for (int64_t kv_head = 0; kv_head < call_.shape.num_kv_heads; ++kv_head) {
            run_head(tile, kv_head, masks, from_query(state, kv_head * per_head_, padded_));
        }
    }

    void run_head(int64_t tile, int64_t kv_head, const uint64_t* masks, const SoftmaxState& state) {
        const int64_t dim = call_.shape.head_dim, group = call_.shape.group;
        const bool all_finite = gather(tile, kv_head);
        float* scores = scratch_.scores.data();
        if (matrix_unit_) {
            matrix_unit_->multiply(shortened(scratch_.keys, dim * PANEL, KEY_TILE / PANEL, dim, scratch_.short_keys),
                                   KEY_TILE / PANEL, dim, head_queries(kv_head), per_head_, scores, KEY_TILE);
        } else {
            for_blocks([&](int64_t begin, int64_t size) {
                call_.kernels.multiply(Coding::FLOAT32, scratch_.keys.data(), KEY_TILE / PANEL, dim,
                                       head_queries(kv_head) + begin * dim, size, scores + begin * KEY_TILE, KEY_TILE,
                                       false);
            });
        }
        for (int64_t i = 0; i < per_head_; ++i) {
            const float factor = call_.kernels.soften(scores + i * KEY_TILE, masks[i / group], call_.shape.scale,
                                                      call_.shape.soft_cap, state.peak + i, state.sum + i);
            if (factor != 1) {
                for (int64_t d = 0; d < padded_; ++d) state.out[i * padded_ + d] *= factor;
            }
        }
        if (!all_finite) {
            for (int64_t i = 0; i < per_head_; ++i) {
                drop_hidden_values(masks[i / group]);
                add_values(scratch_.clean_values.data(), i, 1, state);
            }
        } else if (matrix_unit_) {
            add_values_by_unit(state);
        } else {
            for_blocks([&](int64_t begin, int64_t size) { add_values(scratch_.values.data(), begin, size, state); });
        }
    }

    void add_values_by_unit(const SoftmaxState& state) {
        float *weights = scratch_.short_weights.data(), *added = scratch_.added.data();
        for (int64_t i = 0; i < per_head_; ++i) {
            matrix_unit_->put(weights, KEY_TILE, i, 0, scratch_.scores.data() + i * KEY_TILE, KEY_TILE);
        }
        const int64_t num_panels = padded_ / PANEL, bytes = panel_bytes(Coding::BFLOAT16, KEY_TILE);
        const char* panels = shortened(scratch_.values, VALUE_PANEL, num_panels, KEY_TILE, scratch_.short_values);
        for (int64_t p = 0; p < num_panels; p += TILE_PANELS) {
            matrix_unit_->multiply(panels + p * bytes, std::min(TILE_PANELS, num_panels - p), KEY_TILE, weights,
                                   per_head_, added + p * PANEL, padded_);
        }
        for (int64_t i = 0; i < per_head_ * padded_; ++i) state.out[i] += added[i];
    }

    // Panels of floats, which came from bfloat16, as what they were.
    const char* shortened(const std::vector<float>& panels, int64_t stride, int64_t num_panels, int64_t depth,
                          std::vector<float>& out) const {
        char* to = reinterpret_cast<char*>(out.data());
        for (int64_t p = 0; p < num_panels; ++p) {
            matrix_unit_->shorten(panels.data() + p * stride, depth, to + p * panel_bytes(Coding::BFLOAT16, depth));
        }
        return to;
    }

    // Past the last key its own stands in: no row sees what lies there.
    bool gather(int64_t tile, int64_t kv_head) {
        const int32_t* slots = sequence_.slots + tile * KEY_TILE;
        const int64_t last = std::min(KEY_TILE, sequence_.num_keys() - tile * KEY_TILE) - 1;
        const void *keys[KEY_TILE], *values[KEY_TILE];
        for (int64_t j = 0; j < KEY_TILE; ++j) {
            const int32_t slot = slots[std::min(j, last)];
            keys[j] = call_.keys.at(call_.shape.element, slot, kv_head);
            values[j] = call_.values.at(call_.shape.element, slot, kv_head);
        }
        call_.kernels.keys_to_panels(call_.shape.element, keys, call_.shape.head_dim, scratch_.keys.data());
        return call_.kernels.values_to_panels(call_.shape.element, values, call_.shape.head_dim,
                                              scratch_.values.data());
    }

    // What a row does not see must not reach it, not even as 0 times infinity.
    void drop_hidden_values(uint64_t visible) {
        for (int64_t p = 0; p < padded_ / PANEL; ++p) {
            for (int64_t i = 0; i < KEY_TILE * PANEL; ++i) {
                const int64_t at = p * VALUE_PANEL + i;
                scratch_.clean_values[at] = visible >> (i / PANEL) & 1 ? scratch_.values[at] : 0.0f;
            }
        }
    }

    void add_values(const float* values, int64_t begin, int64_t size, const SoftmaxState& state) {
        call_.kernels.add_values(values, padded_ / PANEL, scratch_.scores.data() + begin * KEY_TILE, size,
                                 state.out + begin * padded_, padded_);
    }

    const AttentionCall& call_;
    const AttentionPlan::Unit& unit_;
    AttentionScratch& scratch_;
    const SequenceView& sequence_;
    const int64_t per_head_, padded_;
    const MatrixUnit* const matrix_unit_;
};

}  // namespace

void attend_unit(const AttentionCall& call, const AttentionPlan::Unit& unit, AttentionScratch& scratch) {
    UnitWork work(call, unit, scratch);
    work.pack_queries();
    if (unit.partial >= 0) {
        work.run_split(unit.first_split, from_query(call.partials, unit.partial, work.padded()));
        return;
    }
    const SoftmaxState state = {scratch.peaks.data(), scratch.sums.data(), scratch.outs.data()};
    const SoftmaxState later = {scratch.other_peaks.data(), scratch.other_sums.data(), scratch.other_outs.data()};
    work.run_split(0, state);
    for (int64_t split = 1; split < unit.num_splits; ++split) {
        work.run_split(split, later);
        work.merge(state, later);
    }
    work.normalise(state);
}

void merge_unit(const AttentionCall& call, const AttentionPlan::Unit& unit, AttentionScratch& scratch) {
    UnitWork work(call, unit, scratch);
    const SoftmaxState state = {scratch.peaks.data(), scratch.sums.data(), scratch.outs.data()};
    const SoftmaxState first = from_query(call.partials, unit.partial, work.padded());
    std::copy_n(first.peak, work.num_queries(), state.peak);
    std::copy_n(first.sum, work.num_queries(), state.sum);
    std::copy_n(first.out, work.num_queries() * work.padded(), state.out);
    for (int64_t split = 1; split < unit.num_splits; ++split) {
        work.merge(state, from_query(call.partials, unit.partial + split * work.num_queries(), work.padded()));
    }
    work.normalise(state);
}

void require_slots(const int32_t* slots, int64_t max_len, const int64_t* context_len, const int64_t* row_start,
                   int64_t num_sequences, int64_t num_slots) {
    for (int64_t b = 0; b < num_sequences; ++b) {
        const int64_t num_rows = row_start[b + 1] - row_start[b];
        if (context_len[b] < 0 || context_len[b] > max_len - num_rows) {
            throw std::invalid_argument("context_len must be >= 0 and, with the sequence's rows, at most max_len");
        }
        const int64_t used = context_len[b] + num_rows;
        const int32_t* own = slots + b * max_len;
        if (!std::all_of(own, own + used, [&](int32_t slot) { return slot >= 0 && slot < num_slots; })) {
            throw std::invalid_argument("slots must be in [0, num_slots)");
        }
    }
}

void tree_attention_cpu(const TreeAttention& op) {
    require_row_start(op.row_start, op.num_sequences, op.num_rows);
    require_slots(op.slots, op.max_len, op.context_len, op.row_start, op.num_sequences, op.num_slots);
    const PanelKernels& kernels = panel_kernels();
    const AttentionShape& shape = op.shape;
    const int64_t dim = shape.head_dim, num_heads = shape.num_kv_heads * shape.group, padded = round_up(dim, PANEL);
    if (num_heads == 0) return;
    std::vector<SequenceView> sequences;
    for (int64_t b = 0; b < op.num_sequences; ++b) {
        const int64_t first = op.row_start[b];
        sequences.push_back({op.slots + b * op.max_len, op.context_len[b], op.row_start[b + 1] - first,
                             op.ancestors + first * op.num_words, op.num_words});
    }
    std::vector<int64_t> rows(op.num_rows);
    std::iota(rows.begin(), rows.end(), 0);
    const AttentionPlan plan(shape, sequences, op.row_start, rows, op.num_threads);
    std::vector<float> peaks(plan.num_partials), sums(plan.num_partials), outs(plan.num_partials * padded);
    const AttentionCall call = {kernels,         shape,     plan,
                                op.keys,         op.values, op.q,
                                num_heads * dim, op.window, {peaks.data(), sums.data(), outs.data()}};
    std::vector<AttentionScratch> scratch(std::max(1, op.num_threads));
    for (AttentionScratch& own : scratch) own.reserve(shape, plan.max_rows);
    run_team(op.num_threads, [&](int member, Team& team) {
        attend(call, member, team, scratch[member], [&](int64_t row, int64_t head, const float* values) {
            std::copy_n(values, dim, op.out + (row * num_heads + head) * dim);
        });
    });
}

}  // namespace viasd
