#include "io/engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace zo {
namespace {

bool is_write(int op) { return op == ZO_IO_WRITE; }

bool fault_strikes(int kind, int op) {
    switch (kind) {
        case ZO_FAULT_READ_EIO:
        case ZO_FAULT_READ_FLIP:
            return !is_write(op);
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

IoEngine::IoEngine(uint32_t num_threads) : owner_(getpid()) {
    const SignalsBlocked blocked;
    stats_.size = sizeof(stats_);
    stats_.num_threads = num_threads;
    try {
        for (uint32_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
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
    }
    work_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

bool IoEngine::is_forked_copy() const { return getpid() != owner_; }

uint64_t IoEngine::submit(int op, zo_io_block *blocks, uint32_t num_blocks, char *base, bool urgent) {
    auto batch = std::make_shared<Batch>(Batch{op, blocks, num_blocks, base, 0, 0, {}});
    batch->result.size = sizeof(zo_io_result);
    batch->result.op = op;
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    open_.emplace(ticket, batch);
    if (num_blocks > 0) {
        (urgent ? urgent_ : normal_).push_back(std::move(batch));
        stats_.jobs_queued += num_blocks;
        if (num_blocks == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
    }
    return ticket;
}

bool IoEngine::wait(uint64_t ticket, double timeout_s, zo_io_result *result) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = open_.find(ticket);
    if (found == open_.end()) return false;
    const std::shared_ptr<Batch> batch = found->second;
    const auto finished = [&batch] { return batch->finished(); };
    if (timeout_s < 0) {
        finished_.wait(lock, finished);
    } else {
        // A year stands for any longer time, which the clock could not represent.
        const std::chrono::duration<double> timeout(std::min(timeout_s, 3.2e7));
        if (!finished_.wait_for(lock, timeout, finished)) {
            *result = zo_io_result{};
            result->size = sizeof(zo_io_result);
            result->op = batch->op;
            result->status = ZO_IO_TIMEOUT;
            result->bytes_done = batch->result.bytes_done;
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
    *is_done = found->second->finished();
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
}

int IoEngine::next_fault(int op) {
    if (!fault_strikes(fault_kind_, op) || --fault_countdown_ > 0) return ZO_FAULT_NONE;
    const int kind = fault_kind_;
    fault_kind_ = ZO_FAULT_NONE;
    return kind;
}

void IoEngine::run() {
    Job job;
    while (take(&job))
        finish(job, transfer_block(job.batch->op, job.batch->blocks[job.block], job.memory, job.fault));
}

bool IoEngine::take(Job *job) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait(lock, [this] { return stopping_ || !urgent_.empty() || !normal_.empty(); });
    auto &queue = urgent_.empty() ? normal_ : urgent_;
    if (queue.empty()) return false;
    const std::shared_ptr<Batch> &batch = queue.front();
    *job = {batch, batch->num_started, batch->memory, next_fault(batch->op)};
    batch->memory += batch->blocks[batch->num_started].nbytes;
    --stats_.jobs_queued;
    if (++batch->num_started == batch->num_blocks) queue.pop_front();
    return true;
}

void IoEngine::finish(const Job &job, const BlockOutcome &outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Batch &batch = *job.batch;
    zo_io_result &result = batch.result;
    const zo_io_block &block = batch.blocks[job.block];
    (is_write(batch.op) ? stats_.busy_write_s : stats_.busy_read_s) += outcome.busy_s;
    ++batch.num_finished;
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
        if (batch.num_started < batch.num_blocks) {
            for (auto *queue : {&urgent_, &normal_}) {
                queue->erase(std::remove(queue->begin(), queue->end(), job.batch), queue->end());
            }
            stats_.jobs_queued -= batch.num_blocks - batch.num_started;
            batch.num_blocks = batch.num_started;
        }
    }
    if (batch.finished()) finished_.notify_all();
}

}  // namespace zo
