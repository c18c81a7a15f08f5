// The update's loop, once, for whatever Vec was included before. Serial. A NaN is stored as 0x7FC00000
// whatever its origin.

#include "optim/masters.inl"
#include "optim/rules.inl"
#include "simd/random.inl"

namespace zo {
namespace {

// How a state rests in memory: whole, or rounded at random to bf16.
struct WholeStates {
    using Element = float;
    static constexpr bool kRandom = false;
    template <class W>
    static typename W::F load(const float *p) {
        return W::load(p);
    }
    template <class W>
    static void store(float *p, typename W::F x, typename W::I, int) {
        W::store(p, x);
    }
};

struct Bf16States {
    using Element = uint16_t;
    static constexpr bool kRandom = true;
    template <class W>
    static typename W::F load(const uint16_t *p) {
        return from_bf16<W>(p);
    }
    template <class W>
    static void store(uint16_t *p, typename W::F x, typename W::I random, int state) {
        W::store_u16(p, W::template down<16>(round_bf16_at_random<W>(x, bits_for_bf16<W>(random, state))));
    }
};

template <class W, class Rule, class States, class Master, class Grad>
inline void update_lanes(const UpdateBuffers &b, const Lanes<W> &c, const RandomWords<W> &random, int64_t i,
                         bool copy) {
    using F = typename W::F;
    const F g =
        W::mul(Grad::template load<W>(static_cast<const typename Grad::Element *>(b.grad) + i), c.grad_scale);
    F p = Master::template load<W>(b, i);
    F states[Rule::kStates + 1];  // see [Note: roots]
    const auto state = [&](int k) { return static_cast<typename States::Element *>(b.states[k]) + i; };
    for (int k = 0; k < Rule::kStates; ++k) states[k] = States::template load<W>(state(k));
    Rule::template step<W>(c, g, p, states);
    constexpr bool kRandom = States::kRandom && Rule::kStates > 0;
    const typename W::I word = kRandom ? random.at(random.indices(b.origin + uint32_t(i))) : W::set_bits(0);
    for (int k = 0; k < Rule::kStates; ++k) {
        States::template store<W>(state(k), canonical<W>(states[k]), word, k);
    }
    Master::template store<W>(b, i, canonical<W>(p), copy);
}

// With states in bf16 there is so much arithmetic per byte that every processor with wide vectors looks ahead
// too late.
template <class States>
inline bool asks_ahead_for() {
    return States::kRandom ? Vec::kLanes == 16 : asks_ahead();
}

// Elements: a kilobyte or two of each array.
template <class States>
constexpr int64_t kAhead = States::kRandom ? 256 : 512;

template <class Rule, class States, class Master, class Grad>
ZO_INLINED inline void fetch_ahead(const UpdateBuffers &b, int64_t i) {
    const int64_t next = i + kAhead<States>;
    for (int k = 0; k < Rule::kStates; ++k)
        __builtin_prefetch(static_cast<const typename States::Element *>(b.states[k]) + next);
    __builtin_prefetch(static_cast<const typename Grad::Element *>(b.grad) + next);
    Master::fetch(b, next);
}

// By value: as locals the pointers stay in registers whatever the stores may alias.
template <class Rule, class States, class Master, class Grad>
inline void update_range(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end,
                         bool copy) {
    int64_t i = begin;
    const bool ahead = asks_ahead_for<States>();
    const Lanes<Vec> wide(scalars);
    const RandomWords<Vec> wide_random(scalars.key);
    for (; i + Vec::kLanes <= end; i += Vec::kLanes) {
        if (ahead) fetch_ahead<Rule, States, Master, Grad>(buffers, i);
        update_lanes<Vec, Rule, States, Master, Grad>(buffers, wide, wide_random, i, copy);
    }
    const Lanes<ScalarVec> single(scalars);
    const RandomWords<ScalarVec> single_random(scalars.key);
    for (; i < end; ++i)
        update_lanes<ScalarVec, Rule, States, Master, Grad>(buffers, single, single_random, i, copy);
}

// With whole states no branch on an option is inside the loop; beside random words one is not seen.
template <class Rule, class Master, class Grad, bool kCopy>
void update_whole(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end) {
    update_range<Rule, WholeStates, Master, Grad>(buffers, scalars, begin, end, kCopy);
}

template <class Rule, class Master, class Grad>
void update_bf16(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end) {
    update_range<Rule, Bf16States, Master, Grad>(buffers, scalars, begin, end, buffers.value_out != nullptr);
}

// A table's rows: without and with a second copy; by gradient; by value; by rule.
#define ZO_COPIES(Rule, Master, Grad) \
    {update_whole<Rule, Master, Grad, false>, update_whole<Rule, Master, Grad, true>}
#define ZO_GRADS(Rule, Master) \
    {ZO_COPIES(Rule, Master, Fp32), ZO_COPIES(Rule, Master, Bf16), ZO_COPIES(Rule, Master, Fp16)}
#define ZO_WHOLE(Rule) \
    {ZO_GRADS(Rule, WholeMaster), ZO_GRADS(Rule, SplitMaster), ZO_GRADS(Rule, MasterBeside)}
#define ZO_BF16_GRADS(Rule, Master) \
    {update_bf16<Rule, Master, Fp32>, update_bf16<Rule, Master, Bf16>, update_bf16<Rule, Master, Fp16>}
#define ZO_BF16(Rule) \
    {ZO_BF16_GRADS(Rule, WholeMaster), ZO_BF16_GRADS(Rule, SplitMaster), ZO_BF16_GRADS(Rule, MasterBeside)}

constexpr UpdateTable kTable = {ZO_RULES(ZO_WHOLE), ZO_RULES(ZO_BF16)};

#undef ZO_BF16
#undef ZO_BF16_GRADS
#undef ZO_WHOLE
#undef ZO_GRADS
#undef ZO_COPIES

}  // namespace
}  // namespace zo
