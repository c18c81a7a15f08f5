// The border: validate, call, turn every failure into a status and a message. No exception crosses.
#include "abi_checks.h"
#include "cpu/features.h"
#include "reduce/reduce.h"
#include "util/crc32c.h"
#include "util/kinds.h"

using zo::Buffer;
using zo::check_apart;
using zo::check_kind;
using zo::check_master;
using zo::check_pointer;
using zo::check_range;
using zo::check_size;
using zo::element_bytes;
using zo::fail;
using zo::guarded;

namespace {

// From src to dst, element by element. Only what overwrites an element by one of its size works in place.
int check_dst_src(const char *call, uint32_t mode, uint32_t dst_kind, const void *dst, uint32_t src_kind,
                  const void *src, int64_t numel) {
    if (numel == 0) return ZO_OK;
    if (dst == nullptr || src == nullptr) return fail(ZO_INVALID, "%s: a buffer is NULL", call);
    if (dst == src && dst_kind == src_kind && mode == ZO_OVERWRITE) return ZO_OK;
    const Buffer buffers[] = {{"dst", dst, element_bytes(dst_kind)}, {"src", src, element_bytes(src_kind)}};
    return check_apart(call, buffers, 0, numel);
}

}  // namespace

extern "C" {

int zo_abi(zo_abi_info *info) {
    ZO_CHECK(check_pointer("zo_abi", "info", info));
    ZO_CHECK(check_size("zo_abi", info->size, sizeof(*info)));
    *info = {sizeof(zo_abi_info), ZO_ABI_VERSION,       sizeof(zo_update_args),
             sizeof(zo_segment),  sizeof(zo_grad_args), sizeof(zo_io_config),
             sizeof(zo_io_block), sizeof(zo_io_result), sizeof(zo_io_stats_t)};
    return zo::check_isa_environment();
}

const char *zo_last_error(void) { return zo::last_error(); }

uint32_t zo_isa_supported_mask(void) { return zo::supported_isa_mask(); }

int zo_isa(void) { return zo::current_isa(); }

int zo_set_isa(int isa) { return zo::set_isa(isa); }

int zo_master_split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel,
                    uint32_t num_threads) {
    constexpr const char *call = "zo_master_split";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_master(call, master, half, residual, numel, num_threads));
        zo::master_split(master, half, residual, numel, num_threads);
        return ZO_OK;
    });
}

int zo_master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                   uint32_t num_threads) {
    constexpr const char *call = "zo_master_join";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_master(call, master, half, residual, numel, num_threads));
        zo::master_join(half, residual, master, numel, num_threads);
        return ZO_OK;
    });
}

int zo_convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
               uint32_t num_threads) {
    constexpr const char *call = "zo_convert";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_kind(call, "dst_kind", dst_kind));
        ZO_CHECK(check_kind(call, "src_kind", src_kind));
        ZO_CHECK(check_range(call, numel, num_threads));
        ZO_CHECK(check_dst_src(call, ZO_OVERWRITE, dst_kind, dst, src_kind, src, numel));
        return zo::convert(dst_kind, dst, src_kind, src, numel, num_threads);
    });
}

int zo_grad_store(zo_grad_args *args) {
    constexpr const char *call = "zo_grad_store";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_pointer(call, "args", args));
        ZO_CHECK(check_size(call, args->size, sizeof(*args)));
        ZO_CHECK(check_kind(call, "dst_kind", args->dst_kind));
        ZO_CHECK(check_kind(call, "src_kind", args->src_kind));
        ZO_CHECK(check_range(call, args->numel, args->num_threads));
        if (args->mode > ZO_ACCUMULATE) {
            return fail(ZO_INVALID, "%s: mode is %u, not 0 (overwrite) or 1 (accumulate)", call, args->mode);
        }
        ZO_CHECK(check_dst_src(call, args->mode, args->dst_kind, args->dst, args->src_kind, args->src,
                               args->numel));
        return zo::grad_store(args);
    });
}

int zo_sumsq(uint32_t kind, const void *values, int64_t numel, uint32_t num_threads, double *sumsq,
             int32_t *finite) {
    constexpr const char *call = "zo_sumsq";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_kind(call, "kind", kind));
        ZO_CHECK(check_range(call, numel, num_threads));
        if (numel > 0) ZO_CHECK(check_pointer(call, "values", values));
        ZO_CHECK(check_pointer(call, "sumsq", sumsq));
        ZO_CHECK(check_pointer(call, "finite", finite));
        zo::sum_of_squares(kind, values, numel, num_threads, sumsq, finite);
        return ZO_OK;
    });
}

uint32_t zo_crc32c(uint32_t seed, const void *data, uint64_t nbytes) {
    return zo::crc32c(seed, data, nbytes);
}

}  // extern "C"
