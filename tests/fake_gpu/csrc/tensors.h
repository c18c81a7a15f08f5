// Device tensors as memory: what an operation needs to know of one when it runs late, when the tensor may be
// gone.
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

// Inside, operations run as plain kernels: without autograd, autocast and modes of the thread that runs them,
// which need not be the one that launched them, and without Python.
struct PlainKernels {
    PlainKernels();

  private:
    c10::impl::ForceDispatchKeyGuard guard_;
};

// A tensor without its owner. Closures may not own a tensor of the program's: the last owner of one that
// Python has seen waits for the GIL.
class TensorMemory {
  public:
    TensorMemory() = default;
    // Of a host tensor: a copy of its values.
    explicit TensorMemory(const at::Tensor &tensor);

    bool is_on_device() const { return is_on_device_; }
    Span span(bool writes) const;
    // A host tensor over this memory.
    at::Tensor on_host() const;
    // The same over other memory of the same layout.
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

// Raises what a late operation has raised.
void raise_late_error();

c10::Allocator *allocator();
void resize_storage(c10::StorageImpl *storage, size_t nbytes);

}  // namespace fake_gpu
