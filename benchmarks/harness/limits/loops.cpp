// The two limits of an update: a loop that only streams its bytes, and a loop of its arithmetic.
//
// Compiled by loops.py for one instruction set, with the flags of that kernel file.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include VEC_HEADER

#include "compact/kernel.inl"
#include "optim/kernel.inl"
#include "util/chunks.h"

namespace {

constexpr int64_t kLanes = 16, kResident = 1024;

// How many arrays of 4 and of 2 bytes (and of 1, where they are rewritten) are only read, rewritten, only
// written.
struct Streams {
    uint32_t read[2], changed[3], written[2];
};

template <class Word>
struct Lane {
    typedef Word Type __attribute__((vector_size(kLanes * sizeof(Word)), aligned(sizeof(Word)), may_alias));
};
using Wide = Lane<uint32_t>::Type;
using Narrow = Lane<uint16_t>::Type;
using Single = Lane<uint8_t>::Type;

template <class Vector>
Vector *at(char *const *arrays, uint32_t k, int64_t i) {
    return reinterpret_cast<Vector *>(arrays[k] + i * int64_t(sizeof(Vector) / kLanes));
}

// Sixteen elements of each array at a time, as a kernel takes them; one more in every word that is rewritten.
template <uint32_t kRead4, uint32_t kRead2, uint32_t kChanged4, uint32_t kChanged2, uint32_t kChanged1,
          uint32_t kWritten4, uint32_t kWritten2>
uint32_t pass(char *const *given, int64_t begin, int64_t end) {
    constexpr uint32_t kCount = kRead4 + kRead2 + kChanged4 + kChanged2 + kChanged1 + kWritten4 + kWritten2;
    char *arrays[kCount];
    for (uint32_t k = 0; k < kCount; ++k) arrays[k] = given[k];
    Wide sink4 = {};
    Narrow sink2 = {};
    for (int64_t i = begin; i < end; i += kLanes) {
        uint32_t k = 0;
        for (uint32_t j = 0; j < kRead4; ++j) sink4 |= *at<Wide>(arrays, k++, i);
        for (uint32_t j = 0; j < kRead2; ++j) sink2 |= *at<Narrow>(arrays, k++, i);
        for (uint32_t j = 0; j < kChanged4; ++j) *at<Wide>(arrays, k++, i) += 1;
        for (uint32_t j = 0; j < kChanged2; ++j) *at<Narrow>(arrays, k++, i) += 1;
        for (uint32_t j = 0; j < kChanged1; ++j) *at<Single>(arrays, k++, i) += 1;
        for (uint32_t j = 0; j < kWritten4; ++j) *at<Wide>(arrays, k++, i) = Wide{};
        for (uint32_t j = 0; j < kWritten2; ++j) *at<Narrow>(arrays, k++, i) = Narrow{};
    }
    uint32_t sink = 0;
    for (int lane = 0; lane < kLanes; ++lane) sink |= sink4[lane] | sink2[lane];
    return sink;
}

using Pass = uint32_t (*)(char *const *, int64_t, int64_t);

struct Offered {
    Streams streams;
    Pass pass;
};

#define OFFER(r4, r2, c4, c2, c1, w4, w2) \
    Offered { {{r4, r2}, {c4, c2, c1}, {w4, w2}}, pass<r4, r2, c4, c2, c1, w4, w2> }

const Offered kOffered[] = {
    OFFER(0, 1, 2, 2, 0, 0, 0),                              // AdamW: a bf16 half, its residual, two moments
    OFFER(0, 1, 0, 4, 0, 0, 0),                              // with moments in bf16
    OFFER(0, 1, 0, 1, 3, 0, 0),                              // in codes
    OFFER(0, 1, 0, 1, 2, 0, 0),                              // one state in codes
    OFFER(1, 0, 3, 0, 0, 0, 0),                              // AdamW in fp32
    OFFER(0, 1, 3, 1, 0, 0, 0),                              // in fp16
    OFFER(0, 1, 3, 2, 0, 0, 0),                              // with AMSGrad
    OFFER(0, 1, 1, 2, 0, 0, 0),                              // one state
    OFFER(0, 1, 0, 2, 0, 0, 0),                              // none
    OFFER(0, 1, 1, 0, 0, 0, 0),                              // fp32 += bf16
    OFFER(1, 0, 0, 0, 0, 0, 0),                              // a norm
    OFFER(0, 1, 0, 0, 0, 0, 0), OFFER(1, 0, 0, 0, 0, 0, 1),  // a conversion
    OFFER(0, 1, 0, 0, 0, 1, 0),
};

// A state's memory as a format has it, all of it about 0.01.
void fill(uint32_t format, void *state, float *scales) {
    for (int64_t i = 0; i < kResident; ++i) {
        if (format == ZO_STATES_FP32) static_cast<float *>(state)[i] = 0.01f;
        if (format == ZO_STATES_BF16) static_cast<uint16_t *>(state)[i] = 0x3C24;
        if (format == ZO_STATES_COMPACT) static_cast<uint8_t *>(state)[i] = 100;
    }
    for (int64_t i = 0; i < kResident / zo::kBlock; ++i) scales[i] = 1e-3f;
}

zo::UpdateKernel kernel_of(uint32_t rule, uint32_t value_kind, uint32_t grad_kind, uint32_t format) {
    if (format == ZO_STATES_COMPACT) return zo::kCompactTable.update[rule][value_kind][grad_kind];
    if (format == ZO_STATES_BF16) return zo::kTable.bf16[rule][value_kind][grad_kind];
    return zo::kTable.fp32[rule][value_kind][grad_kind][0];
}

}  // namespace

