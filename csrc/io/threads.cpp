// A lane's blocks by pread and pwrite, one after the other: works on every system and every file.
#include <sched.h>
#include <unistd.h>

#include <cerrno>

#include "io/engine.h"

namespace zo {
namespace {

class ThreadsTransport : public Transport {
  public:
    ThreadsTransport(IoEngine *engine, Lane *lane, const zo_io_config &config)
        : engine_(engine), lane_(lane), part_bytes_(config.part_bytes) {}

    void run() override {
        Job job;
        while (engine_->take(*lane_, &job)) {
            if (job.fault == ZO_FAULT_STALL) engine_->hold_while_stalled();
            BlockTransfer transfer = job.transfer();
            do {
                move(&transfer);
                if (engine_->given_up()) {
                    transfer.cancel(ETIMEDOUT);
                    break;
                }
            } while (!transfer.finished());
            engine_->finish(job, transfer.outcome());
            job.batch.reset();
        }
    }

  private:
    void move(BlockTransfer *transfer) const {
        Part part;
        while (!engine_->given_up() && transfer->next(part_bytes_, &part)) {
            const zo_io_block &block = transfer->block();
            const off_t offset = off_t(block.offset + part.begin);
            char *memory = transfer->memory() + part.begin;
            ssize_t moved = transfer->op() == ZO_IO_WRITE ? pwrite(block.fd, memory, part.nbytes(), offset)
                                                          : pread(block.fd, memory, part.nbytes(), offset);
            if (moved < 0) moved = -errno;
            if (moved == -EAGAIN) sched_yield();
            transfer->completed(part, moved);
            if (!engine_->given_up()) transfer->sum_next();
        }
    }

    IoEngine *engine_;
    Lane *lane_;
    uint64_t part_bytes_;
};

}  // namespace

std::unique_ptr<Transport> make_threads_transport(IoEngine *engine, Lane *lane, const zo_io_config &config) {
    return std::make_unique<ThreadsTransport>(engine, lane, config);
}

}  // namespace zo
