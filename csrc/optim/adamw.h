// The fused AdamW update: what a kernel takes, a table of kernels per instruction set, and the parallel loop.
#pragma once

#include "cpu/features.h"
#include "zero_offload.h"

namespace zo {

struct AdamwBuffers {
    void *value;
    uint16_t *residual;
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    const void *grad;
    void *value_out;
};

// Everything of a segment that does not depend on the element, computed in double and rounded to float once.
struct AdamwScalars {
    float grad_scale;
    float decay;  // 1 - lr * weight_decay
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float neg_step_size;  // -lr / (1 - beta1^step)
};

using AdamwKernel = void (*)(AdamwBuffers buffers, AdamwScalars scalars, int64_t begin, int64_t end);

// [value kind][grad kind][0: no value_out, 1: with]
struct AdamwTable {
    AdamwKernel kernel[ZO_NUM_KINDS][ZO_NUM_KINDS][2];
};

extern const AdamwTable adamw_scalar;
#if ZO_X86
extern const AdamwTable adamw_avx2;
extern const AdamwTable adamw_avx512;
#endif

// The arguments have been validated.
void adamw_update(const zo_adamw_args &args);

}  // namespace zo
