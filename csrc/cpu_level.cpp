#include "cpu_level.h"

#include <atomic>
#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace viasd {

namespace {

#ifdef __x86_64__
// Not every compiler knows F16C by name in __builtin_cpu_supports. It is usable wherever AVX is.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// A process must ask for the tiles' registers before it uses them.
bool has_amx() {
#ifdef __linux__
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AVX512_BF16 = 1u << 5;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & AMX_BF16) || !(edx & AMX_TILE)) return false;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & AVX512_BF16)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

CpuLevel detect() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return CpuLevel::PORTABLE;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return CpuLevel::AVX2;
    return has_amx() ? CpuLevel::AMX : CpuLevel::AVX512;
}
#else
CpuLevel detect() { return CpuLevel::PORTABLE; }
#endif

std::atomic<CpuLevel>& chosen() {
    static std::atomic<CpuLevel> level{highest_cpu_level()};
    return level;
}

}  // namespace

CpuLevel highest_cpu_level() {
    static const CpuLevel level = detect();
    return level;
}

CpuLevel cpu_level() { return chosen().load(std::memory_order_relaxed); }

void set_cpu_level(CpuLevel level) {
    if (level > highest_cpu_level()) throw std::invalid_argument("this processor does not support that level");
    chosen().store(level, std::memory_order_relaxed);
}

}  // namespace viasd
