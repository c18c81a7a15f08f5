#include "cpu/features.h"

#if ZO_ARM64

#include "simd/vec_neon.h"

#include "compact/kernel.inl"

namespace zo {
const CompactTable compact_neon = kCompactTable;
}  // namespace zo

#endif  // ZO_ARM64
