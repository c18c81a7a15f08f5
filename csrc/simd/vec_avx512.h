// Sixteen lanes: AVX-512 F, BW, VL and DQ. See vec_scalar.h for what each operation means.
#pragma once

#include <immintrin.h>

#include "simd/vec_scalar.h"

namespace zo {
namespace {

struct Vec {
    static constexpr int kLanes = 16;
    using F = __m512;
    using I = __m512i;

    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float *p) { return _mm512_loadu_ps(p); }
    static void store(float *p, F x) { _mm512_storeu_ps(p, x); }
    static I load_u16(const uint16_t *p) { return _mm512_cvtepu16_epi32(half_register(p)); }
    static I load_s16(const uint16_t *p) { return _mm512_cvtepi16_epi32(half_register(p)); }
    static void store_u16(uint16_t *p, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(x));
    }
    static I load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(quarter_register(p)); }
    static I load_s8(const uint8_t *p) { return _mm512_cvtepi8_epi32(quarter_register(p)); }
    static void store_u8(uint8_t *p, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(x));
    }

    static F load_f16(const uint16_t *p) { return _mm512_cvtph_ps(half_register(p)); }
    static void store_f16(uint16_t *p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F sqrt(F x) { return _mm512_sqrt_ps(x); }

    static F greater(F a, F b) { return _mm512_max_ps(a, b); }
    static F sign(F x) {
        const F one = _mm512_or_ps(_mm512_and_ps(x, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ), one);
    }

    static I set_bits(uint32_t x) { return _mm512_set1_epi32(int32_t(x)); }
    static I bits(F x) { return _mm512_castps_si512(x); }
    static F from_bits(I x) { return _mm512_castsi512_ps(x); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static I to_int(F x) { return _mm512_cvttps_epi32(x); }

    static I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static I add_bits(I a, I b) { return _mm512_add_epi32(a, b); }
    static I mul_bits(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I and_bits(I a, I b) { return _mm512_and_si512(a, b); }
    static I or_bits(I a, I b) { return _mm512_or_si512(a, b); }
    static I xor_bits(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int kBits>
    static I up(I x) {
        return _mm512_slli_epi32(x, kBits);
    }
    template <int kBits>
    static I down(I x) {
        return _mm512_srli_epi32(x, kBits);
    }
    static I max_bits(I a, I b) { return _mm512_max_epu32(a, b); }
    static I min_bits(I a, I b) { return _mm512_min_epu32(a, b); }
    static uint32_t max_lane(I x) { return _mm512_reduce_max_epu32(x); }
    static I select_nan(F x, I instead, I otherwise) {
        return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), instead);
    }
    // In one instruction: of the eight kinds of numbers, the two of NaNs give `instead`, the others x.
    static F replace_nan(F x, F instead) {
        return _mm512_fixupimm_ps(instead, x, _mm512_set1_epi32(0x11111100), 0);
    }
    static I count_if_reached(I x, F a, F b) {
        return _mm512_mask_add_epi32(x, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x, _mm512_set1_epi32(1));
    }
    static I with_sign(I x, F sign) {
        return _mm512_mask_sub_epi32(x, _mm512_movepi32_mask(bits(sign)), _mm512_setzero_si512(), x);
    }

  private:
    static __m256i half_register(const uint16_t *p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    }
    static __m128i quarter_register(const uint8_t *p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    }
};

struct Squares {
    __m512d lane[2] = {};

    void add(const Vec::F (&x)[1]) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x[0]));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x[0], 1));
        lane[0] = _mm512_fmadd_pd(low, low, lane[0]);
        lane[1] = _mm512_fmadd_pd(high, high, lane[1]);
    }
    void store(double *lanes) const {
        for (int i = 0; i < 2; ++i) _mm512_storeu_pd(lanes + 8 * i, lane[i]);
    }
};

}  // namespace
}  // namespace zo
