// The compact format: optimizer states as 8-bit codes with a scale for every 256, masters of 24 bits.
//
// [Note: codes] A code stands for the root of a value: with the block's scale q, code c of a state that is
// never negative is (c q)^2, c = 0 to 255; of a signed one c |c| q^2, c = -127 to 127. q is the root of the
// block's largest |x| over the largest code. It is at least 2^-63, so that q^2 is not a denormal, and 0 for a
// block of zeros, or of signed denormals.
//   - Decoded and encoded again, every code and every q come back. The root of an fp32 square is exact, and
//     the rounded c q over q is nearer to c than a rounding can tell. The lowest bit of q is made to be set:
//     then the rounded 127 q over 127, or 255 q over 255, is q again.
//   - A value between those of two codes becomes one of them, at random so that it keeps its mean, or the
//     nearer one. A state above 0 that is never negative does not become 0: its root is divided by.
//   - A block with a NaN or an infinity gets the scale NaN and codes 0: all of it decodes to NaN.
#pragma once

#include "optim/update.h"

namespace zo {

constexpr int64_t kBlock = ZO_STATE_BLOCK;

using DecodeKernel = void (*)(const uint8_t *codes, const float *scales, float *x, int64_t numel);
using EncodeKernel = void (*)(const float *x, uint8_t *codes, float *scales, int64_t numel);
using ShortSplitKernel = void (*)(const float *master, uint16_t *half, uint8_t *residual, int64_t numel);
using ShortJoinKernel = void (*)(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel);

struct CompactTable {
    UpdateKernel update[ZO_NUM_RULES][ZO_NUM_KINDS][ZO_NUM_KINDS];  // as UpdateTable; `begin` starts a block
    DecodeKernel decode[2];                                         // [1: signed]
    EncodeKernel encode[2];
    ShortSplitKernel split;
    ShortJoinKernel join;
};

extern const CompactTable compact_scalar;
#if ZO_X86
extern const CompactTable compact_avx2;
extern const CompactTable compact_avx512;
#elif ZO_ARM64
extern const CompactTable compact_neon;
#endif

// Of the instruction set in use.
const CompactTable &compact_table();

// The arguments have been validated.
int states_decode(uint32_t format, bool is_signed, const void *states, const float *scales, float *x,
                  int64_t numel, uint32_t num_threads);
int states_encode(uint32_t format, bool is_signed, const float *x, void *states, float *scales, int64_t numel,
                  uint32_t num_threads);
void short_master_split(const float *master, uint16_t *half, uint8_t *residual, int64_t numel,
                        uint32_t num_threads);
void short_master_join(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel,
                       uint32_t num_threads);

}  // namespace zo
