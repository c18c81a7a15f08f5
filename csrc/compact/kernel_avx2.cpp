#include "cpu/features.h"

#if ZO_X86

#include "simd/vec_avx2.h"

#include "compact/kernel.inl"

namespace zo {
const CompactTable compact_avx2 = kCompactTable;
}  // namespace zo

#endif  // ZO_X86
