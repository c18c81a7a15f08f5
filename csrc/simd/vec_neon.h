// Four lanes: Advanced SIMD of arm64, which every such processor has. See vec_scalar.h for what each
// operation means.
#pragma once

#include <arm_neon.h>

#include "simd/vec_scalar.h"

namespace zo {
namespace {

struct Vec {
    static constexpr int kLanes = 4;
    using F = float32x4_t;
    using I = uint32x4_t;

    static F set(float x) { return vdupq_n_f32(x); }
    static F load(const float *p) { return vld1q_f32(p); }
    static void store(float *p, F x) { vst1q_f32(p, x); }
    static I load_u16(const uint16_t *p) { return vmovl_u16(vld1_u16(p)); }
    static I load_s16(const uint16_t *p) {
        return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(vld1_u16(p))));
    }
    static void store_u16(uint16_t *p, I x) { vst1_u16(p, vmovn_u32(x)); }

    static F load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static void store_f16(uint16_t *p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F sqrt(F x) { return vsqrtq_f32(x); }

    static F greater(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static F sign(F x) {
        const I one = vorrq_u32(vandq_u32(bits(x), vdupq_n_u32(0x80000000u)), bits(vdupq_n_f32(1.0f)));
        const I nonzero = vorrq_u32(vcgtzq_f32(x), vcltzq_f32(x));
        return from_bits(vbslq_u32(nonzero, one, bits(x)));
    }

    static I set_bits(uint32_t x) { return vdupq_n_u32(x); }
    static I bits(F x) { return vreinterpretq_u32_f32(x); }
    static F from_bits(I x) { return vreinterpretq_f32_u32(x); }
    static I add_bits(I a, I b) { return vaddq_u32(a, b); }
    static I and_bits(I a, I b) { return vandq_u32(a, b); }
    static I or_bits(I a, I b) { return vorrq_u32(a, b); }
    static I up16(I x) { return vshlq_n_u32(x, 16); }
    static I down16(I x) { return vshrq_n_u32(x, 16); }
    static I max_bits(I a, I b) { return vmaxq_u32(a, b); }
    static uint32_t max_lane(I x) { return vmaxvq_u32(x); }
    static I select_nan(F x, I instead, I otherwise) {
        return vbslq_u32(vceqq_f32(x, x), otherwise, instead);
    }
};

struct Squares {
    float64x2_t lane[8] = {};

    void add(const Vec::F (&x)[4]) {
        for (int i = 0; i < 4; ++i) {
            const float64x2_t low = vcvt_f64_f32(vget_low_f32(x[i]));
            const float64x2_t high = vcvt_high_f64_f32(x[i]);
            lane[2 * i] = vfmaq_f64(lane[2 * i], low, low);
            lane[2 * i + 1] = vfmaq_f64(lane[2 * i + 1], high, high);
        }
    }
    void store(double *lanes) const {
        for (int i = 0; i < 8; ++i) vst1q_f64(lanes + 2 * i, lane[i]);
    }
};

}  // namespace
}  // namespace zo
