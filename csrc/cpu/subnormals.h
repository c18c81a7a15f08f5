// Arithmetic with subnormal numbers, in whatever mode the thread is.
#pragma once

#include "cpu/features.h"

namespace zo {

// How a thread computes, and the bits that put 0 in the place of subnormal numbers: FTZ (results) and DAZ
// (operands) on x86, FZ (both) on arm64. torch.set_flush_denormal sets them for the thread that calls it, and
// new threads inherit them. The compiler does not know that arithmetic depends on them. The clobbers of
// memory keep a computation between two changes, if its loads follow the first and its stores precede the
// second.
#if ZO_X86
using FloatMode = uint32_t;
constexpr FloatMode kFlushing = 1u << 15 | 1u << 6;
inline FloatMode float_mode() {
    FloatMode mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
}
inline void set_float_mode(FloatMode mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif ZO_ARM64
using FloatMode = uint64_t;
constexpr FloatMode kFlushing = 1u << 24;
inline FloatMode float_mode() {
    FloatMode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}
inline void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
using FloatMode = uint32_t;
constexpr FloatMode kFlushing = 0;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

// While it lives, its thread computes with subnormal numbers: the same bits whichever thread has the work.
class KeepSubnormals {
  public:
    KeepSubnormals() : before_(float_mode()) {
        if (before_ & kFlushing) set_float_mode(before_ & ~kFlushing);
    }
    ~KeepSubnormals() {
        if (before_ & kFlushing) set_float_mode(before_);
    }
    KeepSubnormals(const KeepSubnormals &) = delete;
    KeepSubnormals &operator=(const KeepSubnormals &) = delete;

  private:
    const FloatMode before_;
};

}  // namespace zo
