// How a value rests in memory, once over whatever Vec is asked for.
#pragma once

#include "optim/update.h"
#include "simd/elements.inl"

namespace zo {
namespace {

// Where the fp32 master lives: in one fp32 array, in a bf16 half and a residual, or beside its fp16 copy.
// `copy`: the new value goes to value_out too.
struct WholeMaster {
    static constexpr bool kShort = false;
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return W::load(static_cast<const float *>(b.value) + i);
    }
    template <class W>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p, bool copy) {
        W::store(static_cast<float *>(b.value) + i, p);
        if (copy) W::store(static_cast<float *>(b.value_out) + i, p);
    }
    static ZO_INLINED void fetch(const UpdateBuffers &b, int64_t i) {
        __builtin_prefetch(static_cast<const float *>(b.value) + i);
    }
};

struct SplitMaster {
    static constexpr bool kShort = false;
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return join_master<W>(static_cast<const uint16_t *>(b.value) + i,
                              static_cast<const uint16_t *>(b.residual) + i);
    }
    template <class W>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p, bool copy) {
        const typename W::I half = half_of<W>(W::bits(p));
        W::store_u16(static_cast<uint16_t *>(b.value) + i, half);
        W::store_u16(static_cast<uint16_t *>(b.residual) + i, W::bits(p));
        if (copy) W::store_u16(static_cast<uint16_t *>(b.value_out) + i, half);
    }
    static ZO_INLINED void fetch(const UpdateBuffers &b, int64_t i) {
        __builtin_prefetch(static_cast<const uint16_t *>(b.value) + i);
        __builtin_prefetch(static_cast<const uint16_t *>(b.residual) + i);
    }
};

// Beside codes: the upper 24 bits of a master, in a bf16 half and a residual of 8 bits.
struct ShortSplitMaster {
    static constexpr bool kShort = true;
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return join_short_master<W>(static_cast<const uint16_t *>(b.value) + i,
                                    static_cast<const uint8_t *>(b.residual) + i);
    }
    // Takes a master whose lower 8 bits are 0.
    template <class W>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p, bool copy) {
        const typename W::I half = half_of<W>(W::bits(p));
        W::store_u16(static_cast<uint16_t *>(b.value) + i, half);
        W::store_u8(static_cast<uint8_t *>(b.residual) + i, W::template down<8>(W::bits(p)));
        if (copy) W::store_u16(static_cast<uint16_t *>(b.value_out) + i, half);
    }
};

struct MasterBeside {
    static constexpr bool kShort = false;
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return W::load(b.master + i);
    }
    template <class W>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p, bool copy) {
        W::store(b.master + i, p);
        W::store_f16(static_cast<uint16_t *>(b.value) + i, p);
        if (copy) W::store_f16(static_cast<uint16_t *>(b.value_out) + i, p);
    }
    static ZO_INLINED void fetch(const UpdateBuffers &b, int64_t i) {
        __builtin_prefetch(b.master + i);
        __builtin_prefetch(static_cast<const uint16_t *>(b.value) + i);
    }
};

}  // namespace
}  // namespace zo
