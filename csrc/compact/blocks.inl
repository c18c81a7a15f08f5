// Blocks of codes <-> fp32 lanes, once over a Vec; see [Note: codes].
#pragma once

#include "compact/compact.h"
#include "simd/elements.inl"
#include "simd/random.inl"

namespace zo {
namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
constexpr uint32_t kSmallestScale = 0x20000001;  // 2^-63, and the lowest bit

template <bool kSigned>
constexpr float kLargestCode = kSigned ? 127.0f : 255.0f;

template <class W>
inline typename W::F magnitude(typename W::F x) {
    return W::from_bits(W::and_bits(W::bits(x), W::set_bits(kMagnitude)));
}

template <class W, bool kSigned>
inline typename W::F decode_lanes(const uint8_t *codes, typename W::F scale) {
    const typename W::I code = kSigned ? W::load_s8(codes) : W::load_u8(codes);
    const typename W::F root = W::mul(W::to_float(code), scale);
    return W::mul(root, kSigned ? magnitude<W>(root) : root);
}

// Between the pass that makes its values and the pass that makes its codes, a block has numbers in memory
// (`kept`). They are signed values, or the roots of values that are never negative. The scale comes from the
// bits of their largest magnitude; a root times `inverse` is in units of it.
struct Scale {
    float scale, inverse;
    bool finite;
};

template <bool kSigned>
inline Scale scale_of(uint32_t top) {
    using W = ScalarVec;
    if (top == 0) return {0.0f, 0.0f, true};
    if (top >= kInfinity) return {W::from_bits(kQuietNan), 0.0f, false};
    const float root = kSigned ? W::sqrt(W::from_bits(top)) : W::from_bits(top);
    const float smallest = W::from_bits(kSmallestScale);
    if (kSigned && root < smallest) return {0.0f, 0.0f, true};
    const float scale = W::greater(W::from_bits(W::bits(root / kLargestCode<kSigned>) | 1), smallest);
    return {scale, 1.0f / scale, true};
}

// A code is the integer below the root, c, or c + 1. It is c + 1 where the square has come the share
// `at_least` (0 to 1) of the way from c^2 to (c + 1)^2.
template <class W, bool kSigned>
inline void encode_lanes(uint8_t *codes, const float *kept, typename W::F inverse, typename W::F at_least) {
    using F = typename W::F;
    const F x = W::load(kept);
    const F root = kSigned ? W::sqrt(magnitude<W>(x)) : x;
    const F y = W::mul(root, inverse);
    const typename W::I below = W::to_int(y);
    const F c = W::to_float(below);
    // c^2 + at_least (2 c + 1)
    const F edge = W::fma(c, W::fma(W::set(2.0f), at_least, c), at_least);
    typename W::I code = W::count_if_reached(below, W::mul(y, y), edge);
    code = kSigned ? W::with_sign(code, x)
                   : W::max_bits(code, W::min_bits(W::bits(x), W::set_bits(1)));  // no root above 0 gets 0
    W::store_u8(codes, code);
}

// Where in [0, 1) the edge lies between two codes: from twelve bits of a word, (n + 1/2) / 4096; or in the
// middle. With the half step, what is a code up to rounding errors stays it.
struct RandomEdge {
    const float *words;
    int state;
    template <class W>
    typename W::F at(int64_t i) const {
        const typename W::I word = W::bits(W::load(words + i));
        const typename W::I fraction = state == 0 ? W::template up<11>(word) : W::template down<1>(word);
        const typename W::I twelve = W::and_bits(fraction, W::set_bits(0x007FF800));
        return W::sub(W::from_bits(W::or_bits(twelve, W::set_bits(0x3F800400))), W::set(1.0f));
    }
};

struct MiddleEdge {
    template <class W>
    typename W::F at(int64_t) const {
        return W::set(0.5f);
    }
};

// The codes of `count` values, at most a block.
template <bool kSigned, class Edge>
inline void encode_block(const float *kept, const Scale &made, uint8_t *codes, int64_t count,
                         const Edge &edge) {
    if (!made.finite) {
        for (int64_t i = 0; i < count; ++i) codes[i] = 0;
        return;
    }
    const auto wide = Vec::set(made.inverse);
    const int64_t in_vectors = count / Vec::kLanes * Vec::kLanes;
    for (int64_t i = 0; i < in_vectors; i += Vec::kLanes)
        encode_lanes<Vec, kSigned>(codes + i, kept + i, wide, edge.template at<Vec>(i));
    for (int64_t i = in_vectors; i < count; ++i)
        encode_lanes<ScalarVec, kSigned>(codes + i, kept + i, made.inverse, edge.template at<ScalarVec>(i));
}

}  // namespace
}  // namespace zo
