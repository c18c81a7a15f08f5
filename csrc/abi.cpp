// The border: validate, call, turn every failure into a status and a message. No exception crosses.
#include "abi_checks.h"
#include "cpu/features.h"
#include "reduce/reduce.h"
#include "util/crc32c.h"

using zo::check_kind;
using zo::check_pointer;
using zo::check_range;
using zo::check_size;
using zo::fail;
using zo::guarded;

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
    return guarded("zo_master_split", [&]() -> int {
        ZO_CHECK(check_range("zo_master_split", numel, num_threads));
        if (numel > 0 && (master == nullptr || half == nullptr || residual == nullptr)) {
            return fail(ZO_INVALID, "zo_master_split: a buffer is NULL");
        }
        zo::master_split(master, half, residual, numel, num_threads);
        return ZO_OK;
    });
}

int zo_master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                   uint32_t num_threads) {
    return guarded("zo_master_join", [&]() -> int {
        ZO_CHECK(check_range("zo_master_join", numel, num_threads));
        if (numel > 0 && (master == nullptr || half == nullptr || residual == nullptr)) {
            return fail(ZO_INVALID, "zo_master_join: a buffer is NULL");
        }
        zo::master_join(half, residual, master, numel, num_threads);
        return ZO_OK;
    });
}

int zo_convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
               uint32_t num_threads) {
    return guarded("zo_convert", [&]() -> int {
        ZO_CHECK(check_kind("zo_convert", "dst_kind", dst_kind));
        ZO_CHECK(check_kind("zo_convert", "src_kind", src_kind));
        ZO_CHECK(check_range("zo_convert", numel, num_threads));
        if (numel > 0 && (dst == nullptr || src == nullptr))
            return fail(ZO_INVALID, "zo_convert: a buffer is NULL");
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
        if (args->numel > 0 && (args->dst == nullptr || args->src == nullptr)) {
            return fail(ZO_INVALID, "%s: a buffer is NULL", call);
        }
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
