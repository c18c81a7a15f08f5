#include "optim/update.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "util/parallel.h"

namespace zo {
namespace {

// Elements per parallel chunk: about 400 KiB of traffic, far above the cost of taking a chunk.
constexpr int64_t kChunk = 16384;

const UpdateTable &table() {
#if ZO_X86
    if (current_isa() == ZO_ISA_AVX512) return update_avx512;
    if (current_isa() == ZO_ISA_AVX2) return update_avx2;
#elif ZO_ARM64
    if (current_isa() == ZO_ISA_NEON) return update_neon;
#endif
    return update_scalar;
}

double step_size(uint32_t rule, const zo_segment &s) {
    if (rule <= ZO_ADAM_AMSGRAD) return s.lr / (1.0 - std::pow(s.beta1, double(s.step)));
    if (rule == ZO_ADAGRAD) return s.lr / (1.0 + double(s.step - 1) * s.beta1);
    return s.lr;
}

UpdateScalars scalars_of(uint32_t rule, const zo_segment &s) {
    const double bias2 = 1.0 - std::pow(s.beta2, double(s.step));
    UpdateScalars c;
    c.grad_scale = float(s.grad_scale);
    c.decay = float(1.0 - s.lr * s.weight_decay);
    c.l2 = float(s.weight_decay);
    c.beta1 = float(s.beta1);
    c.beta2 = float(s.beta2);
    c.one_minus_beta1 = float(1.0 - s.beta1);
    c.one_minus_beta2 = float(1.0 - s.beta2);
    c.inv_sqrt_bias2 = float(1.0 / std::sqrt(bias2));
    c.eps = float(s.eps);
    c.neg_step_size = float(-step_size(rule, s));
    c.grad_share = s.step == 1 ? 1.0f : float(1.0 - s.beta2);
    return c;
}

}  // namespace

int num_states(uint32_t rule) {
    constexpr int kCounts[ZO_NUM_RULES] = {2, 3, 2, 3, 1, 1, 0, 1, 1};
    return kCounts[rule];
}

void update(const zo_update_args &args) {
    const UpdateKernel kernel =
        table().kernel[args.rule][args.value_kind][args.grad_kind][args.value_out != nullptr];
    const UpdateBuffers buffers = {args.value,  args.residual,
                                   args.master, {args.states[0], args.states[1], args.states[2]},
                                   args.grad,   args.value_out};

    // Segments laid end to end: chunks are cut from this line, so a thousand small segments share one region.
    const auto num_segments = size_t(args.num_segments);
    std::vector<int64_t> first(num_segments + 1, 0);
    std::vector<UpdateScalars> scalars(num_segments);
    for (size_t s = 0; s < num_segments; ++s) {
        first[s + 1] = first[s] + (args.segments[s].end - args.segments[s].begin);
        scalars[s] = scalars_of(args.rule, args.segments[s]);
    }
    const int64_t total = first[num_segments];

    parallel_chunks((total + kChunk - 1) / kChunk, args.num_threads, [&](int64_t chunk) {
        int64_t at = chunk * kChunk;
        const int64_t stop = std::min(at + kChunk, total);
        auto s = size_t(std::upper_bound(first.begin(), first.end(), at) - first.begin()) - 1;
        for (; at < stop; ++s) {
            const int64_t until = std::min(stop, first[s + 1]);
            const int64_t shift = args.segments[s].begin - first[s];
            kernel(buffers, scalars[s], at + shift, until + shift);
            at = until;
        }
    });
}

}  // namespace zo
