// One block, moved completely by pread or pwrite, and checked; on the engine's threads, without its lock.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "io/engine.h"
#include "util/crc32c.h"

namespace zo {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Calls once(done, rest) -> bytes moved or -1, until nbytes are moved. Interruptions and parts go on; 0 ends.
template <class Once>
void move_all(uint64_t nbytes, BlockOutcome *outcome, const Once &once) {
    const auto start = std::chrono::steady_clock::now();
    for (uint64_t done = 0; done < nbytes && outcome->status == ZO_IO_DONE;) {
        const ssize_t moved = once(done, nbytes - done);
        if (moved > 0) {
            done += uint64_t(moved);
        } else if (moved == 0) {
            outcome->status = ZO_IO_TRUNCATED;
        } else if (errno == EAGAIN) {
            sched_yield();
        } else if (errno != EINTR) {
            outcome->status = ZO_IO_OS_ERROR;
            outcome->sys_errno = errno;
        }
    }
    outcome->busy_s += seconds_since(start);
}

BlockOutcome os_error(int sys_errno) {
    BlockOutcome outcome;
    outcome.status = ZO_IO_OS_ERROR;
    outcome.sys_errno = sys_errno;
    return outcome;
}

void flip_one_bit(const zo_io_block &block, char *memory) {
    if (block.nbytes > 0) memory[block.nbytes / 2] ^= 0x10;
}

BlockOutcome write_block(zo_io_block &block, char *memory, int fault) {
    if (fault == ZO_FAULT_WRITE_EIO) return os_error(EIO);
    if (fault == ZO_FAULT_WRITE_ENOSPC) return os_error(ENOSPC);
    block.crc = crc32c(block.seed, memory, block.nbytes);
    if (fault == ZO_FAULT_WRITE_FLIP) flip_one_bit(block, memory);
    // Half-way on a sector, so that the rest is legal for O_DIRECT too.
    uint64_t limit = fault == ZO_FAULT_WRITE_SHORT && block.nbytes > 4096
                         ? (block.nbytes / 2 + 4095) & ~4095ull
                         : block.nbytes;
    BlockOutcome outcome;
    move_all(block.nbytes, &outcome, [&](uint64_t done, uint64_t rest) {
        const auto length = size_t(std::min(rest, limit));
        limit = block.nbytes;
        return pwrite(block.fd, memory + done, length, off_t(block.offset + done));
    });
    if (fault == ZO_FAULT_WRITE_FLIP) flip_one_bit(block, memory);
    return outcome;
}

BlockOutcome read_block(const zo_io_block &block, char *memory, int fault, bool verify) {
    if (fault == ZO_FAULT_READ_EIO) return os_error(EIO);
    BlockOutcome outcome;
    // A second try tells a bad transfer from bad bytes on the drive.
    for (int attempt = 0; attempt < 2; ++attempt) {
        outcome.status = ZO_IO_DONE;
        move_all(block.nbytes, &outcome, [&](uint64_t done, uint64_t rest) {
            return pread(block.fd, memory + done, size_t(rest), off_t(block.offset + done));
        });
        if (outcome.status != ZO_IO_DONE) break;
        if (fault == ZO_FAULT_READ_FLIP && attempt == 0) flip_one_bit(block, memory);
        if (!verify) break;
        outcome.actual_crc = crc32c(block.seed, memory, block.nbytes);
        if (outcome.actual_crc == block.crc) break;
        outcome.status = ZO_IO_CHECKSUM;
    }
    return outcome;
}

}  // namespace

BlockOutcome transfer_block(int op, zo_io_block &block, char *memory, int fault) {
    if (op == ZO_IO_WRITE) return write_block(block, memory, fault);
    return read_block(block, memory, fault, op == ZO_IO_READ);
}

}  // namespace zo
