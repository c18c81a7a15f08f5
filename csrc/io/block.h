// One block on its way: which part to move next, what became of the parts, and the checksum over the whole.
//
// Knows neither files nor threads: a transport launches the parts that `next` gives and reports each result
// to `completed`, in any order. A part is summed when it is next to the drive: of a write shortly before it
// leaves, of a read as soon as it has come. So the drive has work and the bytes are still in a cache. The
// calls in order: the constructor; next, completed and sum_next until finished; then outcome.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "zero_offload.h"

namespace zo {

// The outcome of one block.
struct BlockOutcome {
    int32_t status = ZO_IO_DONE;
    int32_t sys_errno = 0;
    uint32_t actual_crc = 0;
};

// Bytes [begin, end) of a block.
struct Part {
    uint64_t begin;
    uint64_t end;
    uint64_t nbytes() const { return end - begin; }
};

class BlockTransfer {
  public:
    // `fault` is the zo_io_fault_kind to act out, ZO_FAULT_NONE for none.
    BlockTransfer(int op, zo_io_block *block, char *memory, int fault);

    // The next part to launch, of at most `part_bytes`; false when there is none now. Sums it if it is
    // written.
    bool next(uint64_t part_bytes, Part *part);
    // `result` is what read or write gave: bytes, or a negative errno.
    void completed(const Part &part, int64_t result);
    // Sums one part that was read, in their order; false when there is none to sum now.
    bool sum_next();
    // Whether of the next `nbytes` to be written some are not summed; `sum_ahead` sums a part of them.
    bool lacks_sum(uint64_t nbytes) const {
        return is_write() && outcome_.status == ZO_IO_DONE &&
               summed_ < std::min<uint64_t>(fresh_ + nbytes, block_->nbytes);
    }
    void sum_ahead(uint64_t part_bytes) { sum(std::min<uint64_t>(summed_ + part_bytes, block_->nbytes)); }
    // True when nothing is under way, left or to be summed. Bad bytes are read once more.
    bool finished();
    // Instead of `finished`, when no part is under way: the block ends with this errno, and its memory is not
    // touched again.
    void cancel(int sys_errno);
    const BlockOutcome &outcome() const { return outcome_; }

    int op() const { return op_; }
    const zo_io_block &block() const { return *block_; }
    char *memory() const { return memory_; }

  private:
    bool is_write() const { return op_ == ZO_IO_WRITE; }
    void fail(int status, int sys_errno);
    int64_t disturbed(int64_t result);
    void flip_one_bit();
    void arrived(const Part &part);
    void sum(uint64_t end);
    bool verify();

    int op_;
    zo_io_block *block_;
    char *memory_;
    int fault_;
    int storm_left_ = 0;
    int attempt_ = 0;
    uint64_t fresh_ = 0;            // bytes of which no part was given yet start here
    uint64_t under_way_ = 0;        // parts
    std::vector<Part> remainders_;  // of parts that came back short or not at all
    std::vector<Part> unsummed_;    // have been read
    uint64_t summed_ = 0;           // bytes that `crc_` covers
    uint32_t crc_ = 0;
    BlockOutcome outcome_;
};

}  // namespace zo
