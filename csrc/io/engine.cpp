#include "io/engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace zo {
namespace {

// After so many urgent blocks in a row a normal one goes: its waiter must not wait for ever.
constexpr uint32_t kUrgentStreak = 16;

bool is_write(int op) { return op == ZO_IO_WRITE; }

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();  // CLOCK_MONOTONIC
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool fault_strikes(int kind, int op) {
    switch (kind) {
        case ZO_FAULT_READ_EIO:
        case ZO_FAULT_READ_FLIP:
        case ZO_FAULT_READ_SHORT:
            return !is_write(op);
        case ZO_FAULT_STORM:
        case ZO_FAULT_STALL:
            return true;
        case ZO_FAULT_NONE:
            return false;
        default:
            return is_write(op);
    }
}

// While one exists, threads started here leave every signal to the interpreter's own threads.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace

std::deque<LaneBatch> &Lane::choose() {
    const bool others = !reads.empty() || !writes.empty();
    if (!urgent.empty() && (!others || urgent_streak < kUrgentStreak)) {
        ++urgent_streak;
        return urgent;
    }
    urgent_streak = 0;
    if (reads.empty() || writes.empty()) {
        read_ahead_bytes = 0;
        return reads.empty() ? writes : reads;
    }
    return read_ahead_bytes <= 0 ? reads : writes;
}

IoEngine::IoEngine(const zo_io_config &config) : owner_(getpid()) {
    const SignalsBlocked blocked;
    const auto make = config.kind == ZO_IO_URING ? make_uring_transport : make_threads_transport;
    stats_.size = sizeof(stats_);
    for (uint32_t i = 0; i < config.num_lanes; ++i) {
        lanes_.push_back(std::make_unique<Lane>());
        for (uint32_t j = 0; j < config.threads_per_lane; ++j) {
            lanes_.back()->transports.push_back(make(this, lanes_.back().get(), config));
        }
    }
    try {
        for (const auto &lane : lanes_) {
            for (const auto &transport : lane->transports) {
                threads_.emplace_back([runs = transport.get()] { runs->run(); });
            }
        }
    } catch (...) {
        stop();
        throw;
    }
}

IoEngine::~IoEngine() { stop(); }

void IoEngine::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        stalled_ = false;
        wake_all();
    }
    for (std::thread &thread : threads_) {
        if (thread.joinable()) thread.join();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    // A ring keeps every file that it has once known.
    for (const auto &lane : lanes_) lane->transports.clear();
}

void IoEngine::give_up() {
    const std::lock_guard<std::mutex> lock(mutex_);
    given_up_ = true;
    std::vector<std::shared_ptr<Batch>> all;
    for (const auto &[ticket, batch] : open_) all.push_back(batch);
    for (const auto &batch : all) {
        if (batch->unstarted > 0 && batch->result.status == ZO_IO_DONE) {
            batch->result.status = ZO_IO_OS_ERROR;
            batch->result.sys_errno = ETIMEDOUT;
        }
        drop_unstarted(batch);
    }
    finished_.notify_all();
}

void IoEngine::wake_all() {
    unstalled_.notify_all();
    for (const auto &lane : lanes_) {
        lane->work.notify_all();
        for (const auto &transport : lane->transports) transport->wake();
    }
}

bool IoEngine::is_forked_copy() const { return getpid() != owner_; }

void IoEngine::close_inherited() {
    for (const auto &lane : lanes_) {
        for (const auto &transport : lane->transports) transport->close_inherited();
    }
}

void IoEngine::add_file(int fd, uint32_t lane) {
    const std::lock_guard<std::mutex> lock(mutex_);
    files_[fd] = {lane, next_file_version_++};
}

void IoEngine::add_memory(char *begin, uint64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spans_.push_back({begin, nbytes});
}

MemorySpan IoEngine::span(int index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return spans_[size_t(index)];
}

int IoEngine::span_of(const char *memory, uint64_t nbytes) const {
    for (size_t i = 0; i < spans_.size(); ++i) {
        const MemorySpan &span = spans_[i];
        if (memory >= span.begin && memory + nbytes <= span.begin + span.nbytes) return int(i);
    }
    return kNoSpan;
}

uint64_t IoEngine::submit(int op, zo_io_block *blocks, uint32_t num_blocks, char *base, bool urgent) {
    auto batch = std::make_shared<Batch>(Batch{op, blocks, num_blocks, base, num_blocks, num_blocks, {}});
    batch->result.size = sizeof(zo_io_result);
    batch->result.op = op;
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    open_.emplace(ticket, batch);
    if (stopping_) {
        batch->result.status = ZO_IO_OS_ERROR;
        batch->result.sys_errno = ESHUTDOWN;
        batch->unstarted = batch->unfinished = 0;
        return ticket;
    }
    std::vector<LaneBatch> parts(lanes_.size());
    uint64_t offset = 0;
    for (uint32_t row = 0; row < num_blocks; ++row) {
        const auto found = files_.find(blocks[row].fd);
        LaneBatch &part = parts[found == files_.end() ? 0 : found->second.lane];
        part.rows.push_back(row);
        part.offsets.push_back(offset);
        offset += blocks[row].nbytes;
    }
    stats_.jobs_queued += num_blocks;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].rows.empty()) continue;
        Lane &lane = *lanes_[i];
        const bool several = parts[i].rows.size() > 1;
        parts[i].batch = batch;
        (urgent ? lane.urgent : is_write(op) ? lane.writes : lane.reads).push_back(std::move(parts[i]));
        several ? lane.work.notify_all() : lane.work.notify_one();
        for (const auto &transport : lane.transports) transport->wake();
    }
    return ticket;
}

