// Eight lanes: AVX2, FMA and F16C. See vec_scalar.h for what each operation means.
#pragma once

#include <immintrin.h>

#include "simd/vec_scalar.h"

namespace zo {
namespace {

struct Vec {
    static constexpr int kLanes = 8;
    using F = __m256;
    using I = __m256i;

    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float *p) { return _mm256_loadu_ps(p); }
    static void store(float *p, F x) { _mm256_storeu_ps(p, x); }
    static I load_u16(const uint16_t *p) { return _mm256_cvtepu16_epi32(half_register(p)); }
    static I load_s16(const uint16_t *p) { return _mm256_cvtepi16_epi32(half_register(p)); }
    static void store_u16(uint16_t *p, I x) {
        const I low = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));  // the pack saturates
        const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
    }
    static I load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(quarter_register(p)); }
    static I load_s8(const uint8_t *p) { return _mm256_cvtepi8_epi32(quarter_register(p)); }
    static void store_u8(uint8_t *p, I x) {
        const I first = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0C080400));  // four bytes of each half
        const I packed = _mm256_permutevar8x32_epi32(first, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
    }

    static F load_f16(const uint16_t *p) { return _mm256_cvtph_ps(half_register(p)); }
    static void store_f16(uint16_t *p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F sqrt(F x) { return _mm256_sqrt_ps(x); }

    static F greater(F a, F b) { return _mm256_max_ps(a, b); }
    static F sign(F x) {
        const F bit = _mm256_set1_ps(-0.0f), one = _mm256_or_ps(_mm256_and_ps(x, bit), _mm256_set1_ps(1.0f));
        return _mm256_blendv_ps(x, one, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
    }

    static I set_bits(uint32_t x) { return _mm256_set1_epi32(int32_t(x)); }
    static I bits(F x) { return _mm256_castps_si256(x); }
    static F from_bits(I x) { return _mm256_castsi256_ps(x); }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static I to_int(F x) { return _mm256_cvttps_epi32(x); }

    static I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static I add_bits(I a, I b) { return _mm256_add_epi32(a, b); }
    static I mul_bits(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I and_bits(I a, I b) { return _mm256_and_si256(a, b); }
    static I or_bits(I a, I b) { return _mm256_or_si256(a, b); }
    static I xor_bits(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int kBits>
    static I up(I x) {
        return _mm256_slli_epi32(x, kBits);
    }
    template <int kBits>
    static I down(I x) {
        return _mm256_srli_epi32(x, kBits);
    }
    static I max_bits(I a, I b) { return _mm256_max_epu32(a, b); }
    static I min_bits(I a, I b) { return _mm256_min_epu32(a, b); }
    static uint32_t max_lane(I x) {
        uint32_t word[kLanes], top = 0;
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(word), x);
        for (uint32_t each : word) top = each > top ? each : top;
        return top;
    }
    static I select_nan(F x, I instead, I otherwise) {
        const F nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        return _mm256_blendv_epi8(otherwise, instead, _mm256_castps_si256(nan));
    }
    static F replace_nan(F x, F instead) {
        return _mm256_blendv_ps(x, instead, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
    static I count_if_reached(I x, F a, F b) {
        return _mm256_sub_epi32(x, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
    }
    static I with_sign(I x, F sign) { return _mm256_sign_epi32(x, bits(sign)); }

  private:
    static __m128i half_register(const uint16_t *p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    }
    static __m128i quarter_register(const uint8_t *p) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    }
};

struct Squares {
    __m256d lane[4] = {};

    void add(const Vec::F (&x)[2]) {
        for (int i = 0; i < 2; ++i) {
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x[i]));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x[i], 1));
            lane[2 * i] = _mm256_fmadd_pd(low, low, lane[2 * i]);
            lane[2 * i + 1] = _mm256_fmadd_pd(high, high, lane[2 * i + 1]);
        }
    }
    void store(double *lanes) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_pd(lanes + 4 * i, lane[i]);
    }
};

}  // namespace
}  // namespace zo
