// Attention of tree rows to their sequence's context, ancestors and themselves: one pass over the keys serves all rows.
//
// A unit of work reads all heads of its keys, which lie together, so that memory is read in one stream.
//
// Keys come in tiles of KEY_TILE and splits of SPLIT_TILES tiles, counted from the sequence's first key. Tiles of a
// split are folded into a running softmax one after the other, and so are the splits: a row's bits depend neither on
// the rows beside it nor on the threads.
#pragma once

#include <cstdint>
#include <vector>

#include "layer_skip/matrix_unit.h"
#include "layer_skip/panel_kernels.h"
#include "threads.h"

namespace viasd {

constexpr int64_t SPLIT_TILES = 2;

struct AttentionShape {
    Element element;                        // of keys and values
    int64_t num_kv_heads, group, head_dim;  // group: query heads per key head
    float scale, soft_cap;                  // soft_cap 0: none
};

// Keys or values of one layer; strides in elements.
struct PoolView {
    char* data;
    int64_t slot_stride, head_stride;

    char* at(Element element, int64_t slot, int64_t head) const {
        return data + (slot * slot_stride + head * head_stride) * element_bytes(element);
    }
};

// What the rows of one sequence see. Key j lies in slots[j]: first the context, then the pass's rows.
struct SequenceView {
    const int32_t* slots;
    int64_t context;
    int64_t num_rows;
    const int64_t* ancestors;  // [num_rows, num_words] bit words; null: a chain
    int64_t num_words;

    int64_t num_keys() const { return context + num_rows; }
    int64_t depth(int64_t row) const;
    // Bit j: whether local row `row` sees key KEY_TILE * tile + j. window 0: none.
    uint64_t visible(int64_t row, int64_t tile, int64_t window) const;
};

// Which rows attend, cut into units that threads can take.
class AttentionPlan {
  public:
    // rows: global numbers, ascending; they attend. row_start: [B + 1].
    AttentionPlan(const AttentionShape& shape, const std::vector<SequenceView>& sequences, const int64_t* row_start,
                  const std::vector<int64_t>& rows, int num_threads);

    struct Unit {
        int64_t sequence;
        int64_t first;  // of the attending rows, counted over all sequences
        int64_t count;
        int64_t first_split, num_splits;
        int64_t partial;  // number of its first query's state; -1: the unit sees all keys and finishes itself
    };

    const std::vector<SequenceView>& sequences;
    std::vector<int64_t> local_rows;  // of every attending row
    std::vector<Unit> units;
    std::vector<Unit> merges;  // as units, over all splits; empty when the units finish themselves
    int64_t num_partials = 0;
    int64_t max_rows = 0;  // of a unit
};

// Running softmax of a unit's queries: for each key head the rows, for each row the query heads that read it.
struct SoftmaxState {
    float* peak;  // [queries]
    float* sum;   // [queries]
    float* out;   // [queries, padded head_dim], weighted sum of the values
};

// A thread's memory.
class AttentionScratch {
  public:
    void reserve(const AttentionShape& shape, int64_t max_rows);

    std::vector<float> queries, keys, values, clean_values, scores;
    std::vector<float> short_keys, short_values, short_weights, added;  // for the matrix unit
    std::vector<float> peaks, sums, outs, other_peaks, other_sums, other_outs;
};

struct AttentionCall {
    const PanelKernels& kernels;
    const AttentionShape& shape;
    const AttentionPlan& plan;
    PoolView keys, values;
    const float* q;  // attending row i, query head h: q + i * q_stride + h * head_dim
    int64_t q_stride;
    int64_t window;                    // 0: none
    SoftmaxState partials;             // plan.num_partials of them
    const MatrixUnit* unit = nullptr;  // not null: for units of many queries, keys and values in bfloat16
};

// Unit `unit`, into partials or, finished, into scratch.outs. The second: a merge of a plan's, into scratch.outs.
void attend_unit(const AttentionCall& call, const AttentionPlan::Unit& unit, AttentionScratch& scratch);
void merge_unit(const AttentionCall& call, const AttentionPlan::Unit& unit, AttentionScratch& scratch);

// All units, then all merges: emit(attending row, query head, values[head_dim]) for every finished query. Meets one
// barrier where there are merges.
template <class Emit>
void attend(const AttentionCall& call, int member, Team& team, AttentionScratch& scratch, const Emit& emit) {
    const AttentionShape& shape = call.shape;
    const int64_t padded = round_up(shape.head_dim, PANEL);
    auto finish = [&](const AttentionPlan::Unit& unit) {
        const float* out = scratch.outs.data();
        for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
            for (int64_t i = 0; i < unit.count * shape.group; ++i, out += padded) {
                emit(unit.first + i / shape.group, kv_head * shape.group + i % shape.group, out);
            }
        }
    };
    const AttentionPlan& plan = call.plan;
    for (size_t i = member; i < plan.units.size(); i += team.size) {
        attend_unit(call, plan.units[i], scratch);
        if (plan.units[i].partial < 0) finish(plan.units[i]);
    }
    if (plan.merges.empty()) return;
    team.barrier();
    for (size_t i = member; i < plan.merges.size(); i += team.size) {
        merge_unit(call, plan.merges[i], scratch);
        finish(plan.merges[i]);
    }
}

struct TreeAttention {
    AttentionShape shape;
    int64_t num_sequences, num_rows;
    const float* q;  // [R, H, Dh]
    PoolView keys, values;
    int64_t num_slots;
    const int32_t* slots;  // [B, max_len]
    int64_t max_len;
    const int64_t* context_len;  // [B]
    const int64_t* row_start;    // [B + 1]
    const int64_t* ancestors;    // [R, num_words]
    int64_t num_words;
    int64_t window;  // 0: none
    float* out;      // [R, H, Dh]
    int num_threads;
};

// The op tree_attention. Throws std::invalid_argument for what would lead outside the tensors.
void tree_attention_cpu(const TreeAttention& op);

// Raises std::invalid_argument unless every sequence's context and rows have slots in [0, num_slots).
void require_slots(const int32_t* slots, int64_t max_len, const int64_t* context_len, const int64_t* row_start,
                   int64_t num_sequences, int64_t num_slots);

}  // namespace viasd
