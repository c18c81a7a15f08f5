// A race is two accesses to the same memory, one of them a write, that nothing orders. The timing does not
// matter.
#include "state.h"

namespace fake_gpu {

namespace {

std::string told(const std::string &name, bool writes, Stream stream) {
    return name + (writes ? " writes" : " reads") + " on stream " +
           std::to_string(stream % kStreamsPerDevice) + " of device " +
           std::to_string(stream / kStreamsPerDevice);
}

}  // namespace

void report_locked(const std::string &race) { state().races[race]++; }

void check_locked(Stream stream, const std::string &name, const std::vector<Span> &spans) {
    const Clock &before = state().queues[stream].clock;
    for (Stream other = 0; other < kStreams; other++) {
        if (other == stream) continue;
        const auto &accesses = state().queues[other].accesses;
        for (auto access = accesses.rbegin(); access != accesses.rend() && access->position > before[other];
             ++access)
            for (const Span &span : spans)
                if ((span.writes || access->span.writes) && span.overlaps(access->span))
                    report_locked(told(name, span.writes, stream) + ", and nothing orders it after " +
                                  told(access->name, access->span.writes, other));
    }
}

void remember_locked(Stream stream, const std::string &name, const std::vector<Span> &spans) {
    Queue &queue = state().queues[stream];
    for (const Span &span : spans)
        if (!span.is_empty()) queue.accesses.push_back({span, queue.num_launched, name});
}

void forget_accesses_locked(Stream stream, uint64_t position, const Span &span) {
    std::erase_if(state().queues[stream].accesses, [&](const Access &access) {
        return access.position <= position && access.span.overlaps(span);
    });
}

void forget_all_accesses_locked(const Span &span) {
    for (Stream stream = 0; stream < kStreams; stream++)
        forget_accesses_locked(stream, state().queues[stream].num_launched, span);
}

// Every launch comes after what the host knows to be over, so these can no longer take part in a race.
void forget_known_accesses_locked() {
    for (Stream stream = 0; stream < kStreams; stream++) {
        auto &accesses = state().queues[stream].accesses;
        while (!accesses.empty() && accesses.front().position <= state().host[stream]) accesses.pop_front();
    }
}

std::vector<std::string> take_races() {
    Lock lock(state().mutex);
    std::vector<std::string> found;
    for (const auto &[race, times] : state().races)
        found.push_back(race + " (" + std::to_string(times) + " times)");
    state().races.clear();
    return found;
}

}  // namespace fake_gpu
