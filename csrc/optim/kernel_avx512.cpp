#include "cpu/features.h"

#if ZO_X86

#include "simd/vec_avx512.h"

#include "optim/kernel.inl"

namespace zo {
const UpdateTable update_avx512 = kTable;
}  // namespace zo

#endif  // ZO_X86
