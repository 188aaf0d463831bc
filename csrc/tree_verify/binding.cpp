#include "binding.h"
#include "tree_verify/compact_kv_cpu.h"
#include "tree_verify/tree_attention_cpu.h"
#include "tree_verify/tree_verify_cpu.h"

namespace py = pybind11;

namespace viasd {

namespace {

void build_tree(Address parents, Address row_start, int64_t num_sequences, int64_t num_rows, int64_t max_rows,
                Address ancestors, Address depth, Address first_child, Address next_sibling) {
    build_tree_cpu(at<const int64_t>(parents), at<const int64_t>(row_start), num_sequences, num_rows, max_rows,
                   {at<int64_t>(ancestors), at<int32_t>(depth), at<int32_t>(first_child), at<int32_t>(next_sibling)});
}

void verify_tree(Address depth, Address first_child, Address next_sibling, Address row_tokens, Address full_argmax,
                 Address uniforms, Address row_start, Address temperature, int64_t num_sequences, int64_t num_rows,
                 const Matrix& full_logits, const Matrix& draft_logits, int32_t proposal, Address path,
                 Address num_accepted, Address next_token, Address status, int num_threads) {
    verify_tree_cpu({at<const int32_t>(depth), at<const int32_t>(first_child), at<const int32_t>(next_sibling),
                     at<const int64_t>(row_tokens), at<const int64_t>(full_argmax), at<const double>(uniforms),
                     at<const int64_t>(row_start), at<const double>(temperature), num_sequences, num_rows,
                     logit_matrix(full_logits), logit_matrix(draft_logits), static_cast<Proposal>(proposal)},
                    {at<int32_t>(path), at<int32_t>(num_accepted), at<int32_t>(next_token), at<int32_t>(status)},
                    num_threads);
}

// A cache as Python passes it: (address, bytes from sequence to sequence, position to position, head to head).
using Cache = std::tuple<Address, int64_t, int64_t, int64_t>;

KVCache kv_cache(const Cache& cache) {
    const auto [address, sequence_stride, position_stride, head_stride] = cache;
    return {at<char>(address), sequence_stride, position_stride, head_stride};
}

void compact_kv(const Cache& k, const Cache& v, Address path, Address num_accepted, Address row_start, Address start,
                int64_t num_sequences, int64_t num_rows, int64_t cache_len, int64_t num_heads, int64_t head_bytes,
                int num_threads) {
    compact_kv_cpu({at<const int64_t>(path), at<const int64_t>(num_accepted), at<const int64_t>(row_start),
                    at<const int64_t>(start), num_sequences, num_rows, cache_len, num_heads, head_bytes},
                   kv_cache(k), kv_cache(v), num_threads);
}

// (address, slot stride, head stride)
using Pool = std::tuple<Address, int64_t, int64_t>;

void tree_attention(int32_t element, int64_t num_kv_heads, int64_t group, int64_t head_dim, float scale, float soft_cap,
                    int64_t num_sequences, int64_t num_rows, Address q, const Pool& keys, const Pool& values,
                    int64_t num_slots, Address slots, int64_t max_len, Address context_len, Address row_start,
                    Address ancestors, int64_t num_words, int64_t window, Address out, int num_threads) {
    const auto [key_data, key_slot, key_head] = keys;
    const auto [value_data, value_slot, value_head] = values;
    tree_attention_cpu({{static_cast<Element>(element), num_kv_heads, group, head_dim, scale, soft_cap},
                        num_sequences,
                        num_rows,
                        at<const float>(q),
                        {at<char>(key_data), key_slot, key_head},
                        {at<char>(value_data), value_slot, value_head},
                        num_slots,
                        at<const int32_t>(slots),
                        max_len,
                        at<const int64_t>(context_len),
                        at<const int64_t>(row_start),
                        at<const int64_t>(ancestors),
                        num_words,
                        window,
                        at<float>(out),
                        num_threads});
}

}  // namespace

void bind_tree_verify(py::module_& m) {
    m.def("build_tree", &build_tree, NoGil(), py::kw_only(), py::arg("parents"), py::arg("row_start"),
          py::arg("num_sequences"), py::arg("num_rows"), py::arg("max_rows"), py::arg("ancestors"), py::arg("depth"),
          py::arg("first_child"), py::arg("next_sibling"));
    m.def("verify_tree", &verify_tree, NoGil(), py::kw_only(), py::arg("depth"), py::arg("first_child"),
          py::arg("next_sibling"), py::arg("row_tokens"), py::arg("full_argmax"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("num_rows"),
          py::arg("full_logits"), py::arg("draft_logits"), py::arg("proposal"), py::arg("path"),
          py::arg("num_accepted"), py::arg("next_token"), py::arg("status"), py::arg("num_threads"));
    m.def("compact_kv", &compact_kv, NoGil(), py::kw_only(), py::arg("k"), py::arg("v"), py::arg("path"),
          py::arg("num_accepted"), py::arg("row_start"), py::arg("start"), py::arg("num_sequences"),
          py::arg("num_rows"), py::arg("cache_len"), py::arg("num_heads"), py::arg("head_bytes"),
          py::arg("num_threads"));
    m.def("tree_attention", &tree_attention, NoGil(), py::kw_only(), py::arg("element"), py::arg("num_kv_heads"),
          py::arg("group"), py::arg("head_dim"), py::arg("scale"), py::arg("soft_cap"), py::arg("num_sequences"),
          py::arg("num_rows"), py::arg("q"), py::arg("keys"), py::arg("values"), py::arg("num_slots"), py::arg("slots"),
          py::arg("max_len"), py::arg("context_len"), py::arg("row_start"), py::arg("ancestors"), py::arg("num_words"),
          py::arg("window"), py::arg("out"), py::arg("num_threads"));
}

}  // namespace viasd
