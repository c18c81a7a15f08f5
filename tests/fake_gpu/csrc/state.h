// State that the parts of the device share. `mutex` guards all of it; functions named `*_locked` expect it
// held.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "device.h"

namespace fake_gpu {

using Lock = std::unique_lock<std::mutex>;

struct QueuedItem {
    std::function<void()> run;
    // The item waits until that stream has reached the position.
    Stream wait_for = -1;
    uint64_t wait_position = 0;
    // The item waits until this exchange is finished.
    std::shared_ptr<Exchange> exchange;

    bool waits_outside() const { return exchange && !exchange->is_finished; }
};

struct Access {
    Span span;
    uint64_t position;
    std::string name;
};

struct Queue {
    std::deque<QueuedItem> items;
    uint64_t num_launched = 0;
    uint64_t num_done = 0;
    // All that comes before the next launch.
    Clock clock{};
    std::deque<Access> accesses;
};

struct State {
    std::mutex mutex;
    // Something became ready or was done.
    std::condition_variable changed;
    std::array<Queue, kStreams> queues;
    // All that the host knows to be over.
    Clock host{};
    Policy policy = Policy::kLate;
    std::mt19937_64 random{0};
    std::map<std::string, int64_t> races;
    std::array<int64_t, kNumCounts> counts{};
    std::string error;
};

// The state lives as long as the process: threads of autograd may still run while statics go.
State &state();

void join(Clock &into, const Clock &other);

// streams.cpp
uint64_t launch_locked(Stream stream, const std::string &name, const std::vector<Span> &spans,
                       QueuedItem item);
void run_until_locked(Stream stream, uint64_t position, Lock &lock);
void host_learns_locked(const Clock &clock);

// races.cpp
void check_locked(Stream stream, const std::string &name, const std::vector<Span> &spans);
void remember_locked(Stream stream, const std::string &name, const std::vector<Span> &spans);
void report_locked(const std::string &race);
// Drops accesses to this memory that the host knows to be over.
void forget_accesses_locked(Stream stream, uint64_t position, const Span &span);
void forget_known_accesses_locked();
// This memory goes, and other memory may come at its address.
void forget_all_accesses_locked(const Span &span);

// host_memory.cpp
// Ends copies that the host knows to be over now. Downloads bring their bytes, and sources of uploads must be
// as they were.
void finish_known_copies_locked();
void forget_copies_locked();

// memory.cpp
void forget_blocks_locked();

}  // namespace fake_gpu
