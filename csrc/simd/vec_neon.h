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
    static I load_u8(const uint8_t *p) { return vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))); }
    static I load_s8(const uint8_t *p) {
        const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(four_bytes(p)));
        return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(words)));
    }
    static void store_u8(uint8_t *p, I x) {
        const uint16x4_t words = vmovn_u32(x);
        const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
        const uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
        __builtin_memcpy(p, &packed, sizeof(packed));
    }

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
    static F to_float(I x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
    static I to_int(F x) { return vreinterpretq_u32_s32(vcvtq_s32_f32(x)); }

    static I iota() {
        const uint32_t lanes[] = {0, 1, 2, 3};
        return vld1q_u32(lanes);
    }
    static I add_bits(I a, I b) { return vaddq_u32(a, b); }
    static I mul_bits(I a, I b) { return vmulq_u32(a, b); }
    static I and_bits(I a, I b) { return vandq_u32(a, b); }
    static I or_bits(I a, I b) { return vorrq_u32(a, b); }
    static I xor_bits(I a, I b) { return veorq_u32(a, b); }
    template <int kBits>
    static I up(I x) {
        return vshlq_n_u32(x, kBits);
    }
    template <int kBits>
    static I down(I x) {
        return vshrq_n_u32(x, kBits);
    }
    static I max_bits(I a, I b) { return vmaxq_u32(a, b); }
    static I min_bits(I a, I b) { return vminq_u32(a, b); }
    static uint32_t max_lane(I x) { return vmaxvq_u32(x); }
    static I select_nan(F x, I instead, I otherwise) {
        return vbslq_u32(vceqq_f32(x, x), otherwise, instead);
    }
    static F replace_nan(F x, F instead) { return vbslq_f32(vceqq_f32(x, x), x, instead); }
    static I count_if_reached(I x, F a, F b) { return vsubq_u32(x, vcgeq_f32(a, b)); }
    static I with_sign(I x, F sign) {
        const int32x4_t negative = vshrq_n_s32(vreinterpretq_s32_f32(sign), 31),
                        code = vreinterpretq_s32_u32(x);
        return vreinterpretq_u32_s32(vsubq_s32(veorq_s32(code, negative), negative));
    }

  private:
    static uint8x8_t four_bytes(const uint8_t *p) {
        uint32_t packed;
        __builtin_memcpy(&packed, p, sizeof(packed));
        return vreinterpret_u8_u32(vdup_n_u32(packed));
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
