// The formats of states: see driver.cpp.
#include "checks.h"

namespace {

constexpr int64_t kStates = 3;

// An array with memory of its own, exactly as long as the calls may touch.
using Bytes = std::vector<uint8_t>;

int64_t num_blocks(int64_t numel) { return (numel + ZO_STATE_BLOCK - 1) / ZO_STATE_BLOCK; }

struct Shard {
    Bytes value, residual, master, grad, value_out, states[kStates], scales[kStates];
    bool operator==(const Shard &o) const {
        for (int k = 0; k < kStates; ++k) {
            if (!same_bits(states[k], o.states[k]) || !same_bits(scales[k], o.scales[k])) return false;
        }
        return same_bits(value, o.value) && same_bits(residual, o.residual) && same_bits(master, o.master) &&
               same_bits(value_out, o.value_out);
    }
};

float *floats(Bytes &bytes) { return reinterpret_cast<float *>(bytes.data()); }
uint16_t *halves(Bytes &bytes) { return reinterpret_cast<uint16_t *>(bytes.data()); }

// Values and gradients from `values`, and states encoded from them. Arrays of codes are not padded.
Shard make(uint32_t format, uint32_t kind, int64_t numel, Values values) {
    const auto count = size_t(numel);
    const size_t state_bytes = format == ZO_STATES_COMPACT ? 1 : 2, blocks = size_t(num_blocks(numel));
    std::vector<float> x = random_floats(numel, 5, values), g = random_floats(numel, 6, values);
    Shard s;
    s.value.resize(count * (kind == ZO_FP32 ? 4 : 2));
    s.value_out = s.value;
    s.residual.resize(count * state_bytes);
    s.master.resize(count * 4);
    s.grad.resize(count * (kind == ZO_FP32 ? 4 : 2));
    if (kind != ZO_BF16) EXPECT(zo_convert(kind, s.value.data(), ZO_FP32, x.data(), numel, 1) == ZO_OK);
    if (kind == ZO_BF16 && format == ZO_STATES_COMPACT) {
        EXPECT(zo_short_master_split(x.data(), halves(s.value), s.residual.data(), numel, 2) == ZO_OK);
        EXPECT(zo_short_master_join(halves(s.value), s.residual.data(), floats(s.master), numel, 2) == ZO_OK);
    } else if (kind == ZO_BF16) {
        EXPECT(zo_master_split(x.data(), halves(s.value), halves(s.residual), numel, 2) == ZO_OK);
    }
    EXPECT(zo_convert(kind, s.grad.data(), ZO_FP32, g.data(), numel, 1) == ZO_OK);
    for (int k = 0; k < kStates; ++k) {
        s.states[k].resize(count * state_bytes);
        if (format == ZO_STATES_COMPACT) s.scales[k].resize(blocks * 4);
        std::vector<float> state = random_floats(numel, 7 + uint32_t(k), values);
        for (float &each : state) each = k == 0 ? each : each * each;
        EXPECT(zo_states_encode(format, k == 0, state.data(), s.states[k].data(), floats(s.scales[k]), numel,
                                2) == ZO_OK);
    }
    return s;
}

// One update; then decodes the states that it has left.
Shard run(uint32_t rule, uint32_t format, uint32_t kind, int64_t numel, uint32_t num_threads, Values values) {
    Shard s = make(format, kind, numel, values);
    zo_update_args update = {};
    update.size = sizeof(update);
    update.rule = rule;
    update.value_kind = update.grad_kind = kind;
    update.num_threads = num_threads;
    update.state_format = format;
    update.value = s.value.data();
    update.residual = s.residual.data();
    update.master = floats(s.master);
    for (int k = 0; k < kStates; ++k) {
        update.states[k] = s.states[k].data();
        update.scales[k] = floats(s.scales[k]);
    }
    update.grad = s.grad.data();
    update.value_out = s.value_out.data();
    // The second segment passes 2^32, where random words begin anew.
    const int64_t third = numel / 3 / ZO_STATE_BLOCK * ZO_STATE_BLOCK;
    const zo_segment segments[] = {{0, third, 1e-3, .9, .999, 1e-8, .1, 1.0, 1},
                                   {third, numel, 1e-4, .9, .99, 1e-8, 0.0, 0.5, 7}};
    update.segments = segments;
    update.num_segments = 2;
    update.seed = 0x0123456789ABCDEFu;
    update.origin = (int64_t(1) << 32) - 2 * third;
    EXPECT(numel == 0 || zo_update(&update) == ZO_OK);
    EXPECT(same_bits(s.value, s.value_out));
    for (int k = 0; k < kStates; ++k) {
        std::vector<float> decoded(static_cast<size_t>(numel));
        EXPECT(zo_states_decode(format, k == 0, s.states[k].data(), floats(s.scales[k]), decoded.data(),
                                numel, num_threads) == ZO_OK);
        for (const float each : decoded) EXPECT(k == 0 || !(each < 0));
    }
    return s;
}

}  // namespace

