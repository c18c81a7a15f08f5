// The I/O engine: tickets over lanes of blocks, one lane per drive, each served by transports of its own.
//
// Owns the queues, the order, the tickets and the transports; never the files or the memory. A submission's
// blocks go to the lanes of their files, each block one job. In a lane urgent blocks start first, then reads
// and writes by bytes in turn, each kind in the order of its submission. A submission whose block fails
// starts no further block. So the lowest failing block is known once those already started have finished. The
// calls in order: submit, then wait (or done, then wait).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "io/block.h"
#include "zero_offload.h"

namespace zo {

class IoEngine;
struct Lane;

// The blocks of one submission; guarded by the engine's lock.
struct Batch {
    int op;
    zo_io_block *blocks;
    uint32_t num_blocks;
    char *base;
    uint32_t unstarted;
    uint32_t unfinished;  // those not started included
    zo_io_result result;
};

// A file as the engine was told of it; another version means that the number stands for another file.
struct FileEntry {
    uint32_t lane = 0;
    uint32_t version = 0;
};

// Memory that stays; its index names it.
struct MemorySpan {
    char *begin;
    uint64_t nbytes;
};

constexpr int kNoSpan = -1;

// One block to be moved.
struct Job {
    std::shared_ptr<Batch> batch;
    uint32_t block;
    char *memory;
    int fault;
    uint32_t file_version;
    int span;  // the block's memory is a part of this one, or kNoSpan

    BlockTransfer transfer() const { return {batch->op, &batch->blocks[block], memory, fault}; }
};

// Moves the blocks of a lane, on one thread of its own.
class Transport {
  public:
    virtual ~Transport() = default;
    // Until the engine closes and nothing is left.
    virtual void run() = 0;
    // New work is there, or the engine closes; from any thread, with the engine's lock held.
    virtual void wake() {}
    // In a forked child: closes the descriptors that it has inherited.
    virtual void close_inherited() {}
};

// Both throw std::system_error where the system does not offer them.
std::unique_ptr<Transport> make_threads_transport(IoEngine *engine, Lane *lane, const zo_io_config &config);
std::unique_ptr<Transport> make_uring_transport(IoEngine *engine, Lane *lane, const zo_io_config &config);

// The part of a batch that a lane still has to start.
struct LaneBatch {
    std::shared_ptr<Batch> batch;
    std::vector<uint32_t> rows;     // of the batch's blocks
    std::vector<uint64_t> offsets;  // of their memory
    size_t next = 0;
};

struct Lane {
    std::deque<LaneBatch> urgent, reads, writes;
    uint32_t urgent_streak = 0;
    int64_t read_ahead_bytes = 0;  // how far reads are ahead of writes while both wait
    std::condition_variable work;
    std::vector<std::unique_ptr<Transport>> transports;

    bool empty() const { return urgent.empty() && reads.empty() && writes.empty(); }
    std::deque<LaneBatch> &choose();
};

class IoEngine {
  public:
    // Throws std::system_error when threads or rings cannot be had.
    explicit IoEngine(const zo_io_config &config);
    ~IoEngine();
    IoEngine(const IoEngine &) = delete;
    IoEngine &operator=(const IoEngine &) = delete;

    void add_file(int fd, uint32_t lane);
    void add_memory(char *begin, uint64_t nbytes);
    uint64_t submit(int op, zo_io_block *blocks, uint32_t num_blocks, char *base, bool urgent);
    // False when no such ticket is open.
    bool wait(uint64_t ticket, double timeout_s, zo_io_result *result);
    bool done(uint64_t ticket, bool *is_done);
    void stats(zo_io_stats_t *stats);
    void fault(int kind, int64_t nth);
    uint32_t num_lanes() const { return uint32_t(lanes_.size()); }
    // The threads stay behind in the parent: in a child nothing may be called but `close_inherited`.
    bool is_forked_copy() const;
    void close_inherited();

    void stop();
    void give_up();

    // For transports.
    bool take(Lane &lane, Job *job);      // blocks; false when the engine closes and nothing is left
    bool try_take(Lane &lane, Job *job);  // never blocks
    void finish(const Job &job, const BlockOutcome &outcome);
    void hold_while_stalled();  // ZO_FAULT_STALL: returns once the next fault call, or close, ends it
    bool stalled();
    bool given_up() const { return given_up_; }  // then the memory of blocks is not ours to touch any more
    MemorySpan span(int index);

  private:
    void pop(Lane &lane, Job *job);
    int next_fault(int op);
    int span_of(const char *memory, uint64_t nbytes) const;
    void drop_unstarted(const std::shared_ptr<Batch> &batch);
    void wake_all();

    std::mutex mutex_;
    std::condition_variable finished_;
    std::condition_variable unstalled_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::unordered_map<int, FileEntry> files_;
    uint32_t next_file_version_ = 1;
    std::vector<MemorySpan> spans_;
    std::unordered_map<uint64_t, std::shared_ptr<Batch>> open_;
    uint64_t next_ticket_ = 1;
    bool stopping_ = false;
    std::atomic<bool> given_up_{false};
    bool stalled_ = false;
    int fault_kind_ = ZO_FAULT_NONE;
    int64_t fault_countdown_ = 0;
    zo_io_stats_t stats_{};
    pid_t owner_;
    std::vector<std::thread> threads_;
};

}  // namespace zo

struct zo_io {
    explicit zo_io(const zo_io_config &config) : engine(config) {}
    zo::IoEngine engine;
};
