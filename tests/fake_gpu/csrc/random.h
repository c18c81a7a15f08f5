// A generator whose draws do not depend on when operations run.
#pragma once

#include <ATen/core/Generator.h>

namespace fake_gpu {

const at::Generator &default_generator(int device);
at::Generator new_generator(int device);
// A generator of the CPU for one operation. Its seed is the next draw of the device's generator.
at::Generator draw_generator(const at::Generator &generator);

}  // namespace fake_gpu
