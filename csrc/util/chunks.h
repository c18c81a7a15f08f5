// The only parallel loop: kernels stay serial and get one chunk at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/subnormals.h"

// The interface of libgomp, which GCC compiles "omp parallel" to. Called by its names it is one runtime under
// every compiler, torch's own: clang would bring a second one, whose threads compete for the cores.
extern "C" {
void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace zo {

// Elements: 100 to 400 KiB of traffic, far above the cost of taking a chunk. Sums of squares depend on it.
constexpr int64_t kChunk = 16384;

inline int64_t num_chunks(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Calls body(begin, count) for every chunk of [0, numel). Chunks go to threads in contiguous runs, so each
// thread streams through memory. One thread, or one chunk, enters no OpenMP region: no pool is woken for it.
// Each thread keeps subnormal numbers meanwhile, whatever its mode.
template <class Body>
void for_each_chunk(int64_t numel, uint32_t num_threads, const Body &body) {
    const int64_t count = num_chunks(numel);
    const auto run = [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        body(begin, std::min(kChunk, numel - begin));
    };
    if (num_threads <= 1 || count <= 1) {
        const KeepSubnormals here;
        for (int64_t chunk = 0; chunk < count; ++chunk) run(chunk);
        return;
    }
    auto member = [&] {
        const KeepSubnormals here;
        const int64_t rank = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t end = count * (rank + 1) / team;
        for (int64_t chunk = count * rank / team; chunk < end; ++chunk) run(chunk);
    };
    using Member = decltype(member);
    GOMP_parallel([](void *data) { (*static_cast<Member *>(data))(); }, &member,
                  unsigned(std::min(count, int64_t(num_threads))), 0);
}

}  // namespace zo
