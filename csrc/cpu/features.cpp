#include "cpu/features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "util/status.h"

#if ZO_ARM_CRC
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace zo {
namespace {

constexpr const char *kIsaNames[] = {"scalar", "avx2", "avx512", "neon"};
constexpr int kNumIsas = 4;

bool is_supported(int isa) { return isa >= 0 && isa < kNumIsas && (supported_isa_mask() >> isa & 1); }

int widest_isa() {
    int isa = kNumIsas - 1;
    while (!is_supported(isa)) --isa;
    return isa;
}

// The kind that `name` spells, or -1.
int isa_by_name(const char *name) {
    for (int isa = 0; isa < kNumIsas; ++isa) {
        if (std::strcmp(name, kIsaNames[isa]) == 0) return isa;
    }
    return -1;
}

int initial_isa() {
    const char *name = std::getenv("ZERO_OFFLOAD_ISA");
    const int wanted = name == nullptr ? -1 : isa_by_name(name);
    return is_supported(wanted) ? wanted : widest_isa();
}

std::atomic<int> &chosen_isa() {
    static std::atomic<int> chosen{initial_isa()};
    return chosen;
}

}  // namespace

uint32_t supported_isa_mask() {
    uint32_t mask = 1u << ZO_ISA_SCALAR;
#if ZO_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        mask |= 1u << ZO_ISA_AVX2;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        mask |= 1u << ZO_ISA_AVX512;
    }
#elif ZO_ARM64
    mask |= 1u << ZO_ISA_NEON;
#endif
    return mask;
}

int current_isa() { return chosen_isa().load(std::memory_order_relaxed); }

int set_isa(int isa) {
    if (!is_supported(isa)) {
        return fail(ZO_UNSUPPORTED, "instruction set %d cannot run here; the widest that can is %d (%s)", isa,
                    widest_isa(), kIsaNames[widest_isa()]);
    }
    chosen_isa().store(isa, std::memory_order_relaxed);
    return ZO_OK;
}

int check_isa_environment() {
    const char *name = std::getenv("ZERO_OFFLOAD_ISA");
    if (name == nullptr || is_supported(isa_by_name(name))) return ZO_OK;
    return fail(ZO_UNSUPPORTED, "ZERO_OFFLOAD_ISA=%.32s cannot run here; unset it, or use scalar up to %s",
                name, kIsaNames[widest_isa()]);
}

bool has_crc32c_instruction() {
#if ZO_X86
    static const bool supported = __builtin_cpu_supports("sse4.2");
    return supported;
#elif ZO_ARM_CRC
    static const bool supported = getauxval(AT_HWCAP) & HWCAP_CRC32;
    return supported;
#else
    return false;
#endif
}

}  // namespace zo
