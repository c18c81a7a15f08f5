// Other processes of this machine: words in memory that they map too.
#pragma once

#include <cstdint>

namespace zo {

// Everything written before is seen by who waits for the word.
void word_post(int64_t *word, int64_t value);

// Returns 1 once the word is at least `at_least`, 0 when the time is up.
int word_wait(const int64_t *word, int64_t at_least, int64_t timeout_us);

}  // namespace zo
