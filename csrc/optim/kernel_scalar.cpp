// Baseline flags: runs everywhere and defines the bits.
#include "simd/vec_scalar.h"

namespace zo {
namespace {
using Vec = ScalarVec;
}  // namespace
}  // namespace zo

#include "optim/kernel.inl"

namespace zo {
const UpdateTable update_scalar = kTable;
}  // namespace zo
