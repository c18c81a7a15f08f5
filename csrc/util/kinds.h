// Facts of a zo_kind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero_offload.h"

namespace zo {

inline size_t element_bytes(uint32_t kind) { return kind == ZO_FP32 ? sizeof(float) : sizeof(uint16_t); }

}  // namespace zo
