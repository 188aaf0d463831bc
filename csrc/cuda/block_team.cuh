// A block as the team of sampling/team.h.
#pragma once

#include "sampling/team.h"

namespace viasd {

class BlockTeam {
  public:
    static constexpr int MAX_WARPS = 32;

    struct Shared {
        double slots[MAX_WARPS];
    };

    __device__ explicit BlockTeam(Shared& shared) : slots_(shared.slots) {}

    __device__ int rank() const { return threadIdx.x; }
    __device__ int size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }

    template <class T, class Combine>
    __device__ T all_reduce(T value, const Combine& combine) {
        static_assert(sizeof(T) <= sizeof(double));
        for (int offset = 16; offset > 0; offset /= 2) {
            value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
        }
        const T* sums = share(value);
        value = sums[0];
        for (int warp = 1; warp < num_warps(); ++warp) value = combine(value, sums[warp]);
        return value;
    }

    __device__ TeamScan scan(double value) {
        double inclusive = value;
        for (int offset = 1; offset < 32; offset *= 2) {
            const double below = __shfl_up_sync(0xffffffffu, inclusive, offset);
            if (lane() >= offset) inclusive += below;
        }
        const double* sums = share(__shfl_sync(0xffffffffu, inclusive, 31));
        TeamScan scan = {0, 0};
        for (int warp = 0; warp < num_warps(); ++warp) {
            if (warp < threadIdx.x / 32) scan.before += sums[warp];
            scan.total += sums[warp];
        }
        scan.before += inclusive - value;
        return scan;
    }

  private:
    __device__ int lane() const { return threadIdx.x % 32; }
    __device__ int num_warps() const { return blockDim.x / 32; }

    // One value of each warp, where all can read them until the next call.
    template <class T>
    __device__ const T* share(T of_warp) {
        T* shared = reinterpret_cast<T*>(slots_);
        __syncthreads();
        if (lane() == 0) shared[threadIdx.x / 32] = of_warp;
        __syncthreads();
        return shared;
    }

    double* slots_;
};

}  // namespace viasd
