#include "util/status.h"

#include <cstdarg>
#include <cstdio>

namespace zo {
namespace {

thread_local char message[512] = "";

}  // namespace

int fail(int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return status;
}

const char *last_error() { return message; }

}  // namespace zo
