// One io_uring by raw system calls: memory shared with the kernel, entries put in, results taken out.
//
// Knows neither blocks nor queues. One thread uses it from `enable` on; it may be made on another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/uring_abi.h"

namespace zo::uring {

class Ring {
  public:
    // Throws std::system_error where the kernel, or a sandbox, does not offer what we need.
    explicit Ring(uint32_t num_entries);
    ~Ring();
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    // 0 or an errno, as `enter`.
    int enable();
    // An empty entry, to be filled before `enter`; there is room for the `num_entries` asked for.
    Sqe *put();
    // Gives the kernel what was put, and returns once `min_results` can be taken, or at a signal: 0. An errno
    // when the kernel will never take it.
    int enter(uint32_t min_results);
    // False when there is none.
    bool take(Cqe *result);
    bool has_unsubmitted() const { return unsubmitted_ > 0; }
    // Files by number in the kernel's table instead of by descriptor; false where that is refused.
    bool register_files(uint32_t num_entries);
    bool register_file(uint32_t index, int fd);
    void unregister_files();
    // The same for memory, whose pages the kernel then keeps.
    bool register_buffers(uint32_t num_entries);
    bool register_buffer(uint32_t index, void *memory, uint64_t nbytes);
    // In a forked child: the ring is the parent's.
    void close_inherited();

  private:
    void map(const Params &params);
    void unmap();

    int fd_ = -1;
    bool disabled_ = false;
    char *rings_ = nullptr;
    size_t rings_nbytes_ = 0;
    Sqe *sqes_ = nullptr;
    size_t sqes_nbytes_ = 0;
    uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr;
    uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
    Cqe *cqes_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    uint32_t unsubmitted_ = 0;
};

}  // namespace zo::uring
