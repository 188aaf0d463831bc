#include "acceptance/accept_chain_cuda.h"
#include "cuda/block_team.cuh"
#include "cuda/launch.h"

namespace viasd {

namespace {

constexpr int BLOCK_THREADS = 512;

template <class T>
__global__ void __launch_bounds__(BLOCK_THREADS) accept_chain_kernel(const __grid_constant__ AcceptChainTask<T> task) {
    __shared__ BlockTeam::Shared shared;
    BlockTeam team(shared);
    accept_chain_sequence(team, task, blockIdx.x);
}

}  // namespace

template <class T>
void accept_chain_cuda(const AcceptChainTask<T>& task, int64_t num_sequences, const LaunchPlace& place) {
    const DeviceGuard guard(place.device);
    if (num_sequences == 0) return;
    accept_chain_kernel<T><<<num_sequences, BLOCK_THREADS, 0, cuda_stream(place)>>>(task);
    require_success(cudaGetLastError());
}

template void accept_chain_cuda(const AcceptChainTask<float>&, int64_t, const LaunchPlace&);
template void accept_chain_cuda(const AcceptChainTask<Half>&, int64_t, const LaunchPlace&);
template void accept_chain_cuda(const AcceptChainTask<BFloat16>&, int64_t, const LaunchPlace&);

}  // namespace viasd
