// The functions of the border share checks of arguments, and every failure as a status and a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <system_error>

#include "util/status.h"
#include "zero_offload.h"

namespace zo {

// The first failing check decides; the rest are not evaluated.
#define ZO_CHECK(check)                     \
    do {                                    \
        const int status = (check);         \
        if (status != ZO_OK) return status; \
    } while (false)

// No exception crosses the border.
template <class Body>
int guarded(const char *call, const Body &body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(ZO_NO_MEMORY, "%s: out of memory", call);
    } catch (const std::system_error &error) {
        return fail(ZO_SYSTEM, "%s: %s", call, error.what());
    } catch (const std::exception &error) {
        return fail(ZO_INTERNAL, "%s: %s", call, error.what());
    } catch (...) {
        return fail(ZO_INTERNAL, "%s: unknown exception", call);
    }
}

inline int check_size(const char *call, uint32_t size, size_t expected) {
    if (size == expected) return ZO_OK;
    return fail(ZO_INVALID, "%s: the struct has %u bytes, this library expects %zu", call, size, expected);
}

inline int check_pointer(const char *call, const char *name, const void *pointer) {
    if (pointer != nullptr) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is NULL", call, name);
}

inline int check_range(const char *call, int64_t numel, uint32_t num_threads) {
    constexpr uint32_t kMaxThreads = 1024;
    if (numel < 0) return fail(ZO_INVALID, "%s: numel is %lld, not 0 or more", call, (long long)numel);
    if (num_threads < 1 || num_threads > kMaxThreads) {
        return fail(ZO_INVALID, "%s: num_threads is %u, not 1 to %u", call, num_threads, kMaxThreads);
    }
    return ZO_OK;
}

inline int check_kind(const char *call, const char *name, uint32_t kind) {
    if (kind < ZO_NUM_KINDS) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is %u, not 0 (fp32), 1 (bf16) or 2 (fp16)", call, name, kind);
}

struct Buffer {
    const char *name;
    const void *address;
    size_t element_bytes;
    int64_t block = 1;  // elements of the call that share one of the buffer
};

// No byte of elements [begin, end) of one buffer may lie in another: the pass would read what it has just
// written. A buffer that is NULL is none.
template <size_t kCount>
int check_apart(const char *call, const Buffer (&buffers)[kCount], int64_t begin, int64_t end) {
    const auto first = [begin](const Buffer &b) {
        return uintptr_t(b.address) + b.element_bytes * size_t(begin / b.block);
    };
    const auto last = [end](const Buffer &b) {
        return uintptr_t(b.address) + b.element_bytes * size_t((end + b.block - 1) / b.block);
    };
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

// A master and its two parts, whichever way.
template <class Residual>
int check_master(const char *call, const float *master, const uint16_t *half, const Residual *residual,
                 int64_t numel, uint32_t num_threads) {
    ZO_CHECK(check_range(call, numel, num_threads));
    if (numel == 0) return ZO_OK;
    ZO_CHECK(check_pointer(call, "master", master));
    ZO_CHECK(check_pointer(call, "half", half));
    ZO_CHECK(check_pointer(call, "residual", residual));
    const Buffer buffers[] = {{"master", master, sizeof(*master)},
                              {"half", half, sizeof(*half)},
                              {"residual", residual, sizeof(*residual)}};
    return check_apart(call, buffers, 0, numel);
}

}  // namespace zo
