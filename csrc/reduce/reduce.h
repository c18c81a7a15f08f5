// Passes over gradients and values: store, accumulate, sum of squares, conversions.
//
// [Note: the tree] A sum of squares is the same on every machine. The values are cut into chunks of kChunk
// (util/chunks.h) from the start of the call. Inside a chunk element i adds its square, exact in double, to
// lane i % 16, in order. The lanes join pairwise (8, 4, 2, 1 apart), and the sums of the chunks add up in
// order.
#pragma once

#include "cpu/features.h"
#include "zero_offload.h"

namespace zo {

struct ChunkSum {
    double sumsq;
    uint32_t top;  // the largest bits of |x|; infinities and NaNs start at 0x7F800000
};

using StoreKernel = ChunkSum (*)(void *dst, const void *src, int64_t numel);
using SumKernel = ChunkSum (*)(const void *values, int64_t numel);
using ConvertKernel = void (*)(void *dst, const void *src, int64_t numel);
using SplitKernel = void (*)(const float *master, uint16_t *half, uint16_t *residual, int64_t numel);
using JoinKernel = void (*)(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel);

struct ReduceTable {
    StoreKernel store[ZO_NUM_KINDS][ZO_NUM_KINDS];       // [dst kind][src kind]; nullptr: not offered
    StoreKernel accumulate[ZO_NUM_KINDS][ZO_NUM_KINDS];  // the same
    SumKernel sumsq[ZO_NUM_KINDS];                       // [kind]
    ConvertKernel convert[ZO_NUM_KINDS]
                         [ZO_NUM_KINDS];  // [dst kind][src kind]; nullptr: a copy, or not offered
    SplitKernel split;
    JoinKernel join;
};

extern const ReduceTable reduce_scalar;
#if ZO_X86
extern const ReduceTable reduce_avx2;
extern const ReduceTable reduce_avx512;
#elif ZO_ARM64
extern const ReduceTable reduce_neon;
#endif

// The arguments have been validated, except that they may name a kernel that is not offered.
int grad_store(zo_grad_args *args);
void sum_of_squares(uint32_t kind, const void *values, int64_t numel, uint32_t num_threads, double *sumsq,
                    int32_t *finite);
int convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
            uint32_t num_threads);
void master_split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel,
                  uint32_t num_threads);
void master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                 uint32_t num_threads);

}  // namespace zo
