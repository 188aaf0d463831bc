// SkipDecoder on the CPU: a whole pass in one call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "layer_skip/packed_rows.h"
#include "layer_skip/panel_kernels.h"
#include "tree_verify/tree_attention_cpu.h"

namespace viasd {

enum class Activation : int32_t { SILU_MUL = 0, GELU_TANH_MUL = 1 };

// Norms come as float32 with the configuration's offset added; null: the model has no such norm.
struct DecoderLayer {
    const float* attention_norm;
    const float* mlp_norm;
    const float* q_norm;
    const float* k_norm;
    const float* attention_post_norm;
    const float* mlp_post_norm;
    Linear qkv;
    Linear attention_out;
    Linear gate_up;  // panels of gate and of up in turn
    Linear mlp_out;
    int64_t window;  // 0: none
    int32_t rope;    // which of Decoder::ropes
};

// Turns per position of each pair of dimensions.
struct Rope {
    const float* frequencies;
    int64_t num_pairs;
};

struct DecoderSizes {
    int64_t vocab, hidden, intermediate, num_heads, num_kv_heads, head_dim;
};

struct DecoderModel {
    Element element;  // of weights, of keys and values, and of what a pass returns
    DecoderSizes sizes;
    Activation activation;
    float eps, score_scale, attention_soft_cap, logit_soft_cap, embedding_scale;  // soft caps: 0 for none
    const void* embedding;  // [V, D]; null: the rows are taken from the head's panels
    const float* final_norm;
    Linear head;
    std::vector<DecoderLayer> layers;
    std::vector<Rope> ropes;
};

struct Capture {
    int64_t layer;  // L: what leaves the last one
    void* out;      // [R, D]
};

struct DecoderStep {
    int64_t num_rows, num_sequences;
    const int64_t* tokens;     // [R]; ids outside [0, V) enter as zeros
    const int64_t* positions;  // [R]
    const int64_t* row_start;  // [B + 1]
    const int64_t* parents;    // [R]; null: chains
    const int32_t* slots;      // [B, max_len]
    int64_t max_len;
    const int64_t* context_len;  // [B]
    void* keys;                  // [L, num_slots, H_kv, Dh]
    void* values;
    int64_t num_slots;
    const bool* route;      // [L, 2]
    const bool* row_route;  // [R, L, 2]; null: `route` for all rows
    const int64_t* logits_rows;
    int64_t num_logits;
    std::vector<Capture> captures;
    void* hidden;  // [R, D]
    void* logits;  // [num_logits, V]
    int num_threads;
};

class Decoder {
  public:
    explicit Decoder(DecoderModel model);
    ~Decoder();

    // May be called from several threads at once. Throws std::invalid_argument for row_start, context_len, slots or
    // logits_rows that would lead outside the tensors.
    void step(const DecoderStep& step);

  private:
    struct Workspace;
    struct Pass;

    const DecoderModel model_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Workspace>> idle_;  // memory of earlier steps
};

}  // namespace viasd
