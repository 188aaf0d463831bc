#include "layer_skip/panel_kernels.h"

#include "cpu_level.h"

namespace viasd {

const PanelKernels& panel_kernels() {
#if defined(__x86_64__)
    if (cpu_level() >= CpuLevel::AVX512) return panel_kernels_avx512();
    if (cpu_level() == CpuLevel::AVX2) return panel_kernels_avx2();
#endif
    return panel_kernels_portable();
}

}  // namespace viasd
