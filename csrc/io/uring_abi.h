// The part of Linux's io_uring interface that we use, declared here: headers of the build machine may be
// older than the kernel. See io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#pragma once

#include <cstdint>

namespace zo::uring {

struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t nbytes;
    uint32_t op_flags;  // of poll: the events
    uint64_t user_data;
    uint16_t buffer_index;
    uint16_t personality;
    int32_t splice_fd;
    uint64_t pad[2];
};
static_assert(sizeof(Sqe) == 64, "the kernel's size");

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(Cqe) == 16, "the kernel's size");

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t user_address;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120, "the kernel's size");

struct FilesUpdate {
    uint32_t offset;
    uint32_t reserved;
    uint64_t fds;
};

struct BuffersTable {
    uint32_t count;
    uint32_t flags;
    uint64_t reserved;
    uint64_t vectors;
    uint64_t tags;
};

struct BuffersUpdate {
    uint32_t offset;
    uint32_t reserved;
    uint64_t vectors;
    uint64_t tags;
    uint32_t count;
    uint32_t reserved2;
};

constexpr long kSysSetup = 425, kSysEnter = 426, kSysRegister = 427;  // on every architecture
constexpr uint8_t kOpReadFixed = 4, kOpWriteFixed = 5, kOpPollAdd = 6, kOpRead = 22, kOpWrite = 23;
constexpr uint8_t kFixedFile = 1;
constexpr uint32_t kSetupClamp = 1u << 4, kSetupDisabled = 1u << 6, kSetupCoopTaskrun = 1u << 8;
constexpr uint32_t kSetupSingleIssuer = 1u << 12, kSetupDeferTaskrun = 1u << 13;
constexpr uint32_t kFeatureSingleMmap = 1u << 0, kFeatureNoDrop = 1u << 1;
constexpr uint32_t kEnterGetEvents = 1;
constexpr uint32_t kRegisterFiles = 2, kUnregisterFiles = 3, kRegisterFilesUpdate = 6, kRegisterEnable = 12;
constexpr uint32_t kRegisterBuffers = 15, kRegisterBuffersUpdate = 16, kSparse = 1;
constexpr int64_t kOffsetSqRing = 0, kOffsetSqes = 0x10000000;

}  // namespace zo::uring
