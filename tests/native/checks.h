// Checks and helpers that the driver's files share.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "zero_offload.h"

#define EXPECT(condition)                                                                         \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, zo_last_error()); \
            exit(1);                                                                              \
        }                                                                                         \
    } while (false)

constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 31, 255, 257, 4099, 16385, 50001};

enum class Values {
    kNormal,
    kAnyBits
};  // the latter: denormals, infinities and every kind of NaN among them

inline std::vector<float> random_floats(int64_t numel, uint32_t seed, Values values) {
    std::vector<float> made(static_cast<size_t>(numel));
    for (float &value : made) {
        seed = seed * 1664525u + 1013904223u;
        value = float(int32_t(seed)) * 1e-9f;
        if (values == Values::kNormal || (seed & 0x300)) continue;
        const uint32_t exponent = (seed & 0x400) ? 0x7F800000u : 0, odd = seed ^ (seed >> 16);
        const uint32_t word = (odd & 0x807FFFFFu) | exponent;
        memcpy(&value, &word, sizeof(value));
    }
    return made;
}

template <class T>
bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// formats.cpp: updates over states in bf16 and in codes, and conversions of these.
void test_formats(uint32_t rule, int64_t numel, Values values);
void test_format_refusals();
