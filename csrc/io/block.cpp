#include "io/block.h"

#include <algorithm>
#include <cerrno>

#include "util/crc32c.h"

namespace zo {
namespace {

// A transfer that stopped early goes on at a multiple of this: O_DIRECT takes whole sectors only.
constexpr uint64_t kSector = 4096;
constexpr int kStormLength = 40;

}  // namespace

BlockTransfer::BlockTransfer(int op, zo_io_block *block, char *memory, int fault)
    : op_(op), block_(block), memory_(memory), fault_(fault), crc_(block->seed) {
    if (fault_ == ZO_FAULT_WRITE_EIO || fault_ == ZO_FAULT_READ_EIO) fail(ZO_IO_OS_ERROR, EIO);
    if (fault_ == ZO_FAULT_WRITE_ENOSPC) fail(ZO_IO_OS_ERROR, ENOSPC);
    if (fault_ == ZO_FAULT_STORM) storm_left_ = kStormLength;
    if (fault_ == ZO_FAULT_WRITE_FLIP || fault_ == ZO_FAULT_WRITE_DROP) sum(block_->nbytes);
    if (fault_ == ZO_FAULT_WRITE_FLIP) flip_one_bit();
    if (fault_ == ZO_FAULT_WRITE_DROP) fresh_ = block_->nbytes;
}

void BlockTransfer::sum(uint64_t end) {
    if (end <= summed_) return;
    crc_ = crc32c(crc_, memory_ + summed_, end - summed_);
    summed_ = end;
}

void BlockTransfer::fail(int status, int sys_errno) {
    outcome_.status = status;
    outcome_.sys_errno = sys_errno;
}

void BlockTransfer::cancel(int sys_errno) { fail(ZO_IO_OS_ERROR, sys_errno); }

void BlockTransfer::flip_one_bit() {
    if (block_->nbytes > 0) memory_[block_->nbytes / 2] ^= 0x10;
}

bool BlockTransfer::next(uint64_t part_bytes, Part *part) {
    if (outcome_.status != ZO_IO_DONE) return false;
    if (!remainders_.empty()) {
        *part = remainders_.back();
        remainders_.pop_back();
    } else if (fresh_ < block_->nbytes) {
        uint64_t nbytes = part_bytes;
        if (fault_ == ZO_FAULT_WRITE_SHORT && fresh_ == 0 && block_->nbytes > kSector) {
            nbytes = std::min(nbytes, (block_->nbytes / 2 + kSector - 1) / kSector * kSector);
        }
        *part = {fresh_, std::min<uint64_t>(fresh_ + nbytes, block_->nbytes)};
        fresh_ = part->end;
        if (is_write()) sum(part->end);
    } else {
        return false;
    }
    ++under_way_;
    return true;
}

int64_t BlockTransfer::disturbed(int64_t result) {
    if (storm_left_ > 0) return storm_left_-- % 2 ? -EAGAIN : -EINTR;
    return fault_ == ZO_FAULT_READ_SHORT ? 0 : result;
}

void BlockTransfer::completed(const Part &part, int64_t result) {
    --under_way_;
    if (outcome_.status != ZO_IO_DONE) return;  // another part has failed
    result = disturbed(result);
    if (result == -EINTR || result == -EAGAIN) {
        remainders_.push_back(part);
        return;
    }
    if (result < 0) {
        fail(ZO_IO_OS_ERROR, int(-result));
        return;
    }
    uint64_t moved = uint64_t(result);
    if (moved >= part.nbytes()) {
        arrived(part);
        return;
    }
    moved -= moved % kSector;
    if (moved == 0) {  // of the last sector of a file there may be a part
        fail(ZO_IO_TRUNCATED, 0);
        return;
    }
    arrived({part.begin, part.begin + moved});
    remainders_.push_back({part.begin + moved, part.end});
}

void BlockTransfer::arrived(const Part &part) {
    const uint64_t middle = block_->nbytes / 2;
    const bool holds_middle = part.begin <= middle && middle < part.end;
    if (fault_ == ZO_FAULT_READ_FLIP && attempt_ == 0 && holds_middle) flip_one_bit();
    if (op_ == ZO_IO_READ) unsummed_.push_back(part);
}

bool BlockTransfer::sum_next() {
    const auto is_next = [this](const Part &part) { return part.begin == summed_; };
    const auto found = std::find_if(unsummed_.begin(), unsummed_.end(), is_next);
    if (found == unsummed_.end()) return false;
    sum(found->end);
    unsummed_.erase(found);
    return true;
}

bool BlockTransfer::finished() {
    if (under_way_ > 0) return false;
    if (outcome_.status != ZO_IO_DONE) {
        if (fault_ == ZO_FAULT_WRITE_FLIP) flip_one_bit();
        return true;
    }
    if (fresh_ < block_->nbytes || !remainders_.empty()) return false;
    if (fault_ == ZO_FAULT_WRITE_FLIP) flip_one_bit();
    if (is_write()) block_->crc = crc_;
    if (op_ != ZO_IO_READ || verify()) return true;
    // A second try tells a bad transfer from bad bytes on the drive.
    if (++attempt_ == 1) {
        fresh_ = summed_ = 0;
        crc_ = block_->seed;
        return false;
    }
    fail(ZO_IO_CHECKSUM, 0);
    return true;
}

bool BlockTransfer::verify() {
    while (sum_next()) {
    }
    outcome_.actual_crc = crc_;
    return crc_ == block_->crc;
}

}  // namespace zo
