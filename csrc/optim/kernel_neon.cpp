#include "cpu/features.h"

#if ZO_ARM64

#include "simd/vec_neon.h"

#include "optim/kernel.inl"

namespace zo {
const UpdateTable update_neon = kTable;
}  // namespace zo

#endif  // ZO_ARM64
