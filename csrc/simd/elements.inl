// Elements in memory <-> fp32 lanes, written once over a Vec. Included by the kernels, after a vec_*.h.
#pragma once

#include <stdint.h>

#include "cpu/features.h"

// For functions that only fetch ahead: to GCC they have no effect, and calls of them go.
#define ZO_INLINED __attribute__((always_inline))

namespace zo {
namespace {

// Loops over narrow vectors are not fast enough to wait for memory.
inline bool asks_ahead() { return Vec::kLanes == 16 && gains_by_asking_ahead(); }

constexpr uint32_t kQuietNan = 0x7FC00000u;

// NaNs made by arithmetic differ among processors in sign and payload; every kernel stores this one instead.
template <class W>
inline typename W::F canonical(typename W::F x) {
    return W::replace_nan(x, W::from_bits(W::set_bits(kQuietNan)));
}

template <class W>
inline typename W::F from_bf16(const uint16_t *p) {
    return W::from_bits(W::template up<16>(W::load_u16(p)));
}

// The bf16 nearest to x, ties to even, in the upper half of each word (the lower half is arbitrary).
template <class W>
inline typename W::I round_bf16(typename W::F x) {
    const typename W::I word = W::bits(canonical<W>(x));
    const typename W::I odd = W::and_bits(W::template down<16>(word), W::set_bits(1));
    return W::add_bits(W::add_bits(word, W::set_bits(0x7FFF)), odd);
}

// See zo_master_split: the fp32 master that a half and its residual stand for.
template <class W>
inline typename W::F join_master(const uint16_t *half, const uint16_t *residual) {
    return W::from_bits(W::add_bits(W::template up<16>(W::load_u16(half)), W::load_s16(residual)));
}

// The same with a residual of 8 bits, for a master whose lower 8 bits are 0.
template <class W>
inline typename W::F join_short_master(const uint16_t *half, const uint8_t *residual) {
    const typename W::I upper = W::template up<16>(W::load_u16(half));
    return W::from_bits(W::add_bits(upper, W::template up<8>(W::load_s8(residual))));
}

// The half of a master, ready for store_u16. Right for the canonical NaN too, but for no other NaN.
template <class W>
inline typename W::I half_of(typename W::I master) {
    return W::template down<16>(W::add_bits(master, W::set_bits(0x8000)));
}

// Calls each.at<Vec>(i), then each.at<ScalarVec>(i) for the tail.
template <class Each>
inline void for_each_lane(const Each &each, int64_t numel) {
    int64_t i = 0;
    for (; i + Vec::kLanes <= numel; i += Vec::kLanes) each.template at<Vec>(i);
    for (; i < numel; ++i) each.template at<ScalarVec>(i);
}

// An element type in memory: its C type, its way to fp32, and the way back of what came from there.
struct Fp32 {
    using Element = float;
    template <class W>
    static typename W::F load(const float *p) {
        return W::load(p);
    }
    template <class W>
    static void store(float *p, typename W::F x) {
        W::store(p, x);
    }
};

struct Bf16 {
    using Element = uint16_t;
    template <class W>
    static typename W::F load(const uint16_t *p) {
        return from_bf16<W>(p);
    }
    template <class W>
    static void store(uint16_t *p, typename W::F x) {
        W::store_u16(p, W::template down<16>(W::bits(x)));
    }
};

struct Fp16 {
    using Element = uint16_t;
    template <class W>
    static typename W::F load(const uint16_t *p) {
        return W::load_f16(p);
    }
    template <class W>
    static void store(uint16_t *p, typename W::F x) {
        W::store_f16(p, canonical<W>(x));
    }
};

}  // namespace
}  // namespace zo
