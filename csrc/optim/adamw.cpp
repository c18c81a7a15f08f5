#include "optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "util/parallel.h"

namespace zo {
namespace {

// Elements per parallel chunk: about 400 KiB of traffic, far above the cost of taking a chunk.
constexpr int64_t kChunk = 16384;

const AdamwTable &table() {
#if ZO_X86
    if (current_isa() == ZO_ISA_AVX512) return adamw_avx512;
    if (current_isa() == ZO_ISA_AVX2) return adamw_avx2;
#endif
    return adamw_scalar;
}

AdamwScalars scalars_of(const zo_adamw_segment &s) {
    const double bias1 = 1.0 - std::pow(s.beta1, double(s.step));
    const double bias2 = 1.0 - std::pow(s.beta2, double(s.step));
    return {float(s.grad_scale),  float(1.0 - s.lr * s.weight_decay),
            float(1.0 - s.beta1), float(s.beta2),
            float(1.0 - s.beta2), float(1.0 / std::sqrt(bias2)),
            float(s.eps),         float(-(s.lr / bias1))};
}

}  // namespace

void adamw_update(const zo_adamw_args &args) {
    const AdamwKernel kernel = table().kernel[args.value_kind][args.grad_kind][args.value_out != nullptr];
    const AdamwBuffers buffers = {args.value,      args.residual, args.master,   args.exp_avg,
                                  args.exp_avg_sq, args.grad,     args.value_out};

    // Segments laid end to end: chunks are cut from this line, so a thousand small segments share one region.
    const auto num_segments = size_t(args.num_segments);
    std::vector<int64_t> first(num_segments + 1, 0);
    std::vector<AdamwScalars> scalars(num_segments);
    for (size_t s = 0; s < num_segments; ++s) {
        first[s + 1] = first[s] + (args.segments[s].end - args.segments[s].begin);
        scalars[s] = scalars_of(args.segments[s]);
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
