// Calls every function of the C ABI, without Python, so that sanitizers see all of csrc/. A block's parts are
// moved by hand, since no drive can be made to answer in a given order.
//
// Buffers are exactly as long as the calls may touch, so a vector that runs over an edge is found. Values are
// compared with the scalar kernels only; the Python tests check the mathematics.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "checks.h"
#include "cpu/subnormals.h"
#include "io/block.h"
#include "zero_offload.h"

namespace {

struct State {
    std::vector<uint16_t> half, residual, half_out, grad;
    std::vector<float> first, second, third, values, sums;
    std::vector<double> sumsq;
    std::vector<int32_t> finite;
    bool operator==(const State &o) const {
        return same_bits(half, o.half) && same_bits(residual, o.residual) &&
               same_bits(half_out, o.half_out) && same_bits(grad, o.grad) && same_bits(first, o.first) &&
               same_bits(second, o.second) && same_bits(third, o.third) && same_bits(values, o.values) &&
               same_bits(sums, o.sums) && same_bits(sumsq, o.sumsq) && finite == o.finite;
    }
};

void store(State &s, zo_grad_args &grads) {
    EXPECT(zo_grad_store(&grads) == ZO_OK);
    s.sumsq.push_back(grads.sumsq);
    s.finite.push_back(grads.finite);
}

// The store returns the sum of the values that it has stored.
void sum_again(State &s, uint32_t kind, const void *values, int64_t numel, uint32_t num_threads) {
    double sumsq = 0;
    int32_t finite = 0;
    EXPECT(zo_sumsq(kind, values, numel, num_threads, &sumsq, &finite) == ZO_OK && finite == s.finite.back());
    EXPECT(memcmp(&sumsq, &s.sumsq.back(), sizeof(sumsq)) == 0);
}

// The same update with an fp16 value and gradient, and with the sums as master. Replaces both halves.
void run_fp16(State &s, zo_update_args update, int64_t numel, uint32_t num_threads) {
    std::vector<uint16_t> small(s.grad.size());
    EXPECT(zo_convert(ZO_FP16, small.data(), ZO_FP32, s.sums.data(), numel, num_threads) == ZO_OK);
    update.value_kind = update.grad_kind = ZO_FP16;
    update.residual = nullptr;
    update.master = s.sums.data();
    update.grad = small.data();
    EXPECT(numel == 0 || zo_update(&update) == ZO_OK);
    EXPECT(same_bits(s.half, s.half_out));

    zo_grad_args grads = {};
    grads.size = sizeof(grads);
    grads.dst_kind = grads.src_kind = ZO_FP16;
    grads.num_threads = num_threads;
    grads.dst = s.grad.data();
    grads.src = small.data();
    grads.numel = numel;
    store(s, grads);
    sum_again(s, ZO_FP16, s.grad.data(), numel, num_threads);
    EXPECT(zo_convert(ZO_FP32, s.values.data(), ZO_FP16, s.grad.data(), numel, num_threads) == ZO_OK);
}

// Every kernel once over numel elements.
State run_kernels(uint32_t rule, int64_t numel, uint32_t num_threads, Values values) {
    const auto count = static_cast<size_t>(numel);
    const std::vector<float> master = random_floats(numel, 1, values),
                             gradient = random_floats(numel, 2, values);
    State s;
    for (auto *words : {&s.half, &s.residual, &s.half_out, &s.grad}) words->resize(count);
    for (auto *floats : {&s.first, &s.second, &s.third, &s.values, &s.sums}) floats->resize(count);
    EXPECT(zo_master_split(master.data(), s.half.data(), s.residual.data(), numel, num_threads) == ZO_OK);
    EXPECT(zo_convert(ZO_BF16, s.grad.data(), ZO_FP32, gradient.data(), numel, num_threads) == ZO_OK);

    zo_update_args update = {};
    update.size = sizeof(update);
    update.rule = rule;
    update.value_kind = update.grad_kind = ZO_BF16;
    update.num_threads = num_threads;
    update.value = s.half.data();
    update.residual = s.residual.data();
    update.states[0] = s.first.data();
    update.states[1] = s.second.data();
    update.states[2] = s.third.data();
    update.grad = s.grad.data();
    update.value_out = s.half_out.data();
    const int64_t third = numel / 3;
    const zo_segment segments[] = {{0, third, 1e-3, .9, .999, 1e-8, .1, 1.0, 1},
                                   {third, numel, 1e-4, .9, .99, 1e-8, 0.0, 0.5, 7}};
    update.segments = segments;
    update.num_segments = 2;
    EXPECT(numel == 0 || zo_update(&update) == ZO_OK);
    EXPECT(zo_master_join(s.half.data(), s.residual.data(), s.values.data(), numel, num_threads) == ZO_OK);

    zo_grad_args grads = {};
    grads.size = sizeof(grads);
    grads.num_threads = num_threads;
    grads.dst = s.sums.data();
    grads.src = master.data();
    grads.numel = numel;
    store(s, grads);
    grads.mode = ZO_ACCUMULATE;
    grads.src_kind = ZO_BF16;
    grads.src = s.grad.data();
    store(s, grads);
    sum_again(s, ZO_FP32, s.sums.data(), numel, num_threads);
    EXPECT(values == Values::kAnyBits || (s.finite[0] && s.finite[1]));
    run_fp16(s, update, numel, num_threads);
    return s;
}

void test_kernels(uint32_t rule, int64_t numel, Values values) {
    EXPECT(zo_set_isa(ZO_ISA_SCALAR) == ZO_OK);
    const State expected = run_kernels(rule, numel, 1, values);
    const uint32_t crc = zo_crc32c(5, expected.values.data(), uint64_t(numel) * 4);
    for (int isa = 0; isa <= ZO_ISA_NEON; ++isa) {
        if (!(zo_isa_supported_mask() >> isa & 1)) {
            EXPECT(zo_set_isa(isa) == ZO_UNSUPPORTED);
            continue;
        }
        EXPECT(zo_set_isa(isa) == ZO_OK && zo_isa() == isa);
        EXPECT(run_kernels(rule, numel, 1, values) == expected);
        EXPECT(run_kernels(rule, numel, 2, values) == expected);
        // This thread flushes subnormal numbers to 0, and must do so after the call as well.
        zo::set_float_mode(zo::float_mode() | zo::kFlushing);
        EXPECT(run_kernels(rule, numel, 1, values) == expected);
        EXPECT(run_kernels(rule, numel, 2, values) == expected);
        EXPECT((zo::float_mode() & zo::kFlushing) == zo::kFlushing);
        zo::set_float_mode(zo::float_mode() & ~zo::kFlushing);
        EXPECT(zo_crc32c(5, expected.values.data(), uint64_t(numel) * 4) == crc);
    }
}

void test_refusals() {
    zo_abi_info info = {};
    EXPECT(zo_abi(&info) == ZO_INVALID);
    info.size = sizeof(info);
    EXPECT(zo_abi(&info) == ZO_OK && info.version == ZO_ABI_VERSION);
    EXPECT(zo_abi(nullptr) == ZO_INVALID && zo_update(nullptr) == ZO_INVALID &&
           zo_grad_store(nullptr) == ZO_INVALID);
    EXPECT(zo_set_isa(ZO_ISA_NEON + 1) == ZO_UNSUPPORTED && zo_set_isa(-1) == ZO_UNSUPPORTED);
    zo_update_args update = {};
    update.size = sizeof(update);
    update.num_threads = 1;
    update.num_segments = 1;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "segments"));
    update.rule = ZO_NUM_RULES;
    EXPECT(zo_update(&update) == ZO_INVALID && strstr(zo_last_error(), "rule"));
    EXPECT(zo_convert(ZO_FP16, nullptr, ZO_BF16, nullptr, 0, 1) == ZO_UNSUPPORTED);
    EXPECT(zo_convert(9, nullptr, 0, nullptr, 0, 1) == ZO_INVALID);
    EXPECT(zo_convert(0, nullptr, 0, nullptr, 1, 1) == ZO_INVALID);
    float memory[16] = {};
    EXPECT(zo_convert(ZO_FP32, memory, ZO_FP32, memory, 8, 1) == ZO_OK);
    EXPECT(zo_convert(ZO_FP32, memory + 1, ZO_FP32, memory, 8, 1) == ZO_INVALID &&
           strstr(zo_last_error(), "dst and src overlap"));
    zo_grad_args grads = {};
    grads.size = sizeof(grads);
    grads.num_threads = 1;
    grads.mode = ZO_ACCUMULATE;
    grads.dst = memory;
    grads.src = memory;
    grads.numel = 8;
    EXPECT(zo_grad_store(&grads) == ZO_INVALID && strstr(zo_last_error(), "dst and src overlap"));
    EXPECT(zo_io_open(0, nullptr) == ZO_INVALID && zo_io_close(nullptr) == ZO_INVALID);
}

