// Queues of operations, events, and the times at which operations run.
#include "state.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include <ATen/Parallel.h>

namespace fake_gpu {

const char *const kCountNames[kNumCounts] = {
#define X(name) #name,
    FAKE_GPU_COUNTS(X)
#undef X
};

State &state() {
    static State *const one = new State;
    return *one;
}

void join(Clock &into, const Clock &other) {
    for (int i = 0; i < kStreams; i++) into[i] = std::max(into[i], other[i]);
}

namespace {

// A program that asks an event again and again waits for it. A device would reach the event meanwhile.
constexpr int kQueriesBeforeProgress = 100;

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

bool is_runnable(const Queue &queue) {
    if (queue.items.empty()) return false;
    const QueuedItem &item = queue.items.front();
    if (item.wait_for >= 0 && state().queues[item.wait_for].num_done < item.wait_position) return false;
    return !item.waits_outside();
}

void run_front(Queue &queue) {
    QueuedItem item = std::move(queue.items.front());
    queue.items.pop_front();
    try {
        // The thread that waits computes. It uses the program's number of threads, since bits depend on it.
        at::init_num_threads();
        if (item.run) item.run();
    } catch (const std::exception &error) {
        // As on a GPU: the launch has returned, so a later synchronization raises the error.
        if (state().error.empty()) state().error = error.what();
    }
    queue.num_done++;
}

bool is_side(Stream stream) { return stream % kStreamsPerDevice != 0; }

// Runs all that can run on side streams, or on default streams.
bool drain(bool side) {
    bool has_run = false;
    for (Stream stream = 0; stream < kStreams; stream++) {
        if (is_side(stream) != side) continue;
        for (Queue &queue = state().queues[stream]; is_runnable(queue); has_run = true) run_front(queue);
    }
    return has_run;
}

void drain_all() {
    while (drain(false) | drain(true)) continue;
}

void run_some_at_random() {
    State &s = state();
    for (int steps = int(s.random() % 4); steps > 0; steps--) {
        Stream first = Stream(s.random() % kStreams);
        for (int i = 0; i < kStreams; i++) {
            Queue &queue = s.queues[(first + i) % kStreams];
            if (!is_runnable(queue)) continue;
            run_front(queue);
            break;
        }
    }
}

// Runs the operations that the policy lets run after a launch.
void let_run() {
    switch (state().policy) {
        case Policy::kLate:
            break;
        case Policy::kEager:
            drain_all();
            break;
        case Policy::kSideEarly:
            while (drain(true)) continue;
            break;
        case Policy::kSideLate:
            while (drain(false)) continue;
            break;
        case Policy::kRandom:
            run_some_at_random();
            break;
    }
    if (state().policy != Policy::kLate) state().changed.notify_all();
}

uint64_t enqueue_locked(Stream stream, QueuedItem item) {
    Queue &queue = state().queues[stream];
    queue.clock[stream] = ++queue.num_launched;
    queue.items.push_back(std::move(item));
    return queue.num_launched;
}

void wait_locked(Stream stream, Stream first, uint64_t position, const Clock &clock) {
    if (first == stream) return;
    state().counts[k_stream_waits]++;
    join(state().queues[stream].clock, clock);
    QueuedItem item;
    item.wait_for = first;
    item.wait_position = position;
    enqueue_locked(stream, std::move(item));
    let_run();
}

}  // namespace

uint64_t launch_locked(Stream stream, const std::string &name, const std::vector<Span> &spans,
                       QueuedItem item) {
    // The host launches this now, so all that the host knows to be over comes before.
    join(state().queues[stream].clock, state().host);
    check_locked(stream, name, spans);
    uint64_t position = enqueue_locked(stream, std::move(item));
    remember_locked(stream, name, spans);
    let_run();
    return position;
}

void launch(Stream stream, const std::string &name, const std::vector<Span> &spans,
            std::function<void()> run) {
    Lock lock(state().mutex);
    state().counts[k_launches]++;
    QueuedItem item;
    item.run = std::move(run);
    launch_locked(stream, name, spans, std::move(item));
}

std::shared_ptr<Exchange> launch_exchange(Stream stream, Span source, const std::vector<Span> &targets) {
    Lock lock(state().mutex);
    state().counts[k_exchanges]++;
    auto exchange = std::make_shared<Exchange>();
    exchange->stream = stream;
    exchange->sent.resize(source.end - source.begin);
    exchange->received.resize(targets.back().end - targets.front().begin);
    QueuedItem reading, writing;
    reading.run = [exchange, source] {
        std::memcpy(exchange->sent.data(), reinterpret_cast<void *>(source.begin), exchange->sent.size());
        exchange->is_read = true;
    };
    writing.run = [exchange, targets] {
        for (const Span &target : targets)
            std::memcpy(reinterpret_cast<void *>(target.begin),
                        &exchange->received[target.begin - targets.front().begin], target.end - target.begin);
    };
    writing.exchange = exchange;
    std::vector<Span> spans = targets;
    spans.push_back(source);
    exchange->read_position = launch_locked(stream, "collective", spans, std::move(reading));
    enqueue_locked(stream, std::move(writing));
    // The collective uses all of these spans until its second part is over.
    remember_locked(stream, "collective", spans);
    return exchange;
}

bool is_read(const Exchange &exchange) {
    Lock lock(state().mutex);
    return exchange.is_read;
}

void fetch(const Exchange &exchange) {
    Lock lock(state().mutex);
    run_until_locked(exchange.stream, exchange.read_position, lock);
}

void finish(Exchange &exchange) {
    Lock lock(state().mutex);
    exchange.is_finished = true;
    let_run();
    state().changed.notify_all();
}

// The queue may change wherever the lock is released, so each turn looks at it anew.
void run_until_locked(Stream stream, uint64_t position, Lock &lock) {
    Queue &queue = state().queues[stream];
    while (queue.num_done < position) {
        const QueuedItem &item = queue.items.front();
        if (item.wait_for >= 0 && state().queues[item.wait_for].num_done < item.wait_position) {
            run_until_locked(item.wait_for, item.wait_position, lock);
        } else if (item.waits_outside()) {
            state().changed.wait(lock);
        } else {
            run_front(queue);
        }
    }
    state().changed.notify_all();
}

void host_learns_locked(const Clock &clock) {
    join(state().host, clock);
    finish_known_copies_locked();
    forget_known_accesses_locked();
}

// Order

void record(Event &event, Stream stream) {
    Lock lock(state().mutex);
    state().counts[k_events]++;
    Queue &queue = state().queues[stream];
    join(queue.clock, state().host);
    event.reached_ms = std::make_shared<double>(0);
    event.failed_queries = 0;
    QueuedItem item;
    item.run = [reached = event.reached_ms] { *reached = now_ms(); };
    event.position = enqueue_locked(stream, std::move(item));
    event.stream = stream;
    event.clock = queue.clock;
    let_run();
}

void wait_event(Stream stream, const Event &event) {
    if (event.stream < 0) return;
    Lock lock(state().mutex);
    wait_locked(stream, event.stream, event.position, event.clock);
}

void wait_stream(Stream stream, Stream first) {
    Lock lock(state().mutex);
    const Queue &queue = state().queues[first];
    wait_locked(stream, first, queue.num_launched, Clock(queue.clock));
}

bool query_event(Event &event) {
    if (event.stream < 0) return true;
    Lock lock(state().mutex);
    if (state().policy == Policy::kRandom) run_some_at_random();
    if (++event.failed_queries > kQueriesBeforeProgress) run_until_locked(event.stream, event.position, lock);
    bool is_over = state().queues[event.stream].num_done >= event.position;
    if (is_over) host_learns_locked(event.clock);
    return is_over;
}

bool query_stream(Stream stream) {
    Lock lock(state().mutex);
    const Queue &queue = state().queues[stream];
    bool is_over = queue.num_done == queue.num_launched;
    if (is_over) host_learns_locked(Clock(queue.clock));
    return is_over;
}

void synchronize_event(const Event &event) {
    Lock lock(state().mutex);
    state().counts[k_event_syncs]++;
    if (event.stream < 0) return;
    Clock clock = event.clock;
    run_until_locked(event.stream, event.position, lock);
    host_learns_locked(clock);
}

void synchronize_stream(Stream stream) {
    Lock lock(state().mutex);
    state().counts[k_stream_syncs]++;
    Clock clock = state().queues[stream].clock;
    run_until_locked(stream, state().queues[stream].num_launched, lock);
    host_learns_locked(clock);
}

void synchronize_device(int device) {
    Lock lock(state().mutex);
    state().counts[k_device_syncs]++;
    for (int number = 0; number < kStreamsPerDevice; number++) {
        Stream stream = stream_of(device, number);
        Clock clock = state().queues[stream].clock;
        run_until_locked(stream, state().queues[stream].num_launched, lock);
        host_learns_locked(clock);
    }
}

// Streams of the calling thread

namespace {
thread_local int device_here = 0;
thread_local std::array<int, kDevices> stream_numbers_here{};
std::array<std::atomic<int>, kDevices> num_streams_made;
}  // namespace

int current_device() { return device_here; }
void set_current_device(int device) { device_here = device; }
int stream_number(int device) { return stream_numbers_here[device]; }
void set_stream_number(int device, int number) { stream_numbers_here[device] = number; }
// A pool of streams, as on CUDA: after the last one comes the first again.
int next_stream_number(int device) { return 1 + num_streams_made[device]++ % (kStreamsPerDevice - 1); }

// Tests

void set_policy(Policy policy, uint64_t seed) {
    Lock lock(state().mutex);
    state().policy = policy;
    state().random.seed(seed);
}

void count(Count which, int64_t by) {
    Lock lock(state().mutex);
    state().counts[which] += by;
}

int64_t counted(int which) {
    Lock lock(state().mutex);
    return state().counts[which];
}

int64_t num_queued() {
    Lock lock(state().mutex);
    int64_t total = 0;
    for (const Queue &queue : state().queues) total += int64_t(queue.items.size());
    return total;
}

std::string take_error() {
    Lock lock(state().mutex);
    return std::exchange(state().error, {});
}

void reset() {
    for (int device = 0; device < kDevices; device++) synchronize_device(device);
    Lock lock(state().mutex);
    forget_copies_locked();
    forget_blocks_locked();
    for (Queue &queue : state().queues) queue.accesses.clear();
    state().races.clear();
    state().counts.fill(0);
    state().error.clear();
}

}  // namespace fake_gpu
