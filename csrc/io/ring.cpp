#include "io/ring.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

namespace zo::uring {
namespace {

[[noreturn]] void refuse(int error, const char *call) {
    throw std::system_error(error, std::generic_category(), call);
}

// The newest kernels spare us interrupts and locks; older ones know fewer flags and say so.
int set_up(uint32_t num_entries, Params *params) {
    constexpr uint32_t flags[] = {
        kSetupClamp | kSetupDisabled | kSetupCoopTaskrun | kSetupSingleIssuer | kSetupDeferTaskrun,
        kSetupClamp | kSetupDisabled | kSetupCoopTaskrun,
        kSetupClamp,
    };
    for (const uint32_t flag : flags) {
        *params = Params{};
        params->flags = flag;
        const long fd = syscall(kSysSetup, num_entries, params);
        if (fd >= 0) return int(fd);
        if (errno != EINVAL) break;
    }
    refuse(errno, "io_uring_setup");
}

template <class T>
T *at(char *base, uint32_t offset) {
    return reinterpret_cast<T *>(base + offset);
}

}  // namespace

Ring::Ring(uint32_t num_entries) {
    Params params;
    fd_ = set_up(num_entries, &params);
    disabled_ = (params.flags & kSetupDisabled) != 0;
    try {
        const uint32_t needed = kFeatureSingleMmap | kFeatureNoDrop;
        if ((params.features & needed) != needed || params.sq_entries < num_entries)
            refuse(ENOSYS, "io_uring_setup");
        map(params);
    } catch (...) {
        unmap();
        close(fd_);
        throw;
    }
}

void Ring::map(const Params &params) {
    const auto map_at = [this](size_t nbytes, int64_t offset) {
        void *mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        if (mapped == MAP_FAILED) refuse(errno, "mmap of an io_uring");
        // A child that wrote into our ring would submit in our name.
        madvise(mapped, nbytes, MADV_DONTFORK);
        return static_cast<char *>(mapped);
    };
    rings_nbytes_ = std::max<size_t>(params.sq.array + params.sq_entries * sizeof(uint32_t),
                                     params.cq.cqes + params.cq_entries * sizeof(Cqe));
    rings_ = map_at(rings_nbytes_, kOffsetSqRing);
    const size_t nbytes = params.sq_entries * sizeof(Sqe);
    sqes_ = reinterpret_cast<Sqe *>(map_at(nbytes, kOffsetSqes));
    sqes_nbytes_ = nbytes;
    sq_tail_ = at<uint32_t>(rings_, params.sq.tail);
    sq_array_ = at<uint32_t>(rings_, params.sq.array);
    sq_mask_ = *at<uint32_t>(rings_, params.sq.ring_mask);
    cq_head_ = at<uint32_t>(rings_, params.cq.head);
    cq_tail_ = at<uint32_t>(rings_, params.cq.tail);
    cq_mask_ = *at<uint32_t>(rings_, params.cq.ring_mask);
    cqes_ = at<Cqe>(rings_, params.cq.cqes);
}

void Ring::unmap() {
    if (rings_ != nullptr) munmap(rings_, rings_nbytes_);
    if (sqes_ != nullptr) munmap(sqes_, sqes_nbytes_);
}

Ring::~Ring() {
    unmap();
    if (fd_ >= 0) close(fd_);
}

void Ring::close_inherited() {
    close(fd_);
    fd_ = -1;
}

int Ring::enable() {
    if (!disabled_) return 0;
    return syscall(kSysRegister, fd_, kRegisterEnable, nullptr, 0) == 0 ? 0 : errno;
}

Sqe *Ring::put() {
    const uint32_t index = (*sq_tail_ + unsubmitted_) & sq_mask_;
    sq_array_[index] = index;
    ++unsubmitted_;
    std::memset(&sqes_[index], 0, sizeof(Sqe));
    return &sqes_[index];
}

int Ring::enter(uint32_t min_results) {
    uint32_t to_submit = unsubmitted_;
    __atomic_store_n(sq_tail_, *sq_tail_ + unsubmitted_, __ATOMIC_RELEASE);
    unsubmitted_ = 0;
    do {
        const long taken = syscall(kSysEnter, fd_, to_submit, min_results, kEnterGetEvents, nullptr, 0);
        if (taken >= 0) {
            to_submit -= uint32_t(taken);
        } else if (errno == EINTR && to_submit == 0) {
            return 0;
        } else if (errno == EAGAIN || errno == EBUSY || errno == ENOMEM) {
            sched_yield();  // the kernel is short of something for now
        } else if (errno != EINTR) {
            return errno;
        }
    } while (to_submit > 0);
    return 0;
}

bool Ring::take(Cqe *result) {
    const uint32_t head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    *result = cqes_[head & cq_mask_];
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

bool Ring::register_files(uint32_t num_entries) {
    const std::vector<int32_t> none(num_entries, -1);
    return syscall(kSysRegister, fd_, kRegisterFiles, none.data(), num_entries) == 0;
}

bool Ring::register_file(uint32_t index, int fd) {
    const FilesUpdate update = {index, 0, uint64_t(reinterpret_cast<uintptr_t>(&fd))};
    return syscall(kSysRegister, fd_, kRegisterFilesUpdate, &update, 1) == 1;
}

void Ring::unregister_files() { syscall(kSysRegister, fd_, kUnregisterFiles, nullptr, 0); }

bool Ring::register_buffers(uint32_t num_entries) {
    const BuffersTable table = {num_entries, kSparse, 0, 0, 0};
    return syscall(kSysRegister, fd_, kRegisterBuffers, &table, sizeof(table)) == 0;
}

bool Ring::register_buffer(uint32_t index, void *memory, uint64_t nbytes) {
    const iovec vector = {memory, nbytes};
    const uint64_t no_tag = 0;
    const BuffersUpdate update = {index,
                                  0,
                                  uint64_t(reinterpret_cast<uintptr_t>(&vector)),
                                  uint64_t(reinterpret_cast<uintptr_t>(&no_tag)),
                                  1,
                                  0};
    return syscall(kSysRegister, fd_, kRegisterBuffersUpdate, &update, sizeof(update)) == 1;
}

}  // namespace zo::uring
