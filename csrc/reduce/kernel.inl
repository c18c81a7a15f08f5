// The passes of reduce.h over one chunk, once, for whatever Vec and Squares were included before.

#include "reduce/reduce.h"
#include "simd/elements.inl"

namespace zo {
namespace {

constexpr int64_t kAheadBytes = 4096;

template <class Element>
ZO_INLINED inline void fetch_ahead(const Element *p) {
    __builtin_prefetch(reinterpret_cast<const char *>(p) + kAheadBytes);
}

// One call computes and stores fp32 lanes at element i: see the operations below.
template <class Operation>
inline ChunkSum sum_chunk(const Operation &operation, int64_t numel) {
    constexpr int kGroup = 16 / Vec::kLanes;
    const auto magnitude = Vec::set_bits(0x7FFFFFFF);
    const bool ahead = asks_ahead();
    Squares squares;
    auto wide_top = Vec::set_bits(0);
    int64_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        typename Vec::F x[kGroup];
        if (ahead) operation.fetch(i);
        for (int k = 0; k < kGroup; ++k) {
            x[k] = operation.template at<Vec>(i + k * Vec::kLanes);
            wide_top = Vec::max_bits(wide_top, Vec::and_bits(Vec::bits(x[k]), magnitude));
        }
        squares.add(x);
    }
    double lane[16];
    squares.store(lane);
    uint32_t top = Vec::max_lane(wide_top);
    for (int k = 0; i < numel; ++i, ++k) {
        const float x = operation.template at<ScalarVec>(i);
        lane[k] += double(x) * double(x);
        top = ScalarVec::max_bits(top, ScalarVec::bits(x) & 0x7FFFFFFF);
    }
    for (int apart = 8; apart > 0; apart /= 2) {
        for (int k = 0; k < apart; ++k) lane[k] += lane[k + apart];
    }
    return {lane[0], top};
}

template <class Kind>
struct Read {
    const typename Kind::Element *values;
    ZO_INLINED void fetch(int64_t i) const { fetch_ahead(values + i); }
    template <class W>
    typename W::F at(int64_t i) const {
        return Kind::template load<W>(values + i);
    }
};

// Dst is Src or fp32, so what is stored is what was loaded; only fp32 adds up, and rounds.
template <class Dst, class Src, bool kAdds>
struct Store {
    typename Dst::Element *dst;
    const typename Src::Element *src;
    ZO_INLINED void fetch(int64_t i) const {
        fetch_ahead(src + i);
        fetch_ahead(dst + i);
    }
    template <class W>
    typename W::F at(int64_t i) const {
        typename W::F x = Src::template load<W>(src + i);
        if (kAdds) x = canonical<W>(W::add(Dst::template load<W>(dst + i), x));
        Dst::template store<W>(dst + i, x);
        return x;
    }
};

template <class Dst, class Src, bool kAdds = false>
ChunkSum store_chunk(void *dst, const void *src, int64_t numel) {
    const Store<Dst, Src, kAdds> operation{static_cast<typename Dst::Element *>(dst),
                                           static_cast<const typename Src::Element *>(src)};
    return sum_chunk(operation, numel);
}

template <class Kind>
ChunkSum sumsq_chunk(const void *values, int64_t numel) {
    return sum_chunk(Read<Kind>{static_cast<const typename Kind::Element *>(values)}, numel);
}

template <class Src>
struct Widen {
    const uint16_t *src;
    float *dst;
    bool ahead = asks_ahead();
    template <class W>
    void at(int64_t i) const {
        if (ahead) fetch_ahead(src + i);
        W::store(dst + i, Src::template load<W>(src + i));
    }
};

struct NarrowBf16 {
    const float *src;
    uint16_t *dst;
    bool ahead = asks_ahead();
    template <class W>
    void at(int64_t i) const {
        if (ahead) fetch_ahead(src + i);
        W::store_u16(dst + i, W::template down<16>(round_bf16<W>(W::load(src + i))));
    }
};

struct NarrowFp16 {
    const float *src;
    uint16_t *dst;
    bool ahead = asks_ahead();
    template <class W>
    void at(int64_t i) const {
        if (ahead) fetch_ahead(src + i);
        W::store_f16(dst + i, canonical<W>(W::load(src + i)));
    }
};

struct Split {
    const float *master;
    uint16_t *half;
    uint16_t *residual;
    template <class W>
    void at(int64_t i) const {
        const typename W::F x = W::load(master + i);
        const typename W::I word = W::bits(x);
        // A plain rounding would carry a NaN of all ones over into -0.0.
        const typename W::I quiet = W::or_bits(W::template down<16>(word), W::set_bits(0x40));
        W::store_u16(half + i, W::select_nan(x, quiet, half_of<W>(word)));
        W::store_u16(residual + i, W::select_nan(x, W::set_bits(0), word));
    }
};

struct Join {
    const uint16_t *half;
    const uint16_t *residual;
    float *master;
    template <class W>
    void at(int64_t i) const {
        W::store(master + i, join_master<W>(half + i, residual + i));
    }
};

template <class Src>
void widen(void *dst, const void *src, int64_t numel) {
    for_each_lane(Widen<Src>{static_cast<const uint16_t *>(src), static_cast<float *>(dst)}, numel);
}

template <class Narrow>
void narrow(void *dst, const void *src, int64_t numel) {
    for_each_lane(Narrow{static_cast<const float *>(src), static_cast<uint16_t *>(dst)}, numel);
}

void split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel) {
    for_each_lane(Split{master, half, residual}, numel);
}

void join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel) {
    for_each_lane(Join{half, residual, master}, numel);
}

constexpr ReduceTable kTable = {
    {{store_chunk<Fp32, Fp32>, store_chunk<Fp32, Bf16>, store_chunk<Fp32, Fp16>},
     {nullptr, store_chunk<Bf16, Bf16>, nullptr},
     {nullptr, nullptr, store_chunk<Fp16, Fp16>}},
    {{store_chunk<Fp32, Fp32, true>, store_chunk<Fp32, Bf16, true>, store_chunk<Fp32, Fp16, true>}},
    {sumsq_chunk<Fp32>, sumsq_chunk<Bf16>, sumsq_chunk<Fp16>},
    {{nullptr, widen<Bf16>, widen<Fp16>}, {narrow<NarrowBf16>}, {narrow<NarrowFp16>}},
    split,
    join,
};

}  // namespace
}  // namespace zo
