#include "compact/compact.h"

#include "reduce/reduce.h"
#include "util/chunks.h"

namespace zo {
namespace {

static_assert(kChunk % kBlock == 0);  // no block is cut: neither here nor by an update

uint32_t kind_of(uint32_t format) { return format == ZO_STATES_BF16 ? ZO_BF16 : ZO_FP32; }

}  // namespace

const CompactTable &compact_table() {
#if ZO_X86
    if (current_isa() == ZO_ISA_AVX512) return compact_avx512;
    if (current_isa() == ZO_ISA_AVX2) return compact_avx2;
#elif ZO_ARM64
    if (current_isa() == ZO_ISA_NEON) return compact_neon;
#endif
    return compact_scalar;
}

int states_decode(uint32_t format, bool is_signed, const void *states, const float *scales, float *x,
                  int64_t numel, uint32_t num_threads) {
    if (format != ZO_STATES_COMPACT) return convert(ZO_FP32, x, kind_of(format), states, numel, num_threads);
    const DecodeKernel kernel = compact_table().decode[is_signed];
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(static_cast<const uint8_t *>(states) + begin, scales + begin / kBlock, x + begin, count);
    });
    return ZO_OK;
}

int states_encode(uint32_t format, bool is_signed, const float *x, void *states, float *scales, int64_t numel,
                  uint32_t num_threads) {
    if (format != ZO_STATES_COMPACT) return convert(kind_of(format), states, ZO_FP32, x, numel, num_threads);
    const EncodeKernel kernel = compact_table().encode[is_signed];
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(x + begin, static_cast<uint8_t *>(states) + begin, scales + begin / kBlock, count);
    });
    return ZO_OK;
}

void short_master_split(const float *master, uint16_t *half, uint8_t *residual, int64_t numel,
                        uint32_t num_threads) {
    const ShortSplitKernel kernel = compact_table().split;
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(master + begin, half + begin, residual + begin, count);
    });
}

void short_master_join(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel,
                       uint32_t num_threads) {
    const ShortJoinKernel kernel = compact_table().join;
    for_each_chunk(numel, num_threads, [&](int64_t begin, int64_t count) {
        kernel(half + begin, residual + begin, master + begin, count);
    });
}

}  // namespace zo
