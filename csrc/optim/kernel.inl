// The AdamW math, once, for whatever Vec was included before. Serial; no branch on an option inside the loop.
//
// [Note: rounding] Each line is one IEEE operation per call, rounded once; `fma` is the only fused one.
//     g = grad * grad_scale
//     p = p * decay
//     m = fma(1 - beta1, g - m, m)
//     v = fma(beta2, v, (1 - beta2) * (g * g))
//     d = fma(sqrt(v), 1 / sqrt(1 - beta2^t), eps)
//     p = fma(-lr / (1 - beta1^t), m / d, p)
// The parenthesised constants come rounded to float. A NaN is stored as 0x7FC00000 whatever its
// origin. A port that keeps this list returns the same bits.

#include "optim/adamw.h"
#include "simd/elements.inl"

namespace zo {
namespace {

template <class W>
struct Lanes {
    using F = typename W::F;
    explicit Lanes(const AdamwScalars &s)
        : grad_scale(W::set(s.grad_scale)),
          decay(W::set(s.decay)),
          one_minus_beta1(W::set(s.one_minus_beta1)),
          beta2(W::set(s.beta2)),
          one_minus_beta2(W::set(s.one_minus_beta2)),
          inv_sqrt_bias2(W::set(s.inv_sqrt_bias2)),
          eps(W::set(s.eps)),
          neg_step_size(W::set(s.neg_step_size)) {}
    F grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, neg_step_size;
};

// Where the fp32 master lives: in one fp32 array, in a bf16 half and a residual, or beside its fp16 copy.
struct WholeMaster {
    template <class W>
    static typename W::F load(const AdamwBuffers &b, int64_t i) {
        return W::load(static_cast<const float *>(b.value) + i);
    }
    template <class W, bool kCopy>
    static void store(const AdamwBuffers &b, int64_t i, typename W::F p) {
        W::store(static_cast<float *>(b.value) + i, p);
        if (kCopy) W::store(static_cast<float *>(b.value_out) + i, p);
    }
};

struct SplitMaster {
    template <class W>
    static typename W::F load(const AdamwBuffers &b, int64_t i) {
        return join_master<W>(static_cast<const uint16_t *>(b.value) + i, b.residual + i);
    }
    template <class W, bool kCopy>
    static void store(const AdamwBuffers &b, int64_t i, typename W::F p) {
        const typename W::I half = half_of<W>(W::bits(p));
        W::store_u16(static_cast<uint16_t *>(b.value) + i, half);
        W::store_u16(b.residual + i, W::bits(p));
        if (kCopy) W::store_u16(static_cast<uint16_t *>(b.value_out) + i, half);
    }
};

struct MasterBeside {
    template <class W>
    static typename W::F load(const AdamwBuffers &b, int64_t i) {
        return W::load(b.master + i);
    }
    template <class W, bool kCopy>
    static void store(const AdamwBuffers &b, int64_t i, typename W::F p) {
        W::store(b.master + i, p);
        W::store_f16(static_cast<uint16_t *>(b.value) + i, p);
        if (kCopy) W::store_f16(static_cast<uint16_t *>(b.value_out) + i, p);
    }
};

template <class W, class Master, class Grad, bool kCopy>
inline void update_lanes(const AdamwBuffers &b, const Lanes<W> &c, int64_t i) {
    using F = typename W::F;
    const F g =
        W::mul(Grad::template load<W>(static_cast<const typename Grad::Element *>(b.grad) + i), c.grad_scale);
    F p = Master::template load<W>(b, i);
    F m = W::load(b.exp_avg + i);
    F v = W::load(b.exp_avg_sq + i);

    p = W::mul(p, c.decay);
    m = W::fma(c.one_minus_beta1, W::sub(g, m), m);
    v = W::fma(c.beta2, v, W::mul(c.one_minus_beta2, W::mul(g, g)));
    const F denominator = W::fma(W::sqrt(v), c.inv_sqrt_bias2, c.eps);
    p = W::fma(c.neg_step_size, W::div(m, denominator), p);

    W::store(b.exp_avg + i, canonical<W>(m));
    W::store(b.exp_avg_sq + i, canonical<W>(v));
    Master::template store<W, kCopy>(b, i, canonical<W>(p));
}

// By value: as locals the pointers stay in registers whatever the stores may alias.
template <class Master, class Grad, bool kCopy>
void update_range(AdamwBuffers buffers, AdamwScalars scalars, int64_t begin, int64_t end) {
    int64_t i = begin;
    const Lanes<Vec> wide(scalars);
    for (; i + Vec::kLanes <= end; i += Vec::kLanes) update_lanes<Vec, Master, Grad, kCopy>(buffers, wide, i);
    const Lanes<ScalarVec> single(scalars);
    for (; i < end; ++i) update_lanes<ScalarVec, Master, Grad, kCopy>(buffers, single, i);
}

// Without and with a second copy, for a table's row.
#define ZO_UPDATE(Master, Grad) {update_range<Master, Grad, false>, update_range<Master, Grad, true>}

constexpr AdamwTable kTable = {{
    {ZO_UPDATE(WholeMaster, Fp32), ZO_UPDATE(WholeMaster, Bf16), ZO_UPDATE(WholeMaster, Fp16)},
    {ZO_UPDATE(SplitMaster, Fp32), ZO_UPDATE(SplitMaster, Bf16), ZO_UPDATE(SplitMaster, Fp16)},
    {ZO_UPDATE(MasterBeside, Fp32), ZO_UPDATE(MasterBeside, Bf16), ZO_UPDATE(MasterBeside, Fp16)},
}};

#undef ZO_UPDATE

}  // namespace
}  // namespace zo