void test_formats(uint32_t rule, int64_t numel, Values values) {
    for (const uint32_t format : {ZO_STATES_BF16, ZO_STATES_COMPACT}) {
        for (const uint32_t kind : {ZO_FP32, ZO_BF16, ZO_FP16}) {
            EXPECT(zo_set_isa(ZO_ISA_SCALAR) == ZO_OK);
            const Shard expected = run(rule, format, kind, numel, 1, values);
            for (int isa = 0; isa <= ZO_ISA_NEON; ++isa) {
                if (!(zo_isa_supported_mask() >> isa & 1)) continue;
                EXPECT(zo_set_isa(isa) == ZO_OK);
                EXPECT(run(rule, format, kind, numel, 2, values) == expected);
            }
        }
    }
}

void test_format_refusals() {
    zo_segment segment = {0, 8, 1e-3, .9, .999, 1e-8, .1, 1.0, 1};
    float memory[64] = {};
    zo_update_args update = {};
    update.size = sizeof(update);
    update.rule = ZO_LION;
    update.num_threads = 1;
    update.num_segments = 1;
    update.segments = &segment;
    update.value = memory;
    update.grad = memory + 8;
    update.states[0] = memory + 16;
    update.state_format = ZO_NUM_STATE_FORMATS;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "state_format is 3"));
    update.state_format = ZO_STATES_COMPACT;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "scales is NULL"));
    update.scales[0] = memory + 17;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "overlap"));
    update.scales[0] = memory + 18;
    EXPECT(zo_update(&update) == ZO_OK);
    update.origin = 1;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "origin is 1"));
    EXPECT(zo_states_decode(3, 0, memory, memory, memory, 1, 1) == ZO_INVALID);
    EXPECT(zo_states_encode(ZO_STATES_COMPACT, 2, memory, memory, memory, 1, 1) == ZO_INVALID);
    EXPECT(zo_states_encode(ZO_STATES_COMPACT, 0, memory, memory, nullptr, 1, 1) == ZO_INVALID);
    EXPECT(zo_states_encode(ZO_STATES_COMPACT, 0, memory, memory + 1, memory + 8, 8, 1) == ZO_INVALID &&
           strstr(zo_last_error(), "states and fp32 overlap"));
    EXPECT(zo_states_decode(ZO_STATES_COMPACT, 0, memory, memory + 1, memory + 8, 8, 1) == ZO_INVALID &&
           strstr(zo_last_error(), "states and scales overlap"));
    auto *half = reinterpret_cast<uint16_t *>(memory + 8);
    auto *residual = reinterpret_cast<uint8_t *>(memory + 12);
    EXPECT(zo_short_master_split(memory, half - 1, residual, 8, 1) == ZO_INVALID &&
           strstr(zo_last_error(), "master and half overlap"));
    EXPECT(zo_short_master_join(half, residual - 1, memory, 8, 1) == ZO_INVALID &&
           strstr(zo_last_error(), "half and residual overlap"));
    EXPECT(zo_short_master_split(memory, half, residual, 8, 1) == ZO_OK);
    EXPECT(zo_short_master_split(nullptr, nullptr, nullptr, 1, 1) == ZO_INVALID);
    EXPECT(zo_short_master_join(nullptr, nullptr, nullptr, 0, 1) == ZO_OK);
}
