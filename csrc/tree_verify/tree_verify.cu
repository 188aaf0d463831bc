#include "cuda/block_team.cuh"
#include "cuda/launch.h"
#include "tree_verify/tree_verify_cuda.h"

namespace viasd {

namespace {

constexpr int ROW_THREADS = 512;  // where rows of logits are read
constexpr int WALK_THREADS = 64;  // where only links are
constexpr int MOVE_THREADS = 128;

// A usual tree is built in shared memory, where a step takes a tenth of the time that it takes in the cache.
constexpr int SMALL_ROWS = 128, SMALL_WORDS = 2;

struct SmallTree {
    int64_t parents[SMALL_ROWS];
    int64_t ancestors[SMALL_ROWS * SMALL_WORDS];
    int32_t depth[SMALL_ROWS], first_child[SMALL_ROWS], next_sibling[SMALL_ROWS];
};

__global__ void build_tree_kernel(const int64_t* parents, const int64_t* row_start, int64_t max_rows, int64_t num_words,
                                  TreeLinks tree) {
    __shared__ SmallTree small;
    const int64_t first = row_start[blockIdx.x], num_rows = row_start[blockIdx.x + 1] - first;
    parents += first;
    tree = {tree.ancestors + first * num_words, tree.depth + first, tree.first_child + first,
            tree.next_sibling + first};
    if (num_rows > SMALL_ROWS || num_words > SMALL_WORDS) {
        if (threadIdx.x == 0) build_tree_sequence(parents, num_rows, max_rows, num_words, tree);
        return;
    }
    for (int64_t row = threadIdx.x; row < num_rows; row += blockDim.x) small.parents[row] = parents[row];
    __syncthreads();
    if (threadIdx.x == 0) {
        const TreeLinks links = {small.ancestors, small.depth, small.first_child, small.next_sibling};
        build_tree_sequence(small.parents, num_rows, max_rows, num_words, links);
    }
    __syncthreads();
    for (int64_t row = threadIdx.x; row < num_rows; row += blockDim.x) {
        tree.depth[row] = small.depth[row];
        tree.first_child[row] = small.first_child[row];
        tree.next_sibling[row] = small.next_sibling[row];
        for (int64_t word = row * num_words; word < (row + 1) * num_words; ++word) {
            tree.ancestors[word] = small.ancestors[word];
        }
    }
}

template <class T>
__global__ void __launch_bounds__(ROW_THREADS) verify_tree_kernel(const __grid_constant__ VerifyTreeTask<T> task) {
    __shared__ BlockTeam::Shared shared;
    BlockTeam team(shared);
    verify_tree_sequence(team, task, blockIdx.x);
}

template <class Piece>
__global__ void compact_kv_kernel(CompactKVTask<Piece> task, TeamCache<Piece> cache) {
    __shared__ BlockTeam::Shared shared;
    const BlockTeam team(shared);
    compact_kv_sequence(team, task, cache, blockIdx.x);
}

}  // namespace

void build_tree_cuda(const int64_t* parents, const int64_t* row_start, int64_t num_sequences, int64_t max_rows,
                     const TreeLinks& tree, const LaunchPlace& place) {
    const DeviceGuard guard(place.device);
    if (num_sequences == 0) return;
    build_tree_kernel<<<num_sequences, WALK_THREADS, 0, cuda_stream(place)>>>(parents, row_start, max_rows,
                                                                              (max_rows + 63) / 64, tree);
    require_success(cudaGetLastError());
}

template <class T>
void verify_tree_cuda(const VerifyTreeTask<T>& task, int64_t num_sequences, const LaunchPlace& place) {
    const DeviceGuard guard(place.device);
    if (num_sequences == 0) return;
    const int threads = task.full_logits.data ? ROW_THREADS : WALK_THREADS;
    verify_tree_kernel<T><<<num_sequences, threads, 0, cuda_stream(place)>>>(task);
    require_success(cudaGetLastError());
}

template <class Piece>
void compact_kv_cuda(const CompactKVTask<Piece>& task, const TeamCache<Piece>& k, const TeamCache<Piece>& v,
                     int64_t num_sequences, const LaunchPlace& place) {
    const DeviceGuard guard(place.device);
    if (num_sequences == 0) return;
    for (const TeamCache<Piece>& cache : {k, v}) {  // one after the other, as they share the staging memory
        compact_kv_kernel<Piece><<<num_sequences, MOVE_THREADS, 0, cuda_stream(place)>>>(task, cache);
    }
    require_success(cudaGetLastError());
}

template void verify_tree_cuda(const VerifyTreeTask<float>&, int64_t, const LaunchPlace&);
template void verify_tree_cuda(const VerifyTreeTask<Half>&, int64_t, const LaunchPlace&);
template void verify_tree_cuda(const VerifyTreeTask<BFloat16>&, int64_t, const LaunchPlace&);
template void compact_kv_cuda(const CompactKVTask<WidePiece>&, const TeamCache<WidePiece>&, const TeamCache<WidePiece>&,
                              int64_t, const LaunchPlace&);
template void compact_kv_cuda(const CompactKVTask<NarrowPiece>&, const TeamCache<NarrowPiece>&,
                              const TeamCache<NarrowPiece>&, int64_t, const LaunchPlace&);

}  // namespace viasd