struct File {
    File() {
        char path[] = "/tmp/zo_driver_XXXXXX";
        fd = mkstemp(path);
        EXPECT(fd >= 0 && unlink(path) == 0);
    }
    ~File() { close(fd); }
    int fd;
};

zo_io_result submit_and_wait(zo_io *io, int op, std::vector<zo_io_block> &blocks, std::vector<char> &memory) {
    uint64_t ticket = 0;
    EXPECT(zo_io_submit(io, op, blocks.data(), uint32_t(blocks.size()), memory.data(), 0, &ticket) == ZO_OK);
    zo_io_result result = {};
    result.size = sizeof(result);
    EXPECT(zo_io_wait(io, ticket, -1, &result) == ZO_OK);
    EXPECT(zo_io_done(io, ticket) == ZO_INVALID);
    return result;
}

zo_io_config config_of(uint32_t kind, uint32_t num_lanes) {
    return {sizeof(zo_io_config), kind, num_lanes, kind == ZO_IO_THREADS ? 3u : 1u, 4, 8192};
}

// False where the system forbids io_uring.
bool open_io(uint32_t kind, uint32_t num_lanes, zo_io **io) {
    const zo_io_config config = config_of(kind, num_lanes);
    const int status = zo_io_open(&config, io);
    EXPECT(status == ZO_OK || (kind == ZO_IO_URING && status == ZO_UNSUPPORTED));
    return status == ZO_OK;
}

