// Baseline flags: runs everywhere and defines the bits.
#include "simd/vec_scalar.h"

namespace zo {
namespace {
using Vec = ScalarVec;
}  // namespace
}  // namespace zo

#include "compact/kernel.inl"

namespace zo {
const CompactTable compact_scalar = kCompactTable;
}  // namespace zo
