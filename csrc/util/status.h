// The reason of the last failure, one per thread, and the only way to make a failing status.
#pragma once

namespace zo {

// Keeps the formatted reason for zo_last_error and returns `status`: callers write `return fail(...)`.
int fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

const char *last_error();

}  // namespace zo
