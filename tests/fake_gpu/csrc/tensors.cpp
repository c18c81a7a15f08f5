// Tensors that torch makes, copies, resizes and views by calls of their own.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace fake_gpu {

using at::Tensor;

PlainKernels::PlainKernels()
    : guard_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
             c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

TensorMemory::TensorMemory(const Tensor &tensor) {
    if (!tensor.defined()) return;
    is_defined_ = true;
    is_on_device_ = is_ours(tensor);
    if (!is_on_device_) {
        PlainKernels plain;
        host_values_ = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            host_values_.unsafeGetTensorImpl()->set_wrapped_number(true);
        return;
    }
    address_ = tensor.numel() ? tensor.data_ptr() : nullptr;
    TORCH_CHECK(address_ || !tensor.numel(), "the memory of a tensor of ", tensor.numel(),
                " elements has gone");
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
    dtype_ = tensor.scalar_type();
}

Span TensorMemory::span(bool writes) const {
    if (!address_) return {};
    int64_t last = 0;
    for (size_t i = 0; i < sizes_.size(); i++) last += (sizes_[i] - 1) * strides_[i];
    auto begin = uintptr_t(address_);
    return {begin, begin + size_t(last + 1) * c10::elementSize(dtype_), writes};
}

Tensor TensorMemory::on_host() const {
    if (!is_defined_) return Tensor();
    return is_on_device_ ? over(address_) : host_values_;
}

Tensor TensorMemory::over(void *address) const {
    auto options = at::TensorOptions().dtype(dtype_).device(at::kCPU);
    return address_ ? at::from_blob(address, sizes_, strides_, options)
                    : at::empty_strided(sizes_, strides_, options);
}

void raise_late_error() {
    std::string error = take_error();
    TORCH_CHECK(error.empty(), "an operation launched earlier failed on fakegpu: ", error);
}

// Memory

