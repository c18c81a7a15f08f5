// What the functions of the border share: checks of arguments, and every failure as a status and a message.
#pragma once

#include <exception>
#include <new>
#include <system_error>

#include "util/status.h"
#include "zero_offload.h"

namespace zo {

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

// The first failing check decides; the rest are not evaluated.
#define ZO_CHECK(check)                     \
    do {                                    \
        const int status = (check);         \
        if (status != ZO_OK) return status; \
    } while (false)

}  // namespace zo
