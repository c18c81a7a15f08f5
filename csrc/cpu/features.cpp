#include "cpu/features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "util/status.h"

#if ZO_X86
#include <cpuid.h>
#endif
#if ZO_ARM_CRC
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace zo {
namespace {

#if ZO_X86
struct X86 {
    bool is_intel = false, has_crc32c = false, has_avx2 = false, has_avx512 = false;
};

// Asked of the processor, not by __builtin_cpu_supports: zig's runtime says no to every name, without an
// error.
X86 ask_processor() {
    X86 found;
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return found;
    found.is_intel = ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx && edx == signature_INTEL_edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return found;
    found.has_crc32c = (ecx & bit_SSE4_2) != 0;
    constexpr uint32_t kWithAvx2 = bit_OSXSAVE | bit_FMA | bit_F16C;
    if ((ecx & kWithAvx2) != kWithAvx2) return found;
    uint32_t saved = 0;  // by the operating system on a switch: bits 1 and 2 for AVX, 5 to 7 more for AVX-512
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
    constexpr uint32_t kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    found.has_avx2 = (saved & 0x06) == 0x06 && (ebx & bit_AVX2) != 0;
    found.has_avx512 = (saved & 0xE6) == 0xE6 && (ebx & kAvx512) == kAvx512;
    return found;
}

const X86 &x86() {
    static const X86 found = ask_processor();
    return found;
}
#endif

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
    mask |= uint32_t(x86().has_avx2) << ZO_ISA_AVX2;
    mask |= uint32_t(x86().has_avx512) << ZO_ISA_AVX512;
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
    return x86().has_crc32c;
#elif ZO_ARM_CRC
    static const bool supported = getauxval(AT_HWCAP) & HWCAP_CRC32;
    return supported;
#else
    return false;
#endif
}

bool gains_by_asking_ahead() {
#if ZO_X86
    return x86().is_intel;
#else
    return false;
#endif
}

}  // namespace zo
