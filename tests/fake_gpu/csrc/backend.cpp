// Answers to torch's questions to an accelerator: devices, streams, events, generators, pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "random.h"
#include "tensors.h"

namespace fake_gpu {

namespace {

Stream ours(c10::Stream stream) { return stream_of(stream.device_index(), int(stream.id())); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kFakeGpu; }

    static c10::Stream theirs(c10::Device device, int number) {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFakeGpu, c10::DeviceIndex(index_of(device))),
                           number);
    }

    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    c10::Device getDevice() const override { return {kFakeGpu, c10::DeviceIndex(current_device())}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(index_of(device) < kDevices, "fakegpu has ", kDevices, " devices, and not one of index ",
                    index_of(device));
        set_current_device(index_of(device));
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        set_current_device(index_of(device));
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before = getDevice();
        setDevice(device);
        return before;
    }

    c10::Stream getStream(c10::Device device) const override {
        return theirs(device, stream_number(index_of(device)));
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return theirs(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return theirs(device, next_stream_number(index_of(device)));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        c10::Stream before = getStream(stream.device());
        set_stream_number(stream.device_index(), int(stream.id()));
        return before;
    }
    bool queryStream(const c10::Stream &stream) const override { return query_stream(ours(stream)); }
    void synchronizeStream(const c10::Stream &stream) const override {
        synchronize_stream(ours(stream));
        raise_late_error();
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        synchronize_device(device);
        raise_late_error();
    }

    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event *>(event);
    }
    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        fake_gpu::record(*static_cast<Event *>(*event), ours(stream));
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (event) wait_event(ours(stream), *static_cast<Event *>(event));
    }
    bool queryEvent(void *event) const override {
        return !event || query_event(*static_cast<Event *>(event));
    }
    void synchronizeEvent(void *event) const override {
        if (event) synchronize_event(*static_cast<Event *>(event));
        raise_late_error();
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override {
        for (void *event : {first, second})
            TORCH_CHECK(event && query_event(*static_cast<Event *>(event)),
                        "both events must be recorded and complete");
        return *static_cast<Event *>(second)->reached_ms - *static_cast<Event *>(first)->reached_ms;
    }
    void recordDataPtrOnStream(const c10::DataPtr &pointer, const c10::Stream &stream) const override {
        record_stream(pointer.get(), ours(stream));
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A sequence of seeds: a draw takes the next one when it is launched, so its numbers depend on no policy.
class Generator final : public c10::GeneratorImpl {
  public:
    Generator(int device, RandomState *random)
        : GeneratorImpl(c10::Device(kFakeGpu, c10::DeviceIndex(device)),
                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          random_(random ? random : &own_) {}

    RandomState &random() { return *random_; }

    void set_current_seed(uint64_t seed) override { *random_ = {seed, 0}; }
    uint64_t current_seed() const override { return random_->seed; }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return random_->seed;
    }
    void set_offset(uint64_t offset) override { random_->num_draws = offset; }
    uint64_t get_offset() const override { return random_->num_draws; }

    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        at::Tensor saved =
            at::empty({int64_t(sizeof(RandomState))}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
        std::memcpy(saved.mutable_data_ptr(), random_, sizeof(RandomState));
        return saved.getIntrusivePtr();
    }
    void set_state(const c10::TensorImpl &saved) override {
        TORCH_CHECK(saved.device().is_cpu() && saved.numel() == int64_t(sizeof(RandomState)),
                    "not a state of fakegpu");
        std::memcpy(random_, saved.data(), sizeof(RandomState));
    }

  private:
    Generator *clone_impl() const override {
        auto *copy = new Generator(device().index(), nullptr);
        copy->own_ = *random_;
        return copy;
    }

    RandomState own_;
    RandomState *random_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    void init() const override {}
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
    void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kFakeGpu, device}); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return Guard().exchangeDevice({kFakeGpu, device}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current_device() : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return new_generator(device < 0 ? current_device() : device);
    }
    bool isPinnedPtr(const void *pointer) const override {
        return registration_of(uintptr_t(pointer), 1) == Registered::kYes;
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t nbytes) const override {
        resize_storage(storage.unsafeGetStorageImpl(), nbytes);
    }
};

const bool hooks_are_registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace

const at::Generator &default_generator(int device) {
    static auto *const all = [] {
        auto *const made = new std::array<at::Generator, kDevices>;
        for (int each = 0; each < kDevices; each++)
            (*made)[each] = at::make_generator<Generator>(each, &default_random_state(each));
        return made;
    }();
    return (*all)[device];
}

at::Generator new_generator(int device) {
    auto made = at::make_generator<Generator>(device, nullptr);
    made.set_current_seed(c10::default_rng_seed_val);
    return made;
}

at::Generator draw_generator(const at::Generator &generator) {
    TORCH_CHECK(generator.device().type() == kFakeGpu, "expected a generator on fakegpu, found one on ",
                generator.device());
    return at::make_generator<at::CPUGeneratorImpl>(
        draw(static_cast<Generator *>(generator.unsafeGetGeneratorImpl())->random()));
}

}  // namespace fake_gpu
