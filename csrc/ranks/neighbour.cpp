#include "ranks/neighbour.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace zo {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Who comes within some microseconds, as ranks in step do, costs no sleep; who is computing keeps no core
// busy here.
constexpr int kSpins = 2000;
constexpr microseconds kYieldFor{500};
constexpr microseconds kFirstSleep{20}, kLongestSleep{500};

bool reached(const int64_t *word, int64_t at_least) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= at_least;
}

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void word_post(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int word_wait(const int64_t *word, int64_t at_least, int64_t timeout_us) {
    for (int i = 0; i < kSpins; ++i) {
        if (reached(word, at_least)) return 1;
        pause_briefly();
    }
    const auto begin = Clock::now();
    const auto end = begin + microseconds(timeout_us);
    microseconds sleep = kFirstSleep;
    while (!reached(word, at_least)) {
        const auto now = Clock::now();
        if (now >= end) return 0;
        if (now < begin + kYieldFor) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(sleep);
            sleep = std::min(2 * sleep, kLongestSleep);
        }
    }
    return 1;
}

}  // namespace zo
