// One element at a time: the reference that every other instruction set must equal, and their tail.
//
// A Vec has kLanes floats (F) or 32-bit words (I). Only operations that IEEE 754 defines exactly are offered,
// so that a kernel written in them returns the same bits at every width. Per-ISA files include it: no STL.
#pragma once

#include <stdint.h>

namespace zo {
namespace {

struct ScalarVec {
    static constexpr int kLanes = 1;
    using F = float;
    using I = uint32_t;

    static F set(float x) { return x; }
    static F load(const float *p) { return *p; }
    static void store(float *p, F x) { *p = x; }
    static I load_u16(const uint16_t *p) { return *p; }
    static I load_s16(const uint16_t *p) { return I(int32_t(int16_t(*p))); }
    static void store_u16(uint16_t *p, I x) { *p = uint16_t(x); }  // the low half of each word
    static I load_u8(const uint8_t *p) { return *p; }
    static I load_s8(const uint8_t *p) { return I(int32_t(int8_t(*p))); }
    static void store_u8(uint8_t *p, I x) { *p = uint8_t(x); }  // the low byte of each word

    // fp16 to fp32; a NaN becomes quiet and keeps its payload.
    static F load_f16(const uint16_t *p) {
        const I magnitude = *p & 0x7FFFu, sign = (*p & 0x8000u) << 16;
        if (magnitude < 0x0400) {  // below 2^-14, all fp16 numbers are multiples of 2^-24
            return from_bits(bits(float(magnitude) * 0x1p-24f) | sign);
        }
        if (magnitude < 0x7C00) return from_bits(((magnitude << 13) + (112u << 23)) | sign);
        const I quiet = magnitude > 0x7C00 ? 0x00400000u : 0;
        return from_bits(0x7F800000u | (magnitude << 13) | quiet | sign);
    }
    // The nearest fp16, ties to even; the only NaN it takes is the canonical one.
    static void store_f16(uint16_t *p, F x) {
        const I sign = (bits(x) >> 16) & 0x8000u, magnitude = bits(x) & 0x7FFFFFFFu;
        I half;
        if (magnitude >= 0x47800000) {  // 65536, infinity, NaN
            half = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
        } else if (magnitude < 0x38800000) {  // below 2^-14: an fp32 addition rounds to multiples of 2^-24
            half = bits(from_bits(magnitude) + 0.5f) - bits(0.5f);
        } else {
            half = (magnitude - (112u << 23) + 0x0FFF + ((magnitude >> 13) & 1)) >> 13;
        }
        *p = uint16_t(half | sign);
    }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }  // a * b + c, rounded once
    static F sqrt(F x) { return __builtin_sqrtf(x); }

    static F greater(F a, F b) { return a > b ? a : b; }
    static F sign(F x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }  // -1, 1, or the zero or NaN it was

    static I set_bits(uint32_t x) { return x; }
    static I bits(F x) {
        I word;
        __builtin_memcpy(&word, &x, sizeof(word));
        return word;
    }
    static F from_bits(I x) {
        F value;
        __builtin_memcpy(&value, &x, sizeof(value));
        return value;
    }
    // Signed integers: exact to 24 bits, and toward zero, where x is a number that an int32_t holds.
    static F to_float(I x) { return float(int32_t(x)); }
    static I to_int(F x) { return I(int32_t(x)); }

    static I iota() { return 0; }  // the number of each lane
    static I add_bits(I a, I b) { return a + b; }
    static I mul_bits(I a, I b) { return a * b; }  // the low 32 bits
    static I and_bits(I a, I b) { return a & b; }
    static I or_bits(I a, I b) { return a | b; }
    static I xor_bits(I a, I b) { return a ^ b; }
    template <int kBits>
    static I up(I x) {
        return x << kBits;
    }
    template <int kBits>
    static I down(I x) {
        return x >> kBits;
    }
    static I max_bits(I a, I b) { return a > b ? a : b; }  // unsigned
    static I min_bits(I a, I b) { return a < b ? a : b; }
    static uint32_t max_lane(I x) { return x; }

    // `instead` in the lanes where x is a NaN, `otherwise` in the rest.
    static I select_nan(F x, I instead, I otherwise) { return x != x ? instead : otherwise; }
    static F replace_nan(F x, F instead) { return x != x ? instead : x; }
    // One more in the lanes where a >= b.
    static I count_if_reached(I x, F a, F b) { return a >= b ? x + 1 : x; }
    // -x in the lanes where the sign bit of `sign` is set; where `sign` is a zero, x is 0.
    static I with_sign(I x, F sign) { return bits(sign) >> 31 ? 0 - x : x; }
};

// Sixteen running sums of squares in double; element i of a chunk belongs to lane i % 16.
struct ScalarSquares {
    double lane[16] = {};

    void add(const ScalarVec::F (&x)[16]) {
        for (int i = 0; i < 16; ++i) lane[i] += double(x[i]) * double(x[i]);
    }
    void store(double *lanes) const {
        for (int i = 0; i < 16; ++i) lanes[i] = lane[i];
    }
};

}  // namespace
}  // namespace zo
