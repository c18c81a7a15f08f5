// Baseline flags: runs everywhere and defines the bits.
#include "simd/vec_scalar.h"

namespace zo {
namespace {
using Vec = ScalarVec;
using Squares = ScalarSquares;
}  // namespace
}  // namespace zo

#include "reduce/kernel.inl"

namespace zo {
const ReduceTable reduce_scalar = kTable;
}  // namespace zo
