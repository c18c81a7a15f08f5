// Device tensors as memory. An operation that runs late needs no more of a tensor, which may be gone by then.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "device.h"

namespace fake_gpu {

constexpr auto kFakeGpu = c10::DeviceType::PrivateUse1;

inline bool is_ours(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == kFakeGpu;
}

inline int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

// While it lives, operations of this thread run as plain kernels: without autograd, autocast, modes and
// Python. Another thread may have launched them.
struct PlainKernels {
    PlainKernels();

  private:
    c10::impl::ForceDispatchKeyGuard guard_;
};

// A tensor's memory without its owner. Closures may not own a tensor of the program: the last owner of a
// tensor that Python has seen waits for the GIL.
class TensorMemory {
  public:
    TensorMemory() = default;
    // Of a host tensor: a copy of its values.
    explicit TensorMemory(const at::Tensor &tensor);

    bool is_on_device() const { return is_on_device_; }
    Span span(bool writes) const;
    // A host tensor over this memory.
    at::Tensor on_host() const;
    // A host tensor over other memory of the same layout.
    at::Tensor over(void *address) const;

  private:
    bool is_defined_ = false;
    bool is_on_device_ = false;
    void *address_ = nullptr;
    std::vector<int64_t> sizes_;
    std::vector<int64_t> strides_;
    at::ScalarType dtype_ = at::kFloat;
    at::Tensor host_values_;
};

// Raises the error of a late operation.
void raise_late_error();

c10::Allocator *allocator();
void resize_storage(c10::StorageImpl *storage, size_t nbytes);

}  // namespace fake_gpu
