// A device in host memory. This half knows nothing of torch: streams, events, memory, policies, races and
// counts.
//
// A launch puts an operation into the queue of its stream. It runs when the host or another stream waits for
// it, or when the policy says so. One lock guards everything. Operations run under the lock, so they may not
// call Python: a thread that holds the lock and waits for the GIL would wait for a thread that holds the GIL
// and waits for the lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fake_gpu {

constexpr int kDevices = 4;
constexpr int kStreamsPerDevice = 20;
constexpr int kStreams = kDevices * kStreamsPerDevice;

// A stream is device * kStreamsPerDevice + number; number 0 is the device's default stream.
using Stream = int;

// By stream: how many of its operations come before. Two operations are ordered if the clock of one covers
// the other.
using Clock = std::array<uint64_t, kStreams>;

struct Span {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool writes = false;

    bool is_empty() const { return begin == end; }
    bool overlaps(const Span &other) const { return begin < other.end && other.begin < end; }
};

enum class Policy { kLate, kEager, kSideEarly, kSideLate, kRandom };

#define FAKE_GPU_COUNTS(X) \
    X(launches)            \
    X(uploads)             \
    X(downloads)           \
    X(upload_bytes)        \
    X(download_bytes)      \
    X(pageable_copies)     \
    X(events)              \
    X(stream_waits)        \
    X(event_syncs)         \
    X(stream_syncs) X(device_syncs) X(items) X(exchanges) X(allocations) X(blocks_made) X(blocks_reused)

enum Count {
#define X(name) k_##name,
    FAKE_GPU_COUNTS(X)
#undef X
        kNumCounts
};
extern const char *const kCountNames[kNumCounts];

struct Event {
    Stream stream = -1;
    uint64_t position = 0;
    Clock clock{};
    // The host's time when the stream reached the event. The queue shares it, since an event may go before.
    std::shared_ptr<double> reached_ms;
    int failed_queries = 0;
};

// Launches. `run` computes on host memory and must not touch Python.
void launch(Stream stream, const std::string &name, const std::vector<Span> &spans,
            std::function<void()> run);
void launch_upload(Stream stream, Span source, Span target, std::function<void()> run);
// `run` fills other memory than the target. Bytes come to the target when the host knows of the download.
void launch_download(Stream stream, Span source, Span target, std::function<void(void *)> run);

// An exchange with other processes. The stream copies `source` to `sent`; a thread outside sends it, fills
// `received` and calls `finish`; then the stream copies `received` to the targets. Other processes may need
// the sent bytes before this one waits for anything; `fetch` copies them.
struct Exchange {
    std::vector<char> sent;
    std::vector<char> received;
    Stream stream;
    uint64_t read_position = 0;
    bool is_read = false;
    bool is_finished = false;
};
// With several `targets`, `received` has the bytes between them too.
std::shared_ptr<Exchange> launch_exchange(Stream stream, Span source, const std::vector<Span> &targets);
bool is_read(const Exchange &exchange);
void fetch(const Exchange &exchange);
void finish(Exchange &exchange);

// Order.
void record(Event &event, Stream stream);
void wait_event(Stream stream, const Event &event);
void wait_stream(Stream stream, Stream first);
bool query_event(Event &event);
bool query_stream(Stream stream);
void synchronize_event(const Event &event);
void synchronize_stream(Stream stream);
void synchronize_device(int device);

// Memory. `allocate` returns nullptr if the device is full.
void *allocate(size_t nbytes, Stream home);
void release(void *address);
void record_stream(const void *address, Stream stream);
void empty_cache();
bool register_host(uintptr_t address, size_t nbytes);
bool unregister_host(uintptr_t address);
// Memory is in no registration, in one, or in parts: in several, or partly in one. A driver refuses to copy
// in parts.
enum class Registered { kNo, kYes, kInParts };
Registered registration_of(uintptr_t address, size_t nbytes);
void refuse_registration(bool refuse);
void set_memory_limit(int device, size_t nbytes);
size_t memory_limit(int device);
struct MemoryStats {
    int64_t allocated = 0;
    int64_t allocated_peak = 0;
    // With cached blocks, which are freed and not given back to the system.
    int64_t reserved = 0;
    int64_t reserved_peak = 0;
    int64_t num_retries = 0;
    int64_t num_ooms = 0;
};
MemoryStats memory_stats(int device);
void reset_peak(int device);

// Streams of the calling thread.
int current_device();
void set_current_device(int device);
int stream_number(int device);
void set_stream_number(int device, int number);
int next_stream_number(int device);
inline Stream stream_of(int device, int number) { return device * kStreamsPerDevice + number; }
inline Stream current_stream(int device) { return stream_of(device, stream_number(device)); }

// Random numbers: each draw takes the next number of its generator's sequence when it is launched.
struct RandomState {
    uint64_t seed = 0;
    uint64_t num_draws = 0;
};
RandomState &default_random_state(int device);
// A seed for one draw; the state then stands at the next one.
uint64_t draw(RandomState &state);

// Tests.
void set_policy(Policy policy, uint64_t seed);
void count(Count which, int64_t by = 1);
int64_t counted(int which);
int64_t num_queued();
// Each race once, with how often it was seen. This call forgets them.
std::vector<std::string> take_races();
// Runs everything, then forgets races, errors and counts.
void reset();
// The error of an operation; empty if none failed. Host synchronizations raise it.
std::string take_error();

}  // namespace fake_gpu
