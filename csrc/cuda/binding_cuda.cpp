// viasd_kernels._cuda: the ops that have kernels in CUDA C++, by the names and arguments of viasd_kernels._native, with
// the place to launch at instead of a number of threads. Nothing waits for the device.
#include "acceptance/accept_chain_cuda.h"
#include "binding.h"
#include "tree_verify/tree_verify_cuda.h"

namespace py = pybind11;

namespace viasd {

namespace {

using Place = std::tuple<int, Address>;

LaunchPlace launch_place(const Place& place) { return {std::get<0>(place), std::get<1>(place)}; }

template <class T>
TeamMatrix<T> team_matrix(const Matrix& matrix) {
    const auto [address, row_stride, width, dtype] = matrix;
    return {at<const T>(address), row_stride, width};
}

// Calls launch(T()) with the type that both matrices hold.
template <class Launch>
void with_logits(const Matrix& target, const Matrix& draft, const Launch& launch) {
    const Dtype dtype = static_cast<Dtype>(std::get<3>(target));
    if (std::get<0>(draft) && static_cast<Dtype>(std::get<3>(draft)) != dtype) {
        throw std::invalid_argument("target and draft logits must have one dtype");
    }
    switch (dtype) {
        case Dtype::FLOAT32: return launch(float());
        case Dtype::FLOAT16: return launch(Half());
        case Dtype::BFLOAT16: return launch(BFloat16());
        case Dtype::FLOAT64: break;
    }
    throw std::invalid_argument("logits must be float32, float16 or bfloat16");
}

void accept_chain(Address row_tokens, Address uniforms, Address row_start, Address temperature, int64_t num_sequences,
                  const Matrix& target_logits, const Matrix& draft_logits, Address weights, Address num_accepted,
                  Address next_token, Address status, const Place& place) {
    with_logits(target_logits, draft_logits, [&](auto logit) {
        using T = decltype(logit);
        const AcceptChainTask<T> task = {at<const int64_t>(row_tokens),
                                         at<const double>(uniforms),
                                         at<const int64_t>(row_start),
                                         at<const double>(temperature),
                                         team_matrix<T>(target_logits),
                                         team_matrix<T>(draft_logits),
                                         at<float>(weights),
                                         at<int32_t>(num_accepted),
                                         at<int32_t>(next_token),
                                         at<int32_t>(status)};
        accept_chain_cuda(task, num_sequences, launch_place(place));
    });
}

void build_tree(Address parents, Address row_start, int64_t num_sequences, int64_t max_rows, Address ancestors,
                Address depth, Address first_child, Address next_sibling, const Place& place) {
    const TreeLinks tree = {at<int64_t>(ancestors), at<int32_t>(depth), at<int32_t>(first_child),
                            at<int32_t>(next_sibling)};
    build_tree_cuda(at<const int64_t>(parents), at<const int64_t>(row_start), num_sequences, max_rows, tree,
                    launch_place(place));
}

void verify_tree(Address depth, Address first_child, Address next_sibling, Address row_tokens, Address full_argmax,
                 Address uniforms, Address row_start, Address temperature, int64_t num_sequences,
                 const Matrix& full_logits, const Matrix& draft_logits, int32_t proposal, Address weights, Address path,
                 Address num_accepted, Address next_token, Address status, const Place& place) {
    with_logits(full_logits, draft_logits, [&](auto logit) {
        using T = decltype(logit);
        const VerifyTreeTask<T> task = {at<const int32_t>(depth),
                                        at<const int32_t>(first_child),
                                        at<const int32_t>(next_sibling),
                                        at<const int64_t>(row_tokens),
                                        at<const int64_t>(full_argmax),
                                        at<const double>(uniforms),
                                        at<int32_t>(path),
                                        at<const int64_t>(row_start),
                                        at<const double>(temperature),
                                        team_matrix<T>(full_logits),
                                        team_matrix<T>(draft_logits),
                                        static_cast<Proposal>(proposal),
                                        at<float>(weights),
                                        at<int32_t>(num_accepted),
                                        at<int32_t>(next_token),
                                        at<int32_t>(status)};
        verify_tree_cuda(task, num_sequences, launch_place(place));
    });
}

// A cache as Python passes it: (address, bytes from sequence to sequence, position to position, head to head).
using Cache = std::tuple<Address, int64_t, int64_t, int64_t>;

template <class Piece>
TeamCache<Piece> team_cache(const Cache& cache) {
    const auto [address, sequence, position, head] = cache;
    constexpr int64_t BYTES = sizeof(Piece);
    return {at<Piece>(address), sequence / BYTES, position / BYTES, head / BYTES};
}

void compact_kv(const Cache& k, const Cache& v, Address path, Address num_accepted, Address row_start, Address start,
                int64_t num_sequences, int64_t cache_len, int64_t num_heads, int64_t head_bytes, Address staging,
                const Place& place) {
    const auto launch = [&](auto piece) {
        using Piece = decltype(piece);
        const CompactKVTask<Piece> task = {at<const int64_t>(path),
                                           at<const int64_t>(num_accepted),
                                           at<const int64_t>(row_start),
                                           at<const int64_t>(start),
                                           cache_len,
                                           num_heads,
                                           head_bytes / static_cast<int64_t>(sizeof(Piece)),
                                           at<Piece>(staging)};
        compact_kv_cuda(task, team_cache<Piece>(k), team_cache<Piece>(v), num_sequences, launch_place(place));
    };
    const auto misaligned = [](const Cache& cache) {
        const auto [address, sequence, position, head] = cache;
        return (static_cast<int64_t>(address) | sequence | position | head) % sizeof(WidePiece) != 0;
    };
    if (misaligned(k) || misaligned(v) || head_bytes % sizeof(WidePiece) != 0) return launch(NarrowPiece());
    launch(WidePiece());
}

}  // namespace

}  // namespace viasd

PYBIND11_MODULE(_cuda, m) {
    using namespace viasd;
    m.doc() = "CUDA C++ implementations of viasd_kernels ops; call them through the package's public functions.";
    m.def("accept_chain", &accept_chain, NoGil(), py::kw_only(), py::arg("row_tokens"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("target_logits"),
          py::arg("draft_logits"), py::arg("weights"), py::arg("num_accepted"), py::arg("next_token"),
          py::arg("status"), py::arg("place"));
    m.def("build_tree", &build_tree, NoGil(), py::kw_only(), py::arg("parents"), py::arg("row_start"),
          py::arg("num_sequences"), py::arg("max_rows"), py::arg("ancestors"), py::arg("depth"), py::arg("first_child"),
          py::arg("next_sibling"), py::arg("place"));
    m.def("verify_tree", &verify_tree, NoGil(), py::kw_only(), py::arg("depth"), py::arg("first_child"),
          py::arg("next_sibling"), py::arg("row_tokens"), py::arg("full_argmax"), py::arg("uniforms"),
          py::arg("row_start"), py::arg("temperature"), py::arg("num_sequences"), py::arg("full_logits"),
          py::arg("draft_logits"), py::arg("proposal"), py::arg("weights"), py::arg("path"), py::arg("num_accepted"),
          py::arg("next_token"), py::arg("status"), py::arg("place"));
    m.def("compact_kv", &compact_kv, NoGil(), py::kw_only(), py::arg("k"), py::arg("v"), py::arg("path"),
          py::arg("num_accepted"), py::arg("row_start"), py::arg("start"), py::arg("num_sequences"),
          py::arg("cache_len"), py::arg("num_heads"), py::arg("head_bytes"), py::arg("staging"), py::arg("place"));
}