bool IoEngine::wait(uint64_t ticket, double timeout_s, zo_io_result *result) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = open_.find(ticket);
    if (found == open_.end()) return false;
    const std::shared_ptr<Batch> batch = found->second;
    const auto finished = [&batch] { return batch->unfinished == 0; };
    if (timeout_s < 0) {
        finished_.wait(lock, finished);
    } else {
        // A year stands for any longer time, which the clock could not represent.
        const std::chrono::duration<double> timeout(std::min(timeout_s, 3.2e7));
        if (!finished_.wait_for(lock, timeout, finished)) {
            *result = batch->result;
            result->status = ZO_IO_TIMEOUT;
            return true;
        }
    }
    *result = batch->result;
    open_.erase(ticket);
    return true;
}

bool IoEngine::done(uint64_t ticket, bool *is_done) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(ticket);
    if (found == open_.end()) return false;
    *is_done = found->second->unfinished == 0;
    return true;
}

void IoEngine::stats(zo_io_stats_t *stats) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *stats = stats_;
}

void IoEngine::fault(int kind, int64_t nth) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fault_kind_ = kind;
    fault_countdown_ = nth;
    stalled_ = false;
    wake_all();
}

int IoEngine::next_fault(int op) {
    if (!fault_strikes(fault_kind_, op) || --fault_countdown_ > 0) return ZO_FAULT_NONE;
    const int kind = fault_kind_;
    fault_kind_ = ZO_FAULT_NONE;
    if (kind == ZO_FAULT_STALL) stalled_ = true;
    return kind;
}

void IoEngine::hold_while_stalled() {
    std::unique_lock<std::mutex> lock(mutex_);
    unstalled_.wait(lock, [this] { return !stalled_; });
}

bool IoEngine::stalled() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stalled_;
}

bool IoEngine::take(Lane &lane, Job *job) {
    std::unique_lock<std::mutex> lock(mutex_);
    lane.work.wait(lock, [&] { return stopping_ || !lane.empty(); });
    if (lane.empty()) return false;
    pop(lane, job);
    return true;
}

bool IoEngine::try_take(Lane &lane, Job *job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lane.empty()) return false;
    pop(lane, job);
    return true;
}

void IoEngine::pop(Lane &lane, Job *job) {
    std::deque<LaneBatch> &queue = lane.choose();
    LaneBatch &part = queue.front();
    Batch &batch = *part.batch;
    const uint32_t row = part.rows[part.next];
    const zo_io_block &block = batch.blocks[row];
    const auto file = files_.find(block.fd);
    char *memory = batch.base + part.offsets[part.next];
    *job = {part.batch,
            row,
            memory,
            next_fault(batch.op),
            file == files_.end() ? 0 : file->second.version,
            span_of(memory, block.nbytes)};
    if (&queue != &lane.urgent) {
        lane.read_ahead_bytes += is_write(batch.op) ? -int64_t(block.nbytes) : int64_t(block.nbytes);
    }
    if (batch.unstarted == batch.num_blocks) batch.result.begin_ns = now_ns();
    --batch.unstarted;
    --stats_.jobs_queued;
    ++stats_.jobs_running;
    if (++part.next == part.rows.size()) queue.pop_front();
}

void IoEngine::finish(const Job &job, const BlockOutcome &outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Batch &batch = *job.batch;
    zo_io_result &result = batch.result;
    const zo_io_block &block = batch.blocks[job.block];
    --stats_.jobs_running;
    --batch.unfinished;
    if (outcome.status == ZO_IO_DONE) {
        result.bytes_done += block.nbytes;
        (is_write(batch.op) ? stats_.bytes_written : stats_.bytes_read) += block.nbytes;
    } else {
        if (result.status == ZO_IO_DONE || job.block < result.block) {
            result.status = outcome.status;
            result.sys_errno = outcome.sys_errno;
            result.block = job.block;
            result.expected_crc = block.crc;
            result.actual_crc = outcome.actual_crc;
        }
        drop_unstarted(job.batch);
    }
    if (batch.unfinished > 0) return;
    result.end_ns = now_ns();
    finished_.notify_all();
}

void IoEngine::drop_unstarted(const std::shared_ptr<Batch> &batch) {
    if (batch->unstarted == 0) return;
    const auto is_part = [&](const LaneBatch &part) { return part.batch == batch; };
    for (const auto &lane : lanes_) {
        for (auto *queue : {&lane->urgent, &lane->reads, &lane->writes}) {
            queue->erase(std::remove_if(queue->begin(), queue->end(), is_part), queue->end());
        }
    }
    stats_.jobs_queued -= batch->unstarted;
    batch->unfinished -= batch->unstarted;
    batch->unstarted = 0;
}

}  // namespace zo
