#include "binding.h"

#include <pybind11/stl.h>

#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "layer_skip/bypass_cpu.h"
#include "layer_skip/decoder_cpu.h"
#include "layer_skip/pack_weights.h"

namespace py = pybind11;

namespace viasd {

namespace {

// (address, row stride); address 0 is none.
using Rows = std::tuple<Address, int64_t>;

RowMatrix row_matrix(const Rows& rows) { return {at<char>(std::get<0>(rows)), std::get<1>(rows)}; }

void bypass_norm(int32_t element, int64_t num_rows, int64_t width, const Rows& hidden, const Rows& delta, Address keep,
                 Address weight, Address delta_weight, float eps, const Rows& hidden_out, const Rows& normed,
                 int num_threads) {
    bypass_norm_cpu({static_cast<Element>(element), num_rows, width, row_matrix(hidden), row_matrix(delta),
                     at<const bool>(keep), at<const float>(weight), at<const float>(delta_weight), eps,
                     row_matrix(hidden_out), row_matrix(normed), num_threads});
}

void bypass_linear(int32_t element, int64_t num_rows, int64_t depth, int64_t num_outputs, const Rows& x,
                   const Rows& weight, Address keep, Address bias, const Rows& residual, int32_t epilogue,
                   const Rows& out, int num_threads) {
    bypass_linear_cpu({static_cast<Element>(element), num_rows, depth, num_outputs, row_matrix(x), row_matrix(weight),
                       at<const bool>(keep), at<const float>(bias), row_matrix(residual),
                       static_cast<Epilogue>(epilogue), row_matrix(out), num_threads});
}

// (element, address, row stride, outputs, depth, whether halves lie in turn)
using Weights = std::tuple<int32_t, Address, int64_t, int64_t, int64_t, bool>;

WeightMatrix weight_matrix(const Weights& weights) {
    const auto [element, data, row_stride, num_outputs, depth, halves] = weights;
    return {static_cast<Element>(element), at<const void>(data), row_stride, num_outputs, depth, halves};
}

int32_t choose_coding(const Weights& weights, int num_threads) {
    return static_cast<int32_t>(smallest_coding(weight_matrix(weights), num_threads));
}

int64_t packed_bytes(const Weights& weights, int32_t coding) {
    const WeightMatrix matrix = weight_matrix(weights);
    return matrix.num_panels() * panel_bytes(static_cast<Coding>(coding), matrix.depth);
}

void pack(const Weights& weights, int32_t coding, Address panels, int num_threads) {
    pack_weights(weight_matrix(weights), static_cast<Coding>(coding), at<void>(panels), num_threads);
}

// Weights are read from end to end in every step: with large pages that costs far fewer address translations.
void advise_huge_pages(Address begin, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr Address HUGE_PAGE = Address{1} << 21;
    const Address first = (begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const Address end = (begin + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (end > first) madvise(at<void>(first), end - first, MADV_HUGEPAGE);
#else
    (void)begin, (void)bytes;
#endif
}

// Fields of the dicts that viasd_kernels/layer_skip/native.py builds.
template <class T>
T field(const py::dict& from, const char* name) {
    return from[name].cast<T>();
}

template <class T>
const T* address(const py::dict& from, const char* name) {
    return at<const T>(field<Address>(from, name));
}

Linear linear(const py::dict& from, const char* name) {
    const py::dict own = from[name];
    return {static_cast<Coding>(field<int32_t>(own, "coding")), address<void>(own, "panels"),
            address<float>(own, "bias"), field<int64_t>(own, "outputs"), field<int64_t>(own, "depth")};
}

std::unique_ptr<Decoder> make_decoder(const py::dict& model, const py::list& layers, const py::list& ropes) {
    DecoderModel out = {};
    out.element = static_cast<Element>(field<int32_t>(model, "element"));
    out.sizes = {field<int64_t>(model, "vocab_size"),        field<int64_t>(model, "hidden_size"),
                 field<int64_t>(model, "intermediate_size"), field<int64_t>(model, "num_heads"),
                 field<int64_t>(model, "num_kv_heads"),      field<int64_t>(model, "head_dim")};
    out.activation = static_cast<Activation>(field<int32_t>(model, "activation"));
    out.eps = field<float>(model, "eps");
    out.score_scale = field<float>(model, "score_scale");
    out.attention_soft_cap = field<float>(model, "attention_soft_cap");
    out.logit_soft_cap = field<float>(model, "logit_soft_cap");
    out.embedding_scale = field<float>(model, "embedding_scale");
    out.embedding = address<void>(model, "embedding");
    out.final_norm = address<float>(model, "final_norm");
    out.head = linear(model, "head");
    for (const py::handle& item : layers) {
        const py::dict layer = py::reinterpret_borrow<py::dict>(item);
        out.layers.push_back({address<float>(layer, "attention_norm"), address<float>(layer, "mlp_norm"),
                              address<float>(layer, "q_norm"), address<float>(layer, "k_norm"),
                              address<float>(layer, "attention_post_norm"), address<float>(layer, "mlp_post_norm"),
                              linear(layer, "qkv"), linear(layer, "attention_out"), linear(layer, "gate_up"),
                              linear(layer, "mlp_out"), field<int64_t>(layer, "window"),
                              field<int32_t>(layer, "rope")});
    }
    for (const py::handle& item : ropes) {
        const py::dict rope = py::reinterpret_borrow<py::dict>(item);
        out.ropes.push_back({address<float>(rope, "frequencies"), field<int64_t>(rope, "num_pairs")});
    }
    return std::make_unique<Decoder>(std::move(out));
}

void step(Decoder& decoder, int64_t num_rows, int64_t num_sequences, Address tokens, Address positions,
          Address row_start, Address parents, Address slots, int64_t max_len, Address context_len, Address keys,
          Address values, int64_t num_slots, Address route, Address row_route, Address logits_rows, int64_t num_logits,
          const std::vector<std::pair<int64_t, Address>>& captures, Address hidden, Address logits, int num_threads) {
    DecoderStep step = {num_rows,
                        num_sequences,
                        at<const int64_t>(tokens),
                        at<const int64_t>(positions),
                        at<const int64_t>(row_start),
                        at<const int64_t>(parents),
                        at<const int32_t>(slots),
                        max_len,
                        at<const int64_t>(context_len),
                        at<void>(keys),
                        at<void>(values),
                        num_slots,
                        at<const bool>(route),
                        at<const bool>(row_route),
                        at<const int64_t>(logits_rows),
                        num_logits,
                        {},
                        at<void>(hidden),
                        at<void>(logits),
                        num_threads};
    for (const auto& [layer, out] : captures) step.captures.push_back({layer, at<void>(out)});
    decoder.step(step);
}

}  // namespace

void bind_layer_skip(py::module_& m) {
    m.def("bypass_norm", &bypass_norm, NoGil(), py::kw_only(), py::arg("element"), py::arg("num_rows"),
          py::arg("width"), py::arg("hidden"), py::arg("delta"), py::arg("keep"), py::arg("weight"),
          py::arg("delta_weight"), py::arg("eps"), py::arg("hidden_out"), py::arg("normed"), py::arg("num_threads"));
    m.def("bypass_linear", &bypass_linear, NoGil(), py::kw_only(), py::arg("element"), py::arg("num_rows"),
          py::arg("depth"), py::arg("num_outputs"), py::arg("x"), py::arg("weight"), py::arg("keep"), py::arg("bias"),
          py::arg("residual"), py::arg("epilogue"), py::arg("out"), py::arg("num_threads"));
    m.def("smallest_coding", &choose_coding, NoGil(), py::arg("weights"), py::arg("num_threads"));
    m.def("packed_bytes", &packed_bytes, py::arg("weights"), py::arg("coding"));
    m.def("pack_weights", &pack, NoGil(), py::arg("weights"), py::arg("coding"), py::arg("panels"),
          py::arg("num_threads"));
    m.def("advise_huge_pages", &advise_huge_pages, py::arg("begin"), py::arg("bytes"));
    // Local to this module: a copy of the package under another name has a Decoder of its own in the same process.
    py::class_<Decoder>(m, "Decoder", py::module_local())
        .def(py::init(&make_decoder), py::arg("model"), py::arg("layers"), py::arg("ropes"))
        .def("step", &step, NoGil(), py::kw_only(), py::arg("num_rows"), py::arg("num_sequences"), py::arg("tokens"),
             py::arg("positions"), py::arg("row_start"), py::arg("parents"), py::arg("slots"), py::arg("max_len"),
             py::arg("context_len"), py::arg("keys"), py::arg("values"), py::arg("num_slots"), py::arg("route"),
             py::arg("row_route"), py::arg("logits_rows"), py::arg("num_logits"), py::arg("captures"),
             py::arg("hidden"), py::arg("logits"), py::arg("num_threads"));
}

}  // namespace viasd
