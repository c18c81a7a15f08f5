// The update's loop, once, for whatever Vec was included before. Serial; no branch on an option inside the
// loop. A NaN is stored as 0x7FC00000 whatever its origin.

#include "optim/rules.inl"
#include "simd/elements.inl"

namespace zo {
namespace {

// Where the fp32 master lives: in one fp32 array, in a bf16 half and a residual, or beside its fp16 copy.
struct WholeMaster {
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return W::load(static_cast<const float *>(b.value) + i);
    }
    template <class W, bool kCopy>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p) {
        W::store(static_cast<float *>(b.value) + i, p);
        if (kCopy) W::store(static_cast<float *>(b.value_out) + i, p);
    }
};

struct SplitMaster {
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return join_master<W>(static_cast<const uint16_t *>(b.value) + i, b.residual + i);
    }
    template <class W, bool kCopy>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p) {
        const typename W::I half = half_of<W>(W::bits(p));
        W::store_u16(static_cast<uint16_t *>(b.value) + i, half);
        W::store_u16(b.residual + i, W::bits(p));
        if (kCopy) W::store_u16(static_cast<uint16_t *>(b.value_out) + i, half);
    }
};

struct MasterBeside {
    template <class W>
    static typename W::F load(const UpdateBuffers &b, int64_t i) {
        return W::load(b.master + i);
    }
    template <class W, bool kCopy>
    static void store(const UpdateBuffers &b, int64_t i, typename W::F p) {
        W::store(b.master + i, p);
        W::store_f16(static_cast<uint16_t *>(b.value) + i, p);
        if (kCopy) W::store_f16(static_cast<uint16_t *>(b.value_out) + i, p);
    }
};

template <class W, class Rule, class Master, class Grad, bool kCopy>
inline void update_lanes(const UpdateBuffers &b, const Lanes<W> &c, int64_t i) {
    using F = typename W::F;
    const F g =
        W::mul(Grad::template load<W>(static_cast<const typename Grad::Element *>(b.grad) + i), c.grad_scale);
    F p = Master::template load<W>(b, i);
    F states[Rule::kStates + 1];  // one more, as there are rules without any
    for (int k = 0; k < Rule::kStates; ++k) states[k] = W::load(b.states[k] + i);
    Rule::template step<W>(c, g, p, states);
    for (int k = 0; k < Rule::kStates; ++k) W::store(b.states[k] + i, canonical<W>(states[k]));
    Master::template store<W, kCopy>(b, i, canonical<W>(p));
}

// By value: as locals the pointers stay in registers whatever the stores may alias.
template <class Rule, class Master, class Grad, bool kCopy>
void update_range(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end) {
    int64_t i = begin;
    const Lanes<Vec> wide(scalars);
    for (; i + Vec::kLanes <= end; i += Vec::kLanes)
        update_lanes<Vec, Rule, Master, Grad, kCopy>(buffers, wide, i);
    const Lanes<ScalarVec> single(scalars);
    for (; i < end; ++i) update_lanes<ScalarVec, Rule, Master, Grad, kCopy>(buffers, single, i);
}

// A table's rows: without and with a second copy; by gradient; by value.
#define ZO_COPIES(Rule, Master, Grad) \
    {update_range<Rule, Master, Grad, false>, update_range<Rule, Master, Grad, true>}
#define ZO_GRADS(Rule, Master) \
    {ZO_COPIES(Rule, Master, Fp32), ZO_COPIES(Rule, Master, Bf16), ZO_COPIES(Rule, Master, Fp16)}
#define ZO_VALUES(Rule) \
    {ZO_GRADS(Rule, WholeMaster), ZO_GRADS(Rule, SplitMaster), ZO_GRADS(Rule, MasterBeside)}

using AdamW = AdamRule<Decay::kDecoupled, false>;
using AdamWAmsgrad = AdamRule<Decay::kDecoupled, true>;
using Adam = AdamRule<Decay::kL2, false>;
using AdamAmsgrad = AdamRule<Decay::kL2, true>;
using Sgd = SgdRule<Momentum::kNone>;
using SgdMomentum = SgdRule<Momentum::kPlain>;
using SgdNesterov = SgdRule<Momentum::kNesterov>;

// In the order of zo_rule.
constexpr UpdateTable kTable = {{ZO_VALUES(AdamW), ZO_VALUES(AdamWAmsgrad), ZO_VALUES(Adam),
                                 ZO_VALUES(AdamAmsgrad), ZO_VALUES(AdagradRule), ZO_VALUES(LionRule),
                                 ZO_VALUES(Sgd), ZO_VALUES(SgdMomentum), ZO_VALUES(SgdNesterov)}};

#undef ZO_VALUES
#undef ZO_GRADS
#undef ZO_COPIES

}  // namespace
}  // namespace zo
