#include "cpu/features.h"

#if ZO_ARM64

#include "simd/vec_neon.h"

#include "reduce/kernel.inl"

namespace zo {
const ReduceTable reduce_neon = kTable;
}  // namespace zo

#endif  // ZO_ARM64
