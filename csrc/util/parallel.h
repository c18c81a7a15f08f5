// The only parallel loop: kernels stay serial, callers hand over chunks.
#pragma once

#include <cstdint>

namespace zo {

// Calls body(chunk) for every chunk of [0, num_chunks). Chunks go to threads in contiguous runs, so each
// thread streams through memory. One thread, or one chunk, enters no OpenMP region: no pool is woken for it.
template <class Body>
void parallel_chunks(int64_t num_chunks, uint32_t num_threads, const Body &body) {
    if (num_threads <= 1 || num_chunks <= 1) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk);
        return;
    }
    const int team = num_chunks < int64_t(num_threads) ? int(num_chunks) : int(num_threads);
#pragma omp parallel for num_threads(team) schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk);
}

}  // namespace zo
