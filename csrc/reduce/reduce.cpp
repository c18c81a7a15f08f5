#include "reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "util/chunks.h"
#include "util/kinds.h"
#include "util/status.h"

namespace zo {
namespace {

const ReduceTable &table() {
#if ZO_X86
    if (current_isa() == ZO_ISA_AVX512) return reduce_avx512;
    if (current_isa() == ZO_ISA_AVX2) return reduce_avx2;
#elif ZO_ARM64
    if (current_isa() == ZO_ISA_NEON) return reduce_neon;
#endif
    return reduce_scalar;
}

// body(begin, count) -> ChunkSum; see [Note: the tree].
template <class Body>
ChunkSum sum_chunks(int64_t numel, uint32_t num_threads, const Body &body) {
    std::vector<ChunkSum> sums(size_t(num_chunks(numel)), ChunkSum{});
    for_each_chunk(numel, num_threads,
                   [&](int64_t begin, int64_t count) { sums[size_t(begin / kChunk)] = body(begin, count); });
    ChunkSum total{};
    for (const ChunkSum &sum : sums) {
        total.sumsq += sum.sumsq;
        total.top = std::max(total.top, sum.top);
    }
    if (std::isnan(total.sumsq)) total.sumsq = std::numeric_limits<double>::quiet_NaN();
    return total;
}

bool is_finite(const ChunkSum &total) { return total.top < 0x7F800000u; }

}  // namespace

int grad_store(zo_grad_args *args) {
    const auto &kernels = args->mode == ZO_ACCUMULATE ? table().accumulate : table().store;
    const StoreKernel kernel = kernels[args->dst_kind][args->src_kind];
    if (kernel == nullptr) {
        return fail(ZO_UNSUPPORTED,
                    "gradients: dst kind %u from src kind %u in mode %u is not offered; use an fp32 dst",
                    args->dst_kind, args->src_kind, args->mode);
    }
    auto *dst = static_cast<char *>(args->dst);
    const auto *src = static_cast<const char *>(args->src);
    const int64_t dst_bytes = int64_t(element_bytes(args->dst_kind));
    const int64_t src_bytes = int64_t(element_bytes(args->src_kind));
    const ChunkSum total = sum_chunks(args->numel, args->num_threads, [&](int64_t begin, int64_t count) {
        return kernel(dst + begin * dst_bytes, src + begin * src_bytes, count);
    });
    args->sumsq = total.sumsq;
    args->finite = is_finite(total);
    return ZO_OK;
}

void sum_of_squares(uint32_t kind, const void *values, int64_t numel, uint32_t num_threads, double *sumsq,
                    int32_t *finite) {
    const SumKernel kernel = table().sumsq[kind];
    const auto *bytes = static_cast<const char *>(values);
    const ChunkSum total = sum_chunks(numel, num_threads, [&](int64_t begin, int64_t count) {
        return kernel(bytes + begin * int64_t(element_bytes(kind)), count);
    });
    *sumsq = total.sumsq;
    *finite = is_finite(total);
}

int convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
            uint32_t num_threads) {
    const ConvertKernel kernel = table().convert[dst_kind][src_kind];
    if (kernel == nullptr && dst_kind != src_kind) {
        return fail(ZO_UNSUPPORTED, "zo_convert: kind %u from kind %u is not offered; go through fp32",
                    dst_kind, src_kind);
    }
    const auto dst_bytes = int64_t(element_bytes(dst_kind)), src_bytes = int64_t(element_bytes(src_kind));
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        char *to = static_cast<char *>(dst) + begin * dst_bytes;
        const char *from = static_cast<const char *>(src) + begin * src_bytes;
        if (kernel != nullptr) {
            kernel(to, from, count);
        } else if (to != from) {
            std::memcpy(to, from, size_t(count * dst_bytes));
        }
    });
    return ZO_OK;
}

void master_split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel,
                  uint32_t num_threads) {
    const SplitKernel kernel = table().split;
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(master + begin, half + begin, residual + begin, count);
    });
}

void master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                 uint32_t num_threads) {
    const JoinKernel kernel = table().join;
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(half + begin, residual + begin, master + begin, count);
    });
}

}  // namespace zo
