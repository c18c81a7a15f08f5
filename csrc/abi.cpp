// The border: validate, call, turn every failure into a status and a message. No exception crosses.
#include "abi_checks.h"
#include "cpu/features.h"
#include "optim/update.h"
#include "reduce/reduce.h"
#include "util/crc32c.h"

namespace {

using zo::check_pointer;
using zo::check_size;
using zo::fail;
using zo::guarded;

constexpr uint32_t kMaxThreads = 1024;

int check_range(const char *call, int64_t numel, uint32_t num_threads) {
    if (numel < 0) return fail(ZO_INVALID, "%s: numel is %lld, not 0 or more", call, (long long)numel);
    if (num_threads < 1 || num_threads > kMaxThreads) {
        return fail(ZO_INVALID, "%s: num_threads is %u, not 1 to %u", call, num_threads, kMaxThreads);
    }
    return ZO_OK;
}

int check_kind(const char *call, const char *name, uint32_t kind) {
    if (kind < ZO_NUM_KINDS) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is %u, not 0 (fp32), 1 (bf16) or 2 (fp16)", call, name, kind);
}

int check_segments(const char *call, const zo_update_args &args) {
    int64_t previous_end = 0;
    for (int64_t s = 0; s < args.num_segments; ++s) {
        const zo_segment &segment = args.segments[s];
        if (segment.begin < previous_end || segment.end < segment.begin) {
            return fail(ZO_INVALID, "%s: segment %lld is [%lld, %lld) after one that ends at %lld; sort them",
                        call, (long long)s, (long long)segment.begin, (long long)segment.end,
                        (long long)previous_end);
        }
        if (segment.step < 1) {
            return fail(ZO_INVALID, "%s: segment %lld has step %lld; the first step is 1", call, (long long)s,
                        (long long)segment.step);
        }
        previous_end = segment.end;
    }
    return ZO_OK;
}

struct Buffer {
    const char *name;
    const void *address;
    size_t element_bytes;
};

// No element of one buffer may lie in another: the pass would read what it has just written.
template <size_t kCount>
int check_apart(const char *call, const Buffer (&buffers)[kCount], int64_t begin, int64_t end) {
    const auto first = [begin](const Buffer &b) {
        return uintptr_t(b.address) + b.element_bytes * size_t(begin);
    };
    const auto last = [end](const Buffer &b) { return uintptr_t(b.address) + b.element_bytes * size_t(end); };
    for (size_t i = 0; i < kCount; ++i) {
        for (size_t j = i + 1; j < kCount; ++j) {
            const Buffer &a = buffers[i], &b = buffers[j];
            if (a.address == nullptr || b.address == nullptr || last(a) <= first(b) || last(b) <= first(a))
                continue;
            return fail(ZO_INVALID, "%s: %s and %s overlap; give each memory of its own", call, a.name,
                        b.name);
        }
    }
    return ZO_OK;
}

size_t element_bytes(uint32_t kind) { return kind == ZO_FP32 ? sizeof(float) : sizeof(uint16_t); }

int check_update(const char *call, const zo_update_args &args) {
    if (args.rule >= ZO_NUM_RULES) {
        return fail(ZO_INVALID, "%s: rule is %u, not 0 to %d", call, args.rule, ZO_NUM_RULES - 1);
    }
    ZO_CHECK(check_kind(call, "value_kind", args.value_kind));
    ZO_CHECK(check_kind(call, "grad_kind", args.grad_kind));
    ZO_CHECK(check_range(call, args.num_segments, args.num_threads));
    if (args.num_segments == 0) return ZO_OK;
    ZO_CHECK(check_pointer(call, "segments", args.segments));
    ZO_CHECK(check_segments(call, args));
    ZO_CHECK(check_pointer(call, "value", args.value));
    if (args.value_kind == ZO_BF16) ZO_CHECK(check_pointer(call, "residual of a bf16 value", args.residual));
    if (args.value_kind == ZO_FP16) ZO_CHECK(check_pointer(call, "master of an fp16 value", args.master));
    constexpr const char *kStates[] = {"the first state", "the second state", "the third state"};
    const int num_states = zo::num_states(args.rule);
    for (int k = 0; k < num_states; ++k) ZO_CHECK(check_pointer(call, kStates[k], args.states[k]));
    ZO_CHECK(check_pointer(call, "grad", args.grad));
    const size_t value_bytes = element_bytes(args.value_kind);
    const Buffer buffers[] = {
        {"value", args.value, value_bytes},
        {"value_out", args.value_out, value_bytes},
        {"grad", args.grad, element_bytes(args.grad_kind)},
        {"residual", args.value_kind == ZO_BF16 ? args.residual : nullptr, sizeof(uint16_t)},
        {"master", args.value_kind == ZO_FP16 ? args.master : nullptr, sizeof(float)},
        {kStates[0], num_states > 0 ? args.states[0] : nullptr, sizeof(float)},
        {kStates[1], num_states > 1 ? args.states[1] : nullptr, sizeof(float)},
        {kStates[2], num_states > 2 ? args.states[2] : nullptr, sizeof(float)},
    };
    return check_apart(call, buffers, args.segments[0].begin, args.segments[args.num_segments - 1].end);
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

int zo_update(const zo_update_args *args) {
    constexpr const char *call = "zo_update";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_pointer(call, "args", args));
        ZO_CHECK(check_size(call, args->size, sizeof(*args)));
        ZO_CHECK(check_update(call, *args));
        zo::update(*args);
        return ZO_OK;
    });
}

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
