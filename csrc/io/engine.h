// The I/O engine: tickets over a pool of threads that read and write blocks with pread and pwrite.
//
// Owns the queues, the threads and the tickets; never the files or the memory. Every block is one job,
// started in the order of its submission; a submission whose block fails starts no further block, so the
// lowest failing one is known once those already started have finished. The calls in order: submit, then wait
// (or done, then wait).
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "zero_offload.h"

namespace zo {

// What became of one block.
struct BlockOutcome {
    int32_t status = ZO_IO_DONE;
    int32_t sys_errno = 0;
    uint32_t actual_crc = 0;
    double busy_s = 0;
};

// Reads or writes one block completely; `fault` is the zo_io_fault_kind to act out, ZO_FAULT_NONE for none.
BlockOutcome transfer_block(int op, zo_io_block &block, char *memory, int fault);

class IoEngine {
  public:
    // Throws std::system_error when the threads cannot be started.
    explicit IoEngine(uint32_t num_threads);
    ~IoEngine();
    IoEngine(const IoEngine &) = delete;
    IoEngine &operator=(const IoEngine &) = delete;

    uint64_t submit(int op, zo_io_block *blocks, uint32_t num_blocks, char *base, bool urgent);
    // False when no such ticket is open.
    bool wait(uint64_t ticket, double timeout_s, zo_io_result *result);
    bool done(uint64_t ticket, bool *is_done);
    void stats(zo_io_stats_t *stats);
    void fault(int kind, int64_t nth);
    // The threads stay behind in the parent: nothing else may be called on a child's copy.
    bool is_forked_copy() const;

  private:
    struct Batch {
        int op;
        zo_io_block *blocks;
        uint32_t num_blocks;  // shrinks to num_started when a block fails
        char *memory;         // of the next block to start
        uint32_t num_started;
        uint32_t num_finished;
        zo_io_result result;
        bool finished() const { return num_finished == num_blocks; }
    };
    struct Job {
        std::shared_ptr<Batch> batch;
        uint32_t block;
        char *memory;
        int fault;
    };

    void run();
    bool take(Job *job);  // blocks; false when the engine closes and nothing is left
    void finish(const Job &job, const BlockOutcome &outcome);
    int next_fault(int op);
    void stop();

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable finished_;
    std::deque<std::shared_ptr<Batch>> urgent_;
    std::deque<std::shared_ptr<Batch>> normal_;
    std::unordered_map<uint64_t, std::shared_ptr<Batch>> open_;
    uint64_t next_ticket_ = 1;
    bool stopping_ = false;
    int fault_kind_ = ZO_FAULT_NONE;
    int64_t fault_countdown_ = 0;
    zo_io_stats_t stats_{};
    pid_t owner_;
    std::vector<std::thread> threads_;
};

}  // namespace zo

struct zo_io {
    explicit zo_io(uint32_t num_threads) : engine(num_threads) {}
    zo::IoEngine engine;
};