void test_io_refusals() {
    zo_io *io = nullptr;
    zo_io_config config = config_of(ZO_IO_THREADS, 2);
    config.part_bytes = 5000;
    EXPECT(zo_io_open(&config, &io) == ZO_INVALID && strstr(zo_last_error(), "multiple"));
    config = config_of(7, 2);
    EXPECT(zo_io_open(&config, &io) == ZO_INVALID && strstr(zo_last_error(), "kind is 7"));
    EXPECT(open_io(ZO_IO_THREADS, 2, &io));
    EXPECT(zo_io_add_file(io, 0, 2) == ZO_INVALID && zo_io_add_file(io, 0, 1) == ZO_OK);
    EXPECT(zo_io_abandon(io) == ZO_INVALID);
    EXPECT(zo_io_close(io) == ZO_OK);
}

void test_fork(uint32_t kind) {
    zo_io *io = nullptr;
    if (!open_io(kind, 1, &io)) return;
    const pid_t child = fork();
    if (child == 0) _exit(zo_io_close(io) == ZO_FORKED && zo_io_abandon(io) == ZO_OK ? 0 : 1);
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(zo_io_close(io) == ZO_OK);
}

void test_io(uint32_t kind) {
    zo_io *io = nullptr;
    if (!open_io(kind, 2, &io)) return;
    const File file;
    EXPECT(zo_io_add_file(io, file.fd, 1) == ZO_OK);
    const std::vector<uint32_t> sizes = {5000, 1, 0, 70000, 4096};
    std::vector<zo_io_block> blocks;
    uint64_t total = 0;
    for (const uint32_t nbytes : sizes) {
        blocks.push_back({total, nbytes, 0, file.fd, uint32_t(blocks.size())});
        total += nbytes;
    }
    std::vector<char> written(total), read(total);
    for (size_t i = 0; i < total; ++i) written[i] = char(i * 31);
    EXPECT(zo_io_add_memory(io, written.data(), total) == ZO_OK &&
           zo_io_add_memory(io, nullptr, 1) == ZO_INVALID);
    EXPECT(zo_io_fault(io, ZO_FAULT_WRITE_SHORT, 4) == ZO_OK);
    EXPECT(submit_and_wait(io, ZO_IO_WRITE, blocks, written).status == ZO_IO_DONE);
    EXPECT(submit_and_wait(io, ZO_IO_READ, blocks, read).status == ZO_IO_DONE && read == written);
    EXPECT(zo_io_fault(io, ZO_FAULT_READ_EIO, 1) == ZO_OK);
    EXPECT(submit_and_wait(io, ZO_IO_READ, blocks, read).status == ZO_IO_OS_ERROR);
    EXPECT(zo_io_fault(io, ZO_FAULT_WRITE_FLIP, 1) == ZO_OK);
    EXPECT(submit_and_wait(io, ZO_IO_WRITE, blocks, written).status == ZO_IO_DONE);
    EXPECT(submit_and_wait(io, ZO_IO_READ, blocks, read).status == ZO_IO_CHECKSUM);
    EXPECT(submit_and_wait(io, ZO_IO_READ_UNVERIFIED, blocks, read).status == ZO_IO_DONE);
    for (const int fault : {ZO_FAULT_STORM, ZO_FAULT_READ_FLIP}) {
        EXPECT(submit_and_wait(io, ZO_IO_WRITE, blocks, written).status == ZO_IO_DONE);
        EXPECT(zo_io_fault(io, fault, 4) == ZO_OK);
        EXPECT(submit_and_wait(io, ZO_IO_READ, blocks, read).status == ZO_IO_DONE && read == written);
    }
    EXPECT(zo_io_fault(io, ZO_FAULT_READ_SHORT, 1) == ZO_OK);
    EXPECT(submit_and_wait(io, ZO_IO_READ, blocks, read).status == ZO_IO_TRUNCATED);
    EXPECT(zo_io_fault(io, ZO_FAULT_WRITE_DROP, 1) == ZO_OK);
    EXPECT(submit_and_wait(io, ZO_IO_WRITE, blocks, written).status == ZO_IO_DONE);
    EXPECT(zo_io_fault(io, ZO_FAULT_STALL, 2) == ZO_OK);
    uint64_t held = 0;
    EXPECT(zo_io_submit(io, ZO_IO_WRITE, blocks.data(), 5, written.data(), 1, &held) == ZO_OK);
    zo_io_result result = {};
    result.size = sizeof(result);
    EXPECT(zo_io_wait(io, held, 0.01, &result) == ZO_OK && result.status == ZO_IO_TIMEOUT);
    EXPECT(zo_io_fault(io, ZO_FAULT_NONE, 0) == ZO_OK);
    EXPECT(zo_io_wait(io, held, -1, &result) == ZO_OK && result.status == ZO_IO_DONE);
    EXPECT(ftruncate(file.fd, 6000) == 0);
    EXPECT(submit_and_wait(io, ZO_IO_READ_UNVERIFIED, blocks, read).status == ZO_IO_TRUNCATED);
    zo_io_stats_t stats = {};
    stats.size = sizeof(stats);
    EXPECT(zo_io_stats(io, &stats) == ZO_OK && stats.jobs_queued == 0 && stats.bytes_written == 6 * total);

    // The drive answers no more: waits for it end, and its memory is left alone.
    EXPECT(zo_io_fault(io, ZO_FAULT_STALL, 1) == ZO_OK);
    char *lost =
        static_cast<char *>(mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(lost != MAP_FAILED);
    memcpy(lost, written.data(), total);
    EXPECT(zo_io_submit(io, ZO_IO_WRITE, blocks.data(), 5, lost, 0, &held) == ZO_OK);
    EXPECT(zo_io_wait(io, held, 0.01, &result) == ZO_OK && result.status == ZO_IO_TIMEOUT);
    EXPECT(zo_io_give_up(io) == ZO_OK && munmap(lost, total) == 0);
    EXPECT(zo_io_fault(io, ZO_FAULT_NONE, 0) == ZO_OK);
    EXPECT(zo_io_wait(io, held, -1, &result) == ZO_OK && result.status == ZO_IO_OS_ERROR);
    EXPECT(zo_io_stop(io) == ZO_OK && zo_io_stop(io) == ZO_OK && zo_io_close(io) == ZO_OK);
    if (!open_io(kind, 2, &io)) return;

    // Closing waits for tickets that were not waited for.
    std::vector<std::vector<zo_io_block>> tables(50, blocks);
    uint64_t ticket = 0;
    for (auto &table : tables) {
        EXPECT(zo_io_submit(io, ZO_IO_WRITE, table.data(), uint32_t(table.size()), written.data(), 0,
                            &ticket) == ZO_OK);
    }
    EXPECT(zo_io_close(io) == ZO_OK);
    for (const auto &table : tables) EXPECT(table.back().crc == blocks.back().crc);
}

// The last part comes first, and each third one comes short. Returns how often all of the block was asked
// for.
int move_backwards(zo::BlockTransfer *transfer) {
    int rounds = 0;
    do {
        std::vector<zo::Part> parts;
        zo::Part part;
        while (transfer->next(8192, &part)) {
            parts.push_back(part);
            // Sums three parts ahead now and then: the next part is summed, or not, or in part.
            while (parts.size() % 4 == 1 && transfer->lacks_sum(3 * 8192)) transfer->sum_ahead(8192);
        }
        if (!parts.empty() && parts.front().begin == 0) ++rounds;
        for (size_t i = parts.size(); i > 0; --i) {
            const bool is_short = i % 3 == 0 && parts[i - 1].nbytes() == 8192;
            transfer->completed(parts[i - 1], is_short ? 5000 : int64_t(parts[i - 1].nbytes()));
            transfer->sum_next();
        }
    } while (!transfer->finished());
    return rounds;
}

void test_parts_in_any_order() {
    std::vector<char> memory(70001);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = char(i * 17);
    zo_io_block block = {0, uint32_t(memory.size()), 0, 0, 9};
    zo::BlockTransfer write(ZO_IO_WRITE, &block, memory.data(), ZO_FAULT_NONE);
    EXPECT(move_backwards(&write) == 1 && write.outcome().status == ZO_IO_DONE);
    EXPECT(block.crc == zo_crc32c(9, memory.data(), memory.size()));
    EXPECT(!write.lacks_sum(8192));
    zo::BlockTransfer read(ZO_IO_READ, &block, memory.data(), ZO_FAULT_NONE);
    EXPECT(!read.lacks_sum(8192));
    EXPECT(move_backwards(&read) == 1 && read.outcome().status == ZO_IO_DONE);
    memory[40000] ^= 1;
    zo::BlockTransfer damaged(ZO_IO_READ, &block, memory.data(), ZO_FAULT_NONE);
    EXPECT(move_backwards(&damaged) == 2 && damaged.outcome().status == ZO_IO_CHECKSUM);
    EXPECT(damaged.outcome().actual_crc == zo_crc32c(9, memory.data(), memory.size()));
}

void test_neighbours() {
    int64_t word = 0;
    EXPECT(zo_word_wait(&word, 1, 2000) == 0 && zo_word_wait(nullptr, 1, 0) == ZO_INVALID);
    std::thread other([&] {
        usleep(5000);
        EXPECT(zo_word_post(&word, 3) == ZO_OK);
    });
    EXPECT(zo_word_wait(&word, 2, 60000000) == 1);
    other.join();
    EXPECT(zo_word_post(nullptr, 1) == ZO_INVALID);
}

}  // namespace

// With the argument "io" only the engine runs: the thread sanitizer does not understand OpenMP's barriers.
int main(int argc, char **argv) {
    const char *part = argc < 2 ? "" : argv[1];
    test_refusals();
    test_format_refusals();
    for (const int64_t numel : kSizes) {
        if (strcmp(part, "io") == 0) break;
        for (const Values values : {Values::kNormal, Values::kAnyBits}) {
            for (uint32_t rule = 0; rule < ZO_NUM_RULES; ++rule) {
                test_kernels(rule, numel, values);
                test_formats(rule, numel, values);
            }
        }
    }
    if (strcmp(part, "kernels") == 0) {
        puts("kernels: ok");
        return 0;
    }
    test_neighbours();
    test_io_refusals();
    test_parts_in_any_order();
    for (const uint32_t kind : {ZO_IO_THREADS, ZO_IO_URING}) {
        test_fork(kind);
        test_io(kind);
    }
    puts("native driver: ok");
    return 0;
}
