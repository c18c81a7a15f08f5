// CRC-32C of a byte range, by the fastest means this processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zo {

uint32_t crc32c(uint32_t seed, const void *data, size_t nbytes);

}  // namespace zo
