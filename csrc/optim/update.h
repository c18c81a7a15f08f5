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

// Everything of a segment that does not depend on the element, computed in double and rounded to float once.
// A rule reads what it knows.
struct UpdateScalars {
    float grad_scale;
    float decay;  // 1 - lr * weight_decay
    float l2;     // weight_decay, where it is added to the gradient
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float neg_step_size;  // -lr; Adam: over 1 - beta1^step; Adagrad: over 1 + (step - 1) * lr_decay
    float grad_share;     // SGD: 1 - dampening; 1 in the first step
    float first_sum;      // Adagrad: the initial sum in the first step; later 0
    uint32_t key[2];      // of random words; of a range within which `origin` does not pass 2^32
};

using UpdateKernel = void (*)(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end);

// [rule][value kind][grad kind]; compact states have a table of their own.
struct UpdateTable {
    UpdateKernel fp32[ZO_NUM_RULES][ZO_NUM_KINDS][ZO_NUM_KINDS][2];  // [0: no value_out, 1: with]
    UpdateKernel bf16[ZO_NUM_RULES][ZO_NUM_KINDS][ZO_NUM_KINDS];
    int num_states[ZO_NUM_RULES];
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
