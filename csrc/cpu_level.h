// Which of a kernel's compiled variants run on this processor. A family with variants has one file for each, named
// *_portable.cpp, *_avx2.cpp, *_avx512.cpp or *_amx.cpp (setup.py gives them their flags), and asks here which to call.
#pragma once

namespace viasd {

enum class CpuLevel : int {
    PORTABLE = 0,
    AVX2 = 1,    // AVX2, FMA, F16C
    AVX512 = 2,  // AVX-512 F, BW, DQ and VL, and what AVX2 means
    AMX = 3,     // AMX tiles and bfloat16 products, AVX-512 BF16, and what AVX512 means
};

// The highest level that the processor and the operating system support, unless `set_cpu_level` chose a lower one.
CpuLevel cpu_level();

// For tests: every later call uses `level`. Throws std::invalid_argument where this machine does not support it.
void set_cpu_level(CpuLevel level);

CpuLevel highest_cpu_level();

}  // namespace viasd