extern "C" {

// `counts` are those of Streams, and the arrays in that order. False: no such loop is offered.
__attribute__((visibility("default"))) bool stream(const uint32_t *counts, char *const *arrays, int64_t numel,
                                                   uint32_t num_threads) {
    for (const Offered &each : kOffered) {
        if (memcmp(&each.streams, counts, sizeof(Streams)) != 0) continue;
        uint32_t sinks = 0;
        zo::for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
            const uint32_t sink = each.pass(arrays, begin, begin + count);
            __atomic_fetch_or(&sinks, sink, __ATOMIC_RELAXED);
        });
        volatile uint32_t kept = sinks;
        (void)kept;
        return true;
    }
    return false;
}

// The update of a rule over memory that never leaves the first-level cache, numel elements in all.
__attribute__((visibility("default"))) void arithmetic(uint32_t rule, uint32_t value_kind, uint32_t grad_kind,
                                                       uint32_t format, int64_t numel, uint32_t num_threads) {
    const zo::UpdateKernel kernel = kernel_of(rule, value_kind, grad_kind, format);
    zo::UpdateScalars scalars = {};
    scalars.grad_scale = scalars.decay = scalars.inv_sqrt_bias2 = scalars.grad_share = 1.0f;
    scalars.beta1 = 0.9f, scalars.one_minus_beta1 = 0.1f;
    scalars.beta2 = 0.999f, scalars.one_minus_beta2 = 1e-3f;
    scalars.eps = 1e-8f, scalars.neg_step_size = -1e-9f;
    scalars.key[0] = 1, scalars.key[1] = 2;
#pragma omp parallel for num_threads(int(num_threads))
    for (int64_t thread = 0; thread < num_threads; ++thread) {
        alignas(64) float values[kResident], grads[kResident], states[3][kResident];
        float scales[3][kResident / zo::kBlock];
        alignas(64) uint16_t halves[kResident], residuals[kResident] = {}, half_grads[kResident];
        for (int64_t i = 0; i < kResident; ++i) {
            values[i] = grads[i] = 0.01f;
            halves[i] = half_grads[i] = 0x3C00;
        }
        zo::UpdateBuffers buffers = {};
        buffers.value = value_kind == ZO_FP32 ? static_cast<void *>(values) : halves;
        buffers.residual = residuals;
        buffers.master = values;
        buffers.grad = grad_kind == ZO_FP32 ? static_cast<void *>(grads) : half_grads;
        for (int k = 0; k < 3; ++k) {
            fill(format, states[k], scales[k]);
            buffers.states[k] = states[k];
            buffers.scales[k] = scales[k];
        }
        const int64_t share = numel / num_threads + (thread < numel % num_threads);
        for (int64_t done = 0; done < share; done += kResident) kernel(buffers, scalars, 0, kResident);
    }
}

}  // extern "C"
