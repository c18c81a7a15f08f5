#include "cpu/features.h"

#if ZO_X86

#include "simd/vec_avx512.h"

#include "compact/kernel.inl"

namespace zo {
const CompactTable compact_avx512 = kCompactTable;
}  // namespace zo

#endif  // ZO_X86
