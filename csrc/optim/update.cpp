#include "optim/update.h"

#include <algorithm>
#include <vector>

#include "compact/compact.h"
#include "cpu/subnormals.h"
#include "optim/rules.inl"
#include "util/chunks.h"

namespace zo {
namespace {

const UpdateTable &table() {
#if ZO_X86
    if (current_isa() == ZO_ISA_AVX512) return update_avx512;
    if (current_isa() == ZO_ISA_AVX2) return update_avx2;
#elif ZO_ARM64
    if (current_isa() == ZO_ISA_NEON) return update_neon;
#endif
    return update_scalar;
}

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Random words number the elements of a section modulo 2^32; which turn it is is a part of their key.
void set_key(UpdateScalars &scalars, uint64_t seed, int64_t step, uint64_t turn) {
    const uint64_t key = mixed(mixed(mixed(seed) ^ uint64_t(step)) ^ turn);
    scalars.key[0] = uint32_t(key);
    scalars.key[1] = uint32_t(key >> 32);
}

UpdateKernel kernel_of(const zo_update_args &args) {
    const uint32_t rule = args.rule, value = args.value_kind, grad = args.grad_kind;
    if (args.state_format == ZO_STATES_COMPACT) return compact_table().update[rule][value][grad];
    if (args.state_format == ZO_STATES_BF16) return table().bf16[rule][value][grad];
    return table().fp32[rule][value][grad][args.value_out != nullptr];
}

}  // namespace

int num_states(uint32_t rule) { return kNumStates[rule]; }

void update(const zo_update_args &args) {
    const KeepSubnormals here;  // for the segments' scalars
    const UpdateKernel kernel = kernel_of(args);
    const auto origin = uint64_t(args.origin);
    UpdateBuffers buffers = {};
    buffers.value = args.value;
    buffers.residual = args.residual;
    buffers.master = args.master;
    std::copy_n(args.states, 3, buffers.states);
    std::copy_n(args.scales, 3, buffers.scales);
    buffers.grad = args.grad;
    buffers.value_out = args.value_out;
    buffers.origin = uint32_t(origin);

    // Segments laid end to end: chunks are cut from this line, so a thousand small segments share one region.
    // Blocks of codes stay whole: each segment takes whole ones of the line.
    const int64_t grain = args.state_format == ZO_STATES_COMPACT ? kBlock : 1;
    const auto num_segments = size_t(args.num_segments);
    std::vector<int64_t> first(num_segments + 1, 0);
    std::vector<UpdateScalars> scalars(num_segments);
    for (size_t s = 0; s < num_segments; ++s) {
        const int64_t numel = args.segments[s].end - args.segments[s].begin;
        first[s + 1] = first[s] + (numel + grain - 1) / grain * grain;
        scalars[s] = scalars_of(args.rule, args.segments[s]);
    }
    const int64_t total = first[num_segments];

    for_each_chunk(total, args.num_threads, [&](int64_t at, int64_t count) {
        const int64_t stop = at + count;
        auto s = size_t(std::upper_bound(first.begin(), first.end(), at) - first.begin()) - 1;
        while (at < stop) {
            const zo_segment &segment = args.segments[s];
            const int64_t shift = segment.begin - first[s];
            const uint64_t turn = (origin + uint64_t(at + shift)) >> 32;
            // How many elements this turn still has.
            const uint64_t left = ((turn + 1) << 32) - (origin + uint64_t(at + shift));
            const int64_t until =
                std::min({stop, first[s + 1], at + int64_t(std::min<uint64_t>(left, kChunk))});
            UpdateScalars mine = scalars[s];
            if (args.state_format != ZO_STATES_FP32) set_key(mine, args.seed, segment.step, turn);
            kernel(buffers, mine, at + shift, std::min(until + shift, segment.end));
            at = until;
            if (at == first[s + 1]) ++s;
        }
    });
}

}  // namespace zo
