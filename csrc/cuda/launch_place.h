// Where kernels are launched. Knows nothing of CUDA, so that what is written with it compiles without.
#pragma once

#include <cstdint>

namespace viasd {

// The stream is torch's current one of the device, as an address.
struct LaunchPlace {
    int device;
    std::uintptr_t stream;
};

}  // namespace viasd
