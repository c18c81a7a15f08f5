// The fused optimizer update: what a kernel takes, a table of kernels per instruction set, and the parallel
// loop.
#pragma once

#include "cpu/features.h"
#include "zero_offload.h"

namespace zo {

struct UpdateBuffers {
    void *value;
    void *residual;
    float *master;
    void *states[3];
    float *scales[3];
    const void *grad;
    void *value_out;
    uint32_t origin;  // what element 0 counts as for random words, modulo 2^32
};

struct UpdateScalars;  // of optim/rules.inl

using UpdateKernel = void (*)(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end);

// [rule][value kind][grad kind]; compact states have a table of their own.
struct UpdateTable {
    UpdateKernel fp32[ZO_NUM_RULES][ZO_NUM_KINDS][ZO_NUM_KINDS][2];  // [0: no value_out, 1: with]
    UpdateKernel bf16[ZO_NUM_RULES][ZO_NUM_KINDS][ZO_NUM_KINDS];
};

extern const UpdateTable update_scalar;
#if ZO_X86
extern const UpdateTable update_avx2;
extern const UpdateTable update_avx512;
#elif ZO_ARM64
extern const UpdateTable update_neon;
#endif

int num_states(uint32_t rule);

// The arguments have been validated.
void update(const zo_update_args &args);

}  // namespace zo
