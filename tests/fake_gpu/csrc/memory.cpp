// Device memory: a caching allocator in the order of streams, which reuses blocks at once and poisons those
// that it gives out.
//
// A freed block goes to what its home stream launches next, so a stream that still uses the block must be
// known by `record_stream`. A mistake shows twice: as poison in the result, and as a race with the operation
// that poisons.
#include "state.h"

#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace fake_gpu {

namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kDefaultLimit = size_t(4) << 30;

struct Block {
    char *address;
    size_t nbytes;
    Stream home;
    // Other streams that use the block.
    std::set<Stream> users;

    int device() const { return home / kStreamsPerDevice; }
    Span span() const { return {uintptr_t(address), uintptr_t(address) + nbytes, true}; }
};

// A freed block that other streams used: it is cached when they have reached these positions.
struct WaitingBlock {
    Block block;
    std::vector<std::pair<Stream, uint64_t>> until;
};

struct Memory {
    std::unordered_map<const void *, Block> live;
    std::array<std::multimap<size_t, Block>, kStreams> cached;
    // Blocks that came to the cache since the home stream's last allocation.
    std::array<std::vector<Span>, kStreams> newly_cached;
    std::vector<WaitingBlock> waiting;
    std::array<size_t, kDevices> limit;
    std::array<MemoryStats, kDevices> stats;

    Memory() { limit.fill(kDefaultLimit); }
};

Memory &memory() {
    static Memory *const one = new Memory;
    return *one;
}

void cache(Block block) {
    block.users.clear();
    memory().newly_cached[block.home].push_back(block.span());
    memory().cached[block.home].emplace(block.nbytes, block);
}

bool is_over(const WaitingBlock &waiting) {
    for (auto [stream, position] : waiting.until)
        if (state().queues[stream].num_done < position) return false;
    return true;
}

void cache_what_is_over() {
    std::erase_if(memory().waiting, [](const WaitingBlock &waiting) {
        if (!is_over(waiting)) return false;
        // The allocator saw that these uses were over; that orders this block's next use only.
        for (auto [stream, position] : waiting.until)
            forget_accesses_locked(stream, position, waiting.block.span());
        cache(waiting.block);
        return true;
    });
}

void give_back_cached(int device) {
    for (int number = 0; number < kStreamsPerDevice; number++) {
        memory().newly_cached[stream_of(device, number)].clear();
        auto &cached = memory().cached[stream_of(device, number)];
        for (auto &[nbytes, block] : cached) {
            forget_all_accesses_locked(block.span());
            std::free(block.address);
            memory().stats[device].reserved -= int64_t(nbytes);
        }
        cached.clear();
    }
}

// As cudaFree does, this waits for the device.
void empty_cache_locked(int device, Lock &lock) {
    for (int number = 0; number < kStreamsPerDevice; number++) {
        Stream stream = stream_of(device, number);
        run_until_locked(stream, state().queues[stream].num_launched, lock);
    }
    cache_what_is_over();
    give_back_cached(device);
}

bool fits(int device, size_t nbytes) {
    return size_t(memory().stats[device].reserved) + nbytes <= memory().limit[device];
}

bool take_cached(Stream home, size_t nbytes, Block &block) {
    auto &cached = memory().cached[home];
    auto found = cached.lower_bound(nbytes);
    if (found == cached.end() || found->first > 2 * nbytes) return false;
    block = found->second;
    cached.erase(found);
    state().counts[k_blocks_reused]++;
    return true;
}

bool make_new(Stream home, size_t nbytes, Block &block, Lock &lock) {
    int device = home / kStreamsPerDevice;
    MemoryStats &stats = memory().stats[device];
    if (!fits(device, nbytes)) {
        stats.num_retries++;
        empty_cache_locked(device, lock);
        if (!fits(device, nbytes)) {
            stats.num_ooms++;
            return false;
        }
    }
    block = {static_cast<char *>(std::aligned_alloc(kAlignment, nbytes)), nbytes, home, {}};
    state().counts[k_blocks_made]++;
    stats.reserved += int64_t(nbytes);
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
    return true;
}

// Any cached block may be the one that this allocation gets, so all of them must be done with.
void check_newly_cached(Stream home) {
    join(state().queues[home].clock, state().host);
    check_locked(home, "the next allocation", memory().newly_cached[home]);
    memory().newly_cached[home].clear();
}

}  // namespace

void *allocate(size_t nbytes, Stream home) {
    Lock lock(state().mutex);
    nbytes = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    cache_what_is_over();
    check_newly_cached(home);
    Block block;
    if (!take_cached(home, nbytes, block) && !make_new(home, nbytes, block, lock)) return nullptr;
    state().counts[k_allocations]++;
    MemoryStats &stats = memory().stats[block.device()];
    stats.allocated += int64_t(block.nbytes);
    stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
    memory().live[block.address] = block;
    QueuedItem poison;
    poison.run = [block] { std::memset(block.address, 0xFF, block.nbytes); };
    launch_locked(home, "the allocator's poison", {block.span()}, std::move(poison));
    return block.address;
}

void release(void *address) {
    Lock lock(state().mutex);
    auto found = memory().live.find(address);
    if (found == memory().live.end()) return;
    Block block = found->second;
    memory().live.erase(found);
    memory().stats[block.device()].allocated -= int64_t(block.nbytes);
    if (block.users.empty()) return cache(block);
    WaitingBlock waiting{block, {}};
    for (Stream user : block.users) waiting.until.emplace_back(user, state().queues[user].num_launched);
    memory().waiting.push_back(std::move(waiting));
}

void record_stream(const void *address, Stream stream) {
    Lock lock(state().mutex);
    auto found = memory().live.find(address);
    if (found != memory().live.end() && found->second.home != stream) found->second.users.insert(stream);
}

void empty_cache() {
    Lock lock(state().mutex);
    for (int device = 0; device < kDevices; device++) empty_cache_locked(device, lock);
}

void set_memory_limit(int device, size_t nbytes) {
    Lock lock(state().mutex);
    memory().limit[device] = nbytes ? nbytes : kDefaultLimit;
}

size_t memory_limit(int device) {
    Lock lock(state().mutex);
    return memory().limit[device];
}

MemoryStats memory_stats(int device) {
    Lock lock(state().mutex);
    return memory().stats[device];
}

void reset_peak(int device) {
    Lock lock(state().mutex);
    MemoryStats &stats = memory().stats[device];
    stats.allocated_peak = stats.allocated;
    stats.reserved_peak = stats.reserved;
}

void forget_blocks_locked() {
    cache_what_is_over();
    for (auto &spans : memory().newly_cached) spans.clear();
}

// Random numbers

RandomState &default_random_state(int device) {
    static auto *const states = new std::array<RandomState, kDevices>;
    return (*states)[device];
}

uint64_t draw(RandomState &random) {
    Lock lock(state().mutex);
    // splitmix64: neighbours in the sequence give seeds that have nothing in common.
    uint64_t z = random.seed + 0x9E3779B97F4A7C15u * ++random.num_draws;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

}  // namespace fake_gpu
