#include "sampling/logit_rows.h"

#include "cpu_level.h"

namespace viasd {

const RowKernelTable& row_kernel_table() {
#ifdef __x86_64__
    if (cpu_level() >= CpuLevel::AVX512) return row_kernels_avx512;
    if (cpu_level() == CpuLevel::AVX2) return row_kernels_avx2;
#endif
    return row_kernels_portable;
}

}  // namespace viasd
