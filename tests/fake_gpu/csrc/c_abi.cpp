// Functions that Python calls by ctypes, which releases the GIL during a call.
#include <cstring>

#include "device.h"

using namespace fake_gpu;

namespace {

thread_local std::string text;

const char *kept(std::string value) {
    text = std::move(value);
    return text.c_str();
}

}  // namespace

extern "C" {

void fake_gpu_set_policy(int policy, uint64_t seed) { set_policy(Policy(policy), seed); }
void fake_gpu_reset() { reset(); }
int64_t fake_gpu_num_queued() { return num_queued(); }

// Lines of text; the pointer is valid until the thread's next call.
const char *fake_gpu_take_races() {
    std::string lines;
    for (const std::string &race : take_races()) lines += race + "\n";
    return kept(lines);
}
const char *fake_gpu_take_error() { return kept(take_error()); }

int fake_gpu_num_counts() { return kNumCounts; }
const char *fake_gpu_count_name(int which) { return kCountNames[which]; }
int64_t fake_gpu_counted(int which) { return counted(which); }

int fake_gpu_register_host(uintptr_t address, size_t nbytes) { return register_host(address, nbytes); }
int fake_gpu_unregister_host(uintptr_t address) { return unregister_host(address); }
void fake_gpu_refuse_registration(int refuse) { refuse_registration(refuse); }

void fake_gpu_set_memory_limit(int device, size_t nbytes) { set_memory_limit(device, nbytes); }
size_t fake_gpu_memory_limit(int device) { return memory_limit(device); }
void fake_gpu_memory_stats(int device, int64_t *values) {
    MemoryStats stats = memory_stats(device);
    std::memcpy(values, &stats, sizeof(stats));
}
void fake_gpu_reset_peak(int device) { reset_peak(device); }
void fake_gpu_empty_cache() { empty_cache(); }

// A source inside of the target is in its place already, unless it is the whole target.
void *fake_gpu_launch_exchange(int stream, uintptr_t source, size_t sent_bytes, uintptr_t target,
                               size_t received_bytes) {
    uintptr_t source_end = source + sent_bytes, target_end = target + received_bytes;
    std::vector<Span> targets{{target, target_end, true}};
    if (target <= source && source_end <= target_end && sent_bytes < received_bytes)
        targets = {{target, source, true}, {source_end, target_end, true}};
    return new std::shared_ptr<Exchange>(launch_exchange(stream, {source, source_end, false}, targets));
}
void *fake_gpu_exchange_sent(void *exchange) {
    return (*static_cast<std::shared_ptr<Exchange> *>(exchange))->sent.data();
}
void *fake_gpu_exchange_received(void *exchange) {
    return (*static_cast<std::shared_ptr<Exchange> *>(exchange))->received.data();
}
int fake_gpu_exchange_is_read(void *exchange) {
    return is_read(**static_cast<std::shared_ptr<Exchange> *>(exchange));
}
void fake_gpu_fetch_exchange(void *exchange) { fetch(**static_cast<std::shared_ptr<Exchange> *>(exchange)); }
// The last call with this exchange, which it frees.
void fake_gpu_finish_exchange(void *exchange) {
    auto *held = static_cast<std::shared_ptr<Exchange> *>(exchange);
    finish(**held);
    delete held;
}

int fake_gpu_current_device() { return current_device(); }
void fake_gpu_set_current_device(int device) { set_current_device(device); }

void fake_gpu_get_random(int device, uint64_t *seed, uint64_t *num_draws) {
    *seed = default_random_state(device).seed;
    *num_draws = default_random_state(device).num_draws;
}
void fake_gpu_set_random(int device, uint64_t seed, uint64_t num_draws) {
    default_random_state(device) = {seed, num_draws};
}

}  // extern "C"