namespace {

c10::DataPtr allocate_data(size_t nbytes, int device) {
    c10::Device where(kFakeGpu, c10::DeviceIndex(device));
    if (nbytes == 0) return {nullptr, nullptr, &release, where};
    void *address = allocate(nbytes, current_stream(device));
    TORCH_CHECK_WITH(OutOfMemoryError, address, "fakegpu out of memory. Tried to allocate ", nbytes,
                     " bytes. Device ", device, " has a capacity of ", memory_limit(device),
                     " bytes of which ", memory_stats(device).allocated, " are allocated");
    return {address, address, &release, where};
}

// As CUDA's allocator, this notes nothing of memory that it did not allocate, such as a DLPack alias of its
// own.
void record_use(const c10::DataPtr &pointer, const c10::Stream &stream) {
    if (pointer.get_deleter() == &release)
        record_stream(pointer.get(), stream_of(stream.device_index(), int(stream.id())));
}

using c10::CachingDeviceAllocator::DeviceStats;

c10::CachingAllocator::StatArray stat(int64_t current, int64_t peak) {
    c10::CachingAllocator::StatArray stats;
    stats[0].current = current;
    stats[0].peak = peak;
    return stats;
}

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override { return allocate_data(nbytes, current_device()); }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *target, const void *source, size_t nbytes) const override {
        for (int device = 0; device < kDevices; device++) synchronize_device(device);
        std::memcpy(target, source, nbytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { empty_cache(); }
    void recordStream(const c10::DataPtr &pointer, c10::Stream stream) override {
        record_use(pointer, stream);
    }
    DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        MemoryStats found = memory_stats(device);
        DeviceStats stats;
        stats.allocated_bytes = stat(found.allocated, found.allocated_peak);
        stats.reserved_bytes = stat(found.reserved, found.reserved_peak);
        stats.num_alloc_retries = found.num_retries;
        stats.num_ooms = found.num_ooms;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

Allocator the_allocator;

}  // namespace

REGISTER_ALLOCATOR(kFakeGpu, &the_allocator);

c10::Allocator *allocator() { return &the_allocator; }

void resize_storage(c10::StorageImpl *storage, size_t nbytes) {
    int device = storage->device().index();
    size_t kept = std::min(nbytes, storage->nbytes());
    c10::DataPtr data = allocate_data(nbytes, device);
    if (kept) {
        auto *from = static_cast<char *>(storage->mutable_data()), *to = static_cast<char *>(data.get());
        launch(
            current_stream(device), "resize",
            {{uintptr_t(from), uintptr_t(from) + kept, false}, {uintptr_t(to), uintptr_t(to) + kept, true}},
            [=] { std::memcpy(to, from, kept); });
    }
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(nbytes);
}

namespace {

// Factories

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(c10::Device(kFakeGpu)));
    return at::detail::empty_generic(sizes, &the_allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device.value_or(c10::Device(kFakeGpu)));
    return at::detail::empty_strided_generic(sizes, strides, &the_allocator,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// Copies

Span host_span(const Tensor &tensor, bool writes) {
    auto begin = uintptr_t(tensor.data_ptr());
    return {begin, begin + tensor.nbytes(), writes};
}

void copy_on_device(const Tensor &source, const Tensor &target) {
    TensorMemory from(source), to(target);
    Stream stream = current_stream(source.device().index()), theirs = current_stream(target.device().index());
    // As on CUDA: a copy between devices runs on the source's stream, in order with the target's.
    if (stream != theirs) wait_stream(stream, theirs);
    launch(stream, "copy", {from.span(false), to.span(true)}, [from, to] {
        PlainKernels plain;
        to.on_host().copy_(from.on_host());
    });
    if (stream != theirs) wait_stream(theirs, stream);
}

bool is_plain(const Tensor &host) { return host.is_contiguous() && !host.is_conj() && !host.is_neg(); }

bool is_pinned(const Tensor &host) {
    Registered found = registration_of(uintptr_t(host.data_ptr()), host.nbytes());
    TORCH_CHECK(found != Registered::kInParts, "fakegpu error 1: ", host.nbytes(),
                " bytes of host memory are not in one registration: invalid argument");
    return found == Registered::kYes;
}

// Device and host tensor have the same dtype and are contiguous. A copy of memory that is not registered
// passes through other memory, and a download to it is over when the call returns.
void upload(const Tensor &source, const Tensor &target, bool non_blocking) {
    Stream stream = current_stream(target.device().index());
    TensorMemory to(target);
    bool is_async = is_pinned(source);
    if (is_async) {
        launch_upload(stream, host_span(source, false), to.span(true),
                      [to, from = source.data_ptr(), n = source.nbytes()] {
                          std::memcpy(to.on_host().data_ptr(), from, n);
                      });
    } else {
        count(k_uploads);
        count(k_upload_bytes, int64_t(source.nbytes()));
        count(k_pageable_copies);
        auto staged = std::make_shared<std::vector<char>>(source.nbytes());
        std::memcpy(staged->data(), source.data_ptr(), staged->size());
        launch(stream, "pageable upload", {to.span(true)},
               [to, staged] { std::memcpy(to.on_host().data_ptr(), staged->data(), staged->size()); });
    }
    if (is_async && !non_blocking) synchronize_stream(stream), raise_late_error();
}

void download(const Tensor &source, const Tensor &target, bool non_blocking) {
    Stream stream = current_stream(source.device().index());
    TensorMemory from(source);
    if (!is_pinned(target)) {
        count(k_downloads);
        count(k_download_bytes, int64_t(target.nbytes()));
        count(k_pageable_copies);
        synchronize_stream(stream);
        raise_late_error();
        std::memcpy(target.data_ptr(), from.on_host().data_ptr(), target.nbytes());
        return;
    }
    launch_download(stream, from.span(false), host_span(target, true),
                    [from, n = target.nbytes()](void *to) { std::memcpy(to, from.on_host().data_ptr(), n); });
    if (!non_blocking) synchronize_stream(stream), raise_late_error();
}

Tensor copy_from(const Tensor &self, const Tensor &target, bool non_blocking) {
    if (target.numel() == 0) return target;
    Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
    if (is_ours(source) && is_ours(target)) {
        copy_on_device(source, target);
    } else if (is_ours(source)) {
        c10::DeviceGuard guard(source.device());
        Tensor staged = source.to(target.scalar_type()).contiguous();
        if (is_plain(target))
            download(staged, target, non_blocking);
        else
            target.copy_(staged.cpu());
    } else {
        c10::DeviceGuard guard(target.device());
        Tensor plain = is_plain(source) ? source : source.contiguous().resolve_conj().resolve_neg();
        if (plain.scalar_type() == target.scalar_type() && target.is_contiguous()) {
            upload(plain, target, non_blocking);
        } else {
            Tensor staged = at::empty(plain.sizes(), plain.options().device(target.device()));
            upload(plain, staged, non_blocking);
            copy_on_device(staged, target);
        }
    }
    return target;
}

Tensor copy_from_and_resize(const Tensor &self, const Tensor &target) {
    target.resize_(self.sizes());
    return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor &self) {
    count(k_items);
    Tensor value = at::empty({}, self.options().device(at::kCPU));
    TensorMemory from(self);
    synchronize_stream(current_stream(self.device().index()));
    raise_late_error();
    PlainKernels plain;
    return from.on_host().item();
}

// Storages and views

const Tensor &resize_(const Tensor &self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    if (format) impl->empty_tensor_restride(*format);
    size_t needed = size_t(impl->storage_offset() + impl->numel()) * impl->itemsize();
    if (impl->numel() && needed > impl->storage().nbytes())
        resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
    return self;
}

Tensor &set_view(Tensor &self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                 c10::IntArrayRef strides) {
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return self;
}

Tensor &set_storage(Tensor &self, at::Storage source) {
    auto numel = int64_t(source.nbytes() / self.itemsize());
    return set_view(self, std::move(source), 0, {numel}, {1});
}

Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor as_strided(const Tensor &self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

void record_tensor_stream(Tensor &self, c10::Stream stream) { record_use(self.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("resize_", &resize_);
    m.impl("set_.source_Storage_storage_offset", &set_view);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("as_strided", &as_strided);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("record_stream", &record_tensor_stream);
}

}  // namespace fake_gpu
