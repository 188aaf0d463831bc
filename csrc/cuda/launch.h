// What every launch shares: the device made current, the stream, and what an error is called.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda/launch_place.h"

namespace viasd {

inline cudaStream_t cuda_stream(const LaunchPlace& place) { return reinterpret_cast<cudaStream_t>(place.stream); }

inline void require_success(cudaError_t error) {
    if (error == cudaSuccess) return;
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
        throw std::runtime_error("no NVIDIA driver: this call needs an NVIDIA GPU and its driver");
    }
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Makes a device the thread's current one for as long as it lives.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        require_success(cudaGetDevice(&before_));
        require_success(cudaSetDevice(device));
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
};

}  // namespace viasd
