// Random words by counter: a word depends on a key and the number of its element alone. So neither vectors
// nor threads nor the order of work can change it. Included by the kernels, after a vec_*.h.
#pragma once

#include <stdint.h>

namespace zo {
namespace {

// The mixing steps of "lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018). Half of the key comes
// before them and half between: with one alone, two keys would give the same sequence, shifted.
template <class W>
struct RandomWords {
    using I = typename W::I;
    explicit RandomWords(const uint32_t (&key)[2])
        : before(W::set_bits(key[0])), between(W::set_bits(key[1])) {}

    // The numbers of elements `index`, index + 1 and so on, modulo 2^32.
    static I indices(uint32_t index) { return W::add_bits(W::set_bits(index), W::iota()); }

    I at(I index) const {
        I x = W::xor_bits(index, before);
        x = W::mul_bits(W::xor_bits(x, W::template down<16>(x)), W::set_bits(0x7FEB352D));
        x = W::add_bits(W::xor_bits(x, W::template down<15>(x)), between);
        x = W::mul_bits(x, W::set_bits(0x846CA68B));
        return W::xor_bits(x, W::template down<16>(x));
    }

    I before, between;
};

// [Note: bits of a word] What is rounded at random takes bits of its own. States in bf16: the lower 16 for
// the first, the upper 16 for the second. In codes: 12, the next 12, and the upper 8 for the master. A third
// state is the running maximum of the second and takes the same bits: where it equals the second it stays
// equal.
template <class W>
inline typename W::I bits_for_bf16(typename W::I random, int state) {
    return state == 0 ? W::and_bits(random, W::set_bits(0xFFFF)) : W::template down<16>(random);
}

// x as bf16 in the upper half of each word, rounded up as often as it is near to the larger one. Infinities
// and the canonical NaN stay; the largest finite numbers may become infinite.
template <class W>
inline typename W::I round_bf16_at_random(typename W::F x, typename W::I bits16) {
    return W::add_bits(W::bits(x), bits16);
}

// The same to the upper 24 bits.
template <class W>
inline typename W::F round_to_24_bits_at_random(typename W::F x, typename W::I random) {
    const typename W::I word = W::add_bits(W::bits(x), W::template down<24>(random));
    return W::from_bits(W::and_bits(word, W::set_bits(0xFFFFFF00u)));
}

}  // namespace
}  // namespace zo
