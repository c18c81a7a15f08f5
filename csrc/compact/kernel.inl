// Updates over states in codes, and the conversions of the compact format, once, for whatever Vec was
// included before. Serial. A block is updated in two passes, since its scale is known when its last value is.
// Numbers between them stay in the first-level cache.

#include "compact/blocks.inl"
#include "optim/masters.inl"
#include "optim/rules.inl"

namespace zo {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct BetweenPasses {
    alignas(64) float kept[3][kBlock];
    alignas(64) float words[kBlock];  // random, by their bits
    Scale scale[3];
};

// Numbers that are the same for all elements of a block. Lane by lane it has the bits of the largest
// magnitudes kept, and the number of the next element.
template <class W>
struct BlockLanes {
    BlockLanes(const UpdateBuffers &b, const UpdateScalars &scalars, int num_states, int64_t first)
        : constants(scalars), random(scalars.key), index(random.indices(b.origin + uint32_t(first))) {
        for (int k = 0; k < num_states; ++k) {
            scale[k] = W::set(b.scales[k][first / kBlock]);
            top[k] = W::set_bits(0);
        }
    }
    const Lanes<W> constants;
    const RandomWords<W> random;
    typename W::F scale[3];
    typename W::I top[3];
    typename W::I index;
};

// `i` counts elements of the buffers, `at` those of the block.
template <class W, class Rule, class Master, class Grad>
inline void step_lanes(const UpdateBuffers &b, BlockLanes<W> &lanes, BetweenPasses &between, int64_t i,
                       int64_t at) {
    using F = typename W::F;
    const F g = W::mul(Grad::template load<W>(static_cast<const typename Grad::Element *>(b.grad) + i),
                       lanes.constants.grad_scale);
    F p = Master::template load<W>(b, i);
    F states[Rule::kStates + 1];  // see [Note: roots]
    for (int k = 0; k < Rule::kStates; ++k) {
        const auto *codes = static_cast<const uint8_t *>(b.states[k]) + i;
        states[k] = k < Rule::kSigned ? decode_lanes<W, true>(codes, lanes.scale[k])
                                      : decode_lanes<W, false>(codes, lanes.scale[k]);
    }
    Rule::template step<W>(lanes.constants, g, p, states);
    const typename W::I word = lanes.random.at(lanes.index);
    lanes.index = W::add_bits(lanes.index, W::set_bits(W::kLanes));
    if (Rule::kStates > 0) W::store(between.words + at, W::from_bits(word));
    for (int k = 0; k < Rule::kStates; ++k) {
        F kept = states[k];
        if (k >= Rule::kSigned) kept = magnitude<W>(k + 1 == Rule::kStates ? states[k + 1] : W::sqrt(kept));
        W::store(between.kept[k] + at, kept);
        lanes.top[k] = W::max_bits(lanes.top[k], W::bits(magnitude<W>(kept)));
    }
    p = canonical<W>(p);
    Master::template store<W>(b, i, Master::kShort ? round_to_24_bits_at_random<W>(p, word) : p,
                              b.value_out != nullptr);
}

// The first pass over `count` elements from `first` on, at most a block.
template <class Rule, class Master, class Grad>
inline void step_block(const UpdateBuffers &b, const UpdateScalars &scalars, BetweenPasses &between,
                       int64_t first, int64_t count) {
    const int64_t in_vectors = count / Vec::kLanes * Vec::kLanes;
    BlockLanes<Vec> wide(b, scalars, Rule::kStates, first);
    for (int64_t at = 0; at < in_vectors; at += Vec::kLanes)
        step_lanes<Vec, Rule, Master, Grad>(b, wide, between, first + at, at);
    BlockLanes<ScalarVec> single(b, scalars, Rule::kStates, first);
    single.index += uint32_t(in_vectors);
    for (int64_t at = in_vectors; at < count; ++at)
        step_lanes<ScalarVec, Rule, Master, Grad>(b, single, between, first + at, at);
    for (int k = 0; k < Rule::kStates; ++k) {
        const uint32_t top = ScalarVec::max_bits(Vec::max_lane(wide.top[k]), single.top[k]);
        between.scale[k] = k < Rule::kSigned ? scale_of<true>(top) : scale_of<false>(top);
    }
}

// The second pass.
template <class Rule>
inline void encode_states(const UpdateBuffers &b, const BetweenPasses &between, int64_t first,
                          int64_t count) {
    for (int k = 0; k < Rule::kStates; ++k) {
        auto *codes = static_cast<uint8_t *>(b.states[k]) + first;
        const RandomEdge edge{between.words, k};
        b.scales[k][first / kBlock] = between.scale[k].scale;
        if (k < Rule::kSigned) {
            encode_block<true>(between.kept[k], between.scale[k], codes, count, edge);
        } else {
            encode_block<false>(between.kept[k], between.scale[k], codes, count, edge);
        }
    }
}

// By value: as locals the pointers stay in registers whatever the stores may alias. The second pass is one
// block behind the first: a scale is ready when it is asked for.
template <class Rule, class Master, class Grad>
void update_blocks(UpdateBuffers buffers, UpdateScalars scalars, int64_t begin, int64_t end) {
    BetweenPasses between[2];
    BetweenPasses *now = &between[0], *before = &between[1];
    int64_t first = begin;
    for (; first < end; first += kBlock) {
        step_block<Rule, Master, Grad>(buffers, scalars, *now, first, smaller(kBlock, end - first));
        if (first > begin) encode_states<Rule>(buffers, *before, first - kBlock, kBlock);
        BetweenPasses *other = before;
        before = now;
        now = other;
    }
    if (begin < end) encode_states<Rule>(buffers, *before, first - kBlock, end - (first - kBlock));
}

template <bool kSigned>
struct Decode {
    const uint8_t *codes;
    float scale;
    float *x;
    template <class W>
    void at(int64_t i) const {
        W::store(x + i, canonical<W>(decode_lanes<W, kSigned>(codes + i, W::set(scale))));
    }
};

template <bool kSigned>
void decode(const uint8_t *codes, const float *scales, float *x, int64_t numel) {
    for (int64_t first = 0; first < numel; first += kBlock) {
        const Decode<kSigned> each{codes + first, scales[first / kBlock], x + first};
        for_each_lane(each, smaller(kBlock, numel - first));
    }
}

template <bool kSigned>
struct Keep {
    const float *x;
    float *kept;
    template <class W>
    void at(int64_t i) const {
        const typename W::F value = W::load(x + i);
        W::store(kept + i, kSigned ? value : magnitude<W>(W::sqrt(value)));
    }
};

template <bool kSigned>
void encode(const float *x, uint8_t *codes, float *scales, int64_t numel) {
    alignas(64) float kept[kBlock];
    for (int64_t first = 0; first < numel; first += kBlock) {
        const int64_t count = smaller(kBlock, numel - first);
        for_each_lane(Keep<kSigned>{x + first, kept}, count);
        uint32_t top = 0;
        for (int64_t i = 0; i < count; ++i) {
            top = ScalarVec::max_bits(top, ScalarVec::bits(kept[i]) & kMagnitude);
        }
        const Scale made = scale_of<kSigned>(top);
        scales[first / kBlock] = made.scale;
        encode_block<kSigned>(kept, made, codes + first, count, MiddleEdge{});
    }
}

struct ShortSplit {
    const float *master;
    uint16_t *half;
    uint8_t *residual;
    template <class W>
    void at(int64_t i) const {
        const typename W::I word = W::bits(canonical<W>(W::load(master + i)));
        const typename W::I rounded =
            W::and_bits(W::add_bits(word, W::set_bits(0x80)), W::set_bits(0xFFFFFF00u));
        W::store_u16(half + i, half_of<W>(rounded));
        W::store_u8(residual + i, W::template down<8>(rounded));
    }
};

struct ShortJoin {
    const uint16_t *half;
    const uint8_t *residual;
    float *master;
    template <class W>
    void at(int64_t i) const {
        W::store(master + i, join_short_master<W>(half + i, residual + i));
    }
};

void split(const float *master, uint16_t *half, uint8_t *residual, int64_t numel) {
    for_each_lane(ShortSplit{master, half, residual}, numel);
}

void join(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel) {
    for_each_lane(ShortJoin{half, residual, master}, numel);
}

// A table's rows: by gradient; by value; by rule.
#define ZO_GRADS(Rule, Master) \
    {update_blocks<Rule, Master, Fp32>, update_blocks<Rule, Master, Bf16>, update_blocks<Rule, Master, Fp16>}
#define ZO_VALUES(Rule) \
    {ZO_GRADS(Rule, WholeMaster), ZO_GRADS(Rule, ShortSplitMaster), ZO_GRADS(Rule, MasterBeside)}

constexpr CompactTable kCompactTable = {
    ZO_RULES(ZO_VALUES), {decode<false>, decode<true>}, {encode<false>, encode<true>}, split, join,
};

#undef ZO_VALUES
#undef ZO_GRADS

}  // namespace
}  // namespace zo
