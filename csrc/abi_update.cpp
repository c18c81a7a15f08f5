// The border's functions of the updates and of what they keep.
#include "abi_checks.h"
#include "compact/compact.h"
#include "optim/update.h"
#include "util/kinds.h"

namespace {

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

int check_segments(const char *call, const zo_update_args &args) {
    int64_t previous_end = 0;
    for (int64_t s = 0; s < args.num_segments; ++s) {
        const zo_segment &segment = args.segments[s];
        if (segment.begin < previous_end || segment.end < segment.begin) {
            return fail(ZO_INVALID, "%s: segment %lld is [%lld, %lld) after one that ends at %lld; sort them",
                        call, (long long)s, (long long)segment.begin, (long long)segment.end,
                        (long long)previous_end);
        }
        if (args.state_format == ZO_STATES_COMPACT && segment.begin % ZO_STATE_BLOCK != 0) {
            return fail(
                ZO_INVALID,
                "%s: segment %lld begins at %lld; beside compact states it begins at a multiple of %d", call,
                (long long)s, (long long)segment.begin, ZO_STATE_BLOCK);
        }
        if (segment.step < 1) {
            return fail(ZO_INVALID, "%s: segment %lld has step %lld; the first step is 1", call, (long long)s,
                        (long long)segment.step);
        }
        previous_end = segment.end;
    }
    return ZO_OK;
}

int check_format(const char *call, const char *name, uint32_t format) {
    if (format < ZO_NUM_STATE_FORMATS) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is %u, not 0 (fp32), 1 (bf16) or 2 (compact)", call, name, format);
}

int check_origin(const char *call, const zo_update_args &args) {
    const int64_t grain = args.state_format == ZO_STATES_COMPACT ? ZO_STATE_BLOCK : 1;
    if (args.origin >= 0 && args.origin % grain == 0) return ZO_OK;
    return fail(ZO_INVALID, "%s: origin is %lld, not 0 or a multiple of %lld", call, (long long)args.origin,
                (long long)grain);
}

constexpr const char *kStates[] = {"the first state", "the second state", "the third state"};
constexpr const char *kScales[] = {"the first state's scales", "the second state's scales",
                                   "the third state's scales"};
constexpr size_t kStateBytes[ZO_NUM_STATE_FORMATS] = {sizeof(float), sizeof(uint16_t), sizeof(uint8_t)};

// That all are there, and apart from each other.
int check_buffers(const char *call, const zo_update_args &args) {
    ZO_CHECK(check_pointer(call, "value", args.value));
    if (args.value_kind == ZO_BF16) ZO_CHECK(check_pointer(call, "residual of a bf16 value", args.residual));
    if (args.value_kind == ZO_FP16) ZO_CHECK(check_pointer(call, "master of an fp16 value", args.master));
    const bool is_compact = args.state_format == ZO_STATES_COMPACT;
    const int num_states = zo::num_states(args.rule);
    for (int k = 0; k < num_states; ++k) {
        ZO_CHECK(check_pointer(call, kStates[k], args.states[k]));
        if (is_compact) ZO_CHECK(check_pointer(call, kScales[k], args.scales[k]));
    }
    ZO_CHECK(check_pointer(call, "grad", args.grad));
    const size_t value_bytes = element_bytes(args.value_kind);
    Buffer buffers[5 + 2 * 3] = {
        {"value", args.value, value_bytes},
        {"value_out", args.value_out, value_bytes},
        {"grad", args.grad, element_bytes(args.grad_kind)},
        {"residual", args.value_kind == ZO_BF16 ? args.residual : nullptr,
         is_compact ? sizeof(uint8_t) : sizeof(uint16_t)},
        {"master", args.value_kind == ZO_FP16 ? args.master : nullptr, sizeof(float)},
    };
    for (int k = 0; k < num_states; ++k) {
        buffers[5 + k] = {kStates[k], args.states[k], kStateBytes[args.state_format]};
        if (is_compact) buffers[8 + k] = {kScales[k], args.scales[k], sizeof(float), ZO_STATE_BLOCK};
    }
    return check_apart(call, buffers, args.segments[0].begin, args.segments[args.num_segments - 1].end);
}

int check_update(const char *call, const zo_update_args &args) {
    if (args.rule >= ZO_NUM_RULES) {
        return fail(ZO_INVALID, "%s: rule is %u, not 0 to %d", call, args.rule, ZO_NUM_RULES - 1);
    }
    ZO_CHECK(check_kind(call, "value_kind", args.value_kind));
    ZO_CHECK(check_kind(call, "grad_kind", args.grad_kind));
    ZO_CHECK(check_format(call, "state_format", args.state_format));
    ZO_CHECK(check_range(call, args.num_segments, args.num_threads));
    ZO_CHECK(check_origin(call, args));
    if (args.num_segments == 0) return ZO_OK;
    ZO_CHECK(check_pointer(call, "segments", args.segments));
    ZO_CHECK(check_segments(call, args));
    return check_buffers(call, args);
}

int check_states(const char *call, uint32_t format, uint32_t is_signed, const void *states,
                 const float *scales, const float *fp32, int64_t numel, uint32_t num_threads) {
    ZO_CHECK(check_format(call, "format", format));
    ZO_CHECK(check_range(call, numel, num_threads));
    if (is_signed > 1) return fail(ZO_INVALID, "%s: is_signed is %u, not 0 or 1", call, is_signed);
    if (numel == 0) return ZO_OK;
    ZO_CHECK(check_pointer(call, "states", states));
    ZO_CHECK(check_pointer(call, "fp32", fp32));
    const bool is_compact = format == ZO_STATES_COMPACT;
    if (is_compact) ZO_CHECK(check_pointer(call, "scales", scales));
    const Buffer buffers[] = {{"states", states, kStateBytes[format]},
                              {"fp32", fp32, sizeof(*fp32)},
                              {"scales", is_compact ? scales : nullptr, sizeof(*scales), ZO_STATE_BLOCK}};
    return check_apart(call, buffers, 0, numel);
}

}  // namespace

extern "C" {

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

int zo_states_decode(uint32_t format, uint32_t is_signed, const void *states, const float *scales,
                     float *fp32, int64_t numel, uint32_t num_threads) {
    constexpr const char *call = "zo_states_decode";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_states(call, format, is_signed, states, scales, fp32, numel, num_threads));
        return zo::states_decode(format, is_signed != 0, states, scales, fp32, numel, num_threads);
    });
}

int zo_states_encode(uint32_t format, uint32_t is_signed, const float *fp32, void *states, float *scales,
                     int64_t numel, uint32_t num_threads) {
    constexpr const char *call = "zo_states_encode";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_states(call, format, is_signed, states, scales, fp32, numel, num_threads));
        return zo::states_encode(format, is_signed != 0, fp32, states, scales, numel, num_threads);
    });
}

int zo_short_master_split(const float *master, uint16_t *half, uint8_t *residual, int64_t numel,
                          uint32_t num_threads) {
    constexpr const char *call = "zo_short_master_split";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_master(call, master, half, residual, numel, num_threads));
        zo::short_master_split(master, half, residual, numel, num_threads);
        return ZO_OK;
    });
}

int zo_short_master_join(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel,
                         uint32_t num_threads) {
    constexpr const char *call = "zo_short_master_join";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_master(call, master, half, residual, numel, num_threads));
        zo::short_master_join(half, residual, master, numel, num_threads);
        return ZO_OK;
    });
}

}  // extern "C"
