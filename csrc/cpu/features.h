// Instruction sets that this processor has, and those that the kernels use.
#pragma once

#include <cstdint>

#include "zero_offload.h"

#if defined(__x86_64__)
#define ZO_X86 1
#else
#define ZO_X86 0
#endif
#if defined(__aarch64__)
#define ZO_ARM64 1
#else
#define ZO_ARM64 0
#endif
// Clang before 16 offers the CRC instructions of arm64 to whole files only.
#if ZO_ARM64 && (!defined(__clang__) || __clang_major__ >= 16)
#define ZO_ARM_CRC 1
#else
#define ZO_ARM_CRC 0
#endif

namespace zo {

// Bit i set: zo_isa_kind i can run here. Counts only what the operating system saves on a context switch too.
uint32_t supported_isa_mask();

// The choice of ZERO_OFFLOAD_ISA or set_isa, else the widest supported.
int current_isa();

// ZO_OK, or a failure that names what can be chosen.
int set_isa(int isa);

// ZO_OK unless ZERO_OFFLOAD_ISA is set to something unusable: a wish is refused, never silently replaced.
int check_isa_environment();

bool has_crc32c_instruction();

// Whether memory that a loop streams through comes sooner to who asks for it ahead of time: Intel's
// processors look less far ahead by themselves than AMD's, which lose by it (docs/decisions/005-kernels.md).
bool gains_by_asking_ahead();

}  // namespace zo
