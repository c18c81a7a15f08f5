// The border: validate, call, turn every failure into a status and a message. No exception crosses.
#include <exception>
#include <new>
#include <system_error>

#include "cpu/features.h"
#include "io/engine.h"
#include "optim/adamw.h"
#include "ranks/neighbour.h"
#include "reduce/reduce.h"
#include "util/crc32c.h"
#include "util/status.h"
#include "zero_offload.h"

namespace {

using zo::fail;

constexpr uint32_t kMaxIoThreads = 64, kMaxIoLanes = 64, kMaxIoDepth = 4096;
constexpr uint32_t kIoSector = 4096, kMaxIoPart = 1u << 30;
constexpr uint32_t kMaxThreads = 1024;

template <class Body>
int guarded(const char *call, const Body &body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(ZO_NO_MEMORY, "%s: out of memory", call);
    } catch (const std::system_error &error) {
        return fail(ZO_SYSTEM, "%s: %s", call, error.what());
    } catch (const std::exception &error) {
        return fail(ZO_INTERNAL, "%s: %s", call, error.what());
    } catch (...) {
        return fail(ZO_INTERNAL, "%s: unknown exception", call);
    }
}

int check_size(const char *call, uint32_t size, size_t expected) {
    if (size == expected) return ZO_OK;
    return fail(ZO_INVALID, "%s: the struct has %u bytes, this library expects %zu", call, size, expected);
}

int check_range(const char *call, int64_t numel, uint32_t num_threads) {
    if (numel < 0) return fail(ZO_INVALID, "%s: numel is %lld, not 0 or more", call, (long long)numel);
    if (num_threads < 1 || num_threads > kMaxThreads) {
        return fail(ZO_INVALID, "%s: num_threads is %u, not 1 to %u", call, num_threads, kMaxThreads);
    }
    return ZO_OK;
}

int check_kind(const char *call, const char *name, uint32_t kind) {
    if (kind < ZO_NUM_KINDS) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is %u, not 0 (fp32), 1 (bf16) or 2 (fp16)", call, name, kind);
}

int check_pointer(const char *call, const char *name, const void *pointer) {
    if (pointer != nullptr) return ZO_OK;
    return fail(ZO_INVALID, "%s: %s is NULL", call, name);
}

int check_segments(const zo_adamw_args &args) {
    int64_t previous_end = 0;
    for (int64_t s = 0; s < args.num_segments; ++s) {
        const zo_adamw_segment &segment = args.segments[s];
        if (segment.begin < previous_end || segment.end < segment.begin) {
            return fail(
                ZO_INVALID, "zo_adamw: segment %lld is [%lld, %lld) after one that ends at %lld; sort them",
                (long long)s, (long long)segment.begin, (long long)segment.end, (long long)previous_end);
        }
        if (segment.step < 1) {
            return fail(ZO_INVALID, "zo_adamw: segment %lld has step %lld; the first step is 1", (long long)s,
                        (long long)segment.step);
        }
        previous_end = segment.end;
    }
    return ZO_OK;
}

// The first failing check decides; the rest are not evaluated.
#define ZO_CHECK(check)                     \
    do {                                    \
        const int status = (check);         \
        if (status != ZO_OK) return status; \
    } while (false)

int check_adamw(const zo_adamw_args &args) {
    constexpr const char *call = "zo_adamw";
    ZO_CHECK(check_kind(call, "value_kind", args.value_kind));
    ZO_CHECK(check_kind(call, "grad_kind", args.grad_kind));
    ZO_CHECK(check_range(call, args.num_segments, args.num_threads));
    if (args.num_segments == 0) return ZO_OK;
    ZO_CHECK(check_pointer(call, "segments", args.segments));
    ZO_CHECK(check_segments(args));
    ZO_CHECK(check_pointer(call, "value", args.value));
    if (args.value_kind == ZO_BF16) ZO_CHECK(check_pointer(call, "residual of a bf16 value", args.residual));
    if (args.value_kind == ZO_FP16) ZO_CHECK(check_pointer(call, "master of an fp16 value", args.master));
    ZO_CHECK(check_pointer(call, "exp_avg", args.exp_avg));
    ZO_CHECK(check_pointer(call, "exp_avg_sq", args.exp_avg_sq));
    return check_pointer(call, "grad", args.grad);
}

int check_io_config(const char *call, const zo_io_config &config) {
    const auto check_range = [call](const char *what, uint32_t value, uint32_t least, uint32_t most) -> int {
        if (value >= least && value <= most) return ZO_OK;
        return fail(ZO_INVALID, "%s: %s is %u, not %u to %u", call, what, value, least, most);
    };
    ZO_CHECK(check_range("kind", config.kind, ZO_IO_THREADS, ZO_IO_URING));
    ZO_CHECK(check_range("num_lanes", config.num_lanes, 1, kMaxIoLanes));
    ZO_CHECK(check_range("threads_per_lane", config.threads_per_lane, 1, kMaxIoThreads));
    ZO_CHECK(check_range("depth", config.depth, 1, kMaxIoDepth));
    ZO_CHECK(check_range("part_bytes", config.part_bytes, kIoSector, kMaxIoPart));
    if (config.part_bytes % kIoSector != 0) {
        return fail(ZO_INVALID, "%s: part_bytes is %u, no multiple of %u", call, config.part_bytes,
                    kIoSector);
    }
    return ZO_OK;
}

int check_io(const char *call, zo_io *io) {
    ZO_CHECK(check_pointer(call, "the engine", io));
    if (io->engine.is_forked_copy()) {
        return fail(ZO_FORKED, "%s: the engine belongs to the parent process; open one after the fork", call);
    }
    return ZO_OK;
}

int unknown_ticket(const char *call, uint64_t ticket) {
    return fail(ZO_INVALID, "%s: ticket %llu is not open: it was waited for, or never given", call,
                (unsigned long long)ticket);
}

}  // namespace

extern "C" {

int zo_abi(zo_abi_info *info) {
    ZO_CHECK(check_pointer("zo_abi", "info", info));
    ZO_CHECK(check_size("zo_abi", info->size, sizeof(*info)));
    *info = {sizeof(zo_abi_info),      ZO_ABI_VERSION,       sizeof(zo_adamw_args),
             sizeof(zo_adamw_segment), sizeof(zo_grad_args), sizeof(zo_io_config),
             sizeof(zo_io_block),      sizeof(zo_io_result), sizeof(zo_io_stats_t)};
    return zo::check_isa_environment();
}

const char *zo_last_error(void) { return zo::last_error(); }

uint32_t zo_isa_supported_mask(void) { return zo::supported_isa_mask(); }

int zo_isa(void) { return zo::current_isa(); }

int zo_set_isa(int isa) { return zo::set_isa(isa); }

int zo_adamw(const zo_adamw_args *args) {
    return guarded("zo_adamw", [&]() -> int {
        ZO_CHECK(check_pointer("zo_adamw", "args", args));
        ZO_CHECK(check_size("zo_adamw", args->size, sizeof(*args)));
        ZO_CHECK(check_adamw(*args));
        zo::adamw_update(*args);
        return ZO_OK;
    });
}

int zo_master_split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel,
                    uint32_t num_threads) {
    return guarded("zo_master_split", [&]() -> int {
        ZO_CHECK(check_range("zo_master_split", numel, num_threads));
        if (numel > 0 && (master == nullptr || half == nullptr || residual == nullptr)) {
            return fail(ZO_INVALID, "zo_master_split: a buffer is NULL");
        }
        zo::master_split(master, half, residual, numel, num_threads);
        return ZO_OK;
    });
}

int zo_master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                   uint32_t num_threads) {
    return guarded("zo_master_join", [&]() -> int {
        ZO_CHECK(check_range("zo_master_join", numel, num_threads));
        if (numel > 0 && (master == nullptr || half == nullptr || residual == nullptr)) {
            return fail(ZO_INVALID, "zo_master_join: a buffer is NULL");
        }
        zo::master_join(half, residual, master, numel, num_threads);
        return ZO_OK;
    });
}

int zo_convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
               uint32_t num_threads) {
    return guarded("zo_convert", [&]() -> int {
        ZO_CHECK(check_kind("zo_convert", "dst_kind", dst_kind));
        ZO_CHECK(check_kind("zo_convert", "src_kind", src_kind));
        ZO_CHECK(check_range("zo_convert", numel, num_threads));
        if (numel > 0 && (dst == nullptr || src == nullptr))
            return fail(ZO_INVALID, "zo_convert: a buffer is NULL");
        return zo::convert(dst_kind, dst, src_kind, src, numel, num_threads);
    });
}

int zo_grad_store(zo_grad_args *args) {
    constexpr const char *call = "zo_grad_store";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_pointer(call, "args", args));
        ZO_CHECK(check_size(call, args->size, sizeof(*args)));
        ZO_CHECK(check_kind(call, "dst_kind", args->dst_kind));
        ZO_CHECK(check_kind(call, "src_kind", args->src_kind));
        ZO_CHECK(check_range(call, args->numel, args->num_threads));
        if (args->mode > ZO_ACCUMULATE) {
            return fail(ZO_INVALID, "%s: mode is %u, not 0 (overwrite) or 1 (accumulate)", call, args->mode);
        }
        if (args->numel > 0 && (args->dst == nullptr || args->src == nullptr)) {
            return fail(ZO_INVALID, "%s: a buffer is NULL", call);
        }
        return zo::grad_store(args);
    });
}

int zo_sumsq(uint32_t kind, const void *values, int64_t numel, uint32_t num_threads, double *sumsq,
             int32_t *finite) {
    constexpr const char *call = "zo_sumsq";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_kind(call, "kind", kind));
        ZO_CHECK(check_range(call, numel, num_threads));
        if (numel > 0) ZO_CHECK(check_pointer(call, "values", values));
        ZO_CHECK(check_pointer(call, "sumsq", sumsq));
        ZO_CHECK(check_pointer(call, "finite", finite));
        zo::sum_of_squares(kind, values, numel, num_threads, sumsq, finite);
        return ZO_OK;
    });
}

uint32_t zo_crc32c(uint32_t seed, const void *data, uint64_t nbytes) {
    return zo::crc32c(seed, data, nbytes);
}

int zo_word_post(int64_t *word, int64_t value) {
    ZO_CHECK(check_pointer("zo_word_post", "word", word));
    zo::word_post(word, value);
    return ZO_OK;
}

int zo_word_wait(const int64_t *word, int64_t at_least, int64_t timeout_us) {
    return guarded("zo_word_wait", [&]() -> int {
        ZO_CHECK(check_pointer("zo_word_wait", "word", word));
        return zo::word_wait(word, at_least, timeout_us);
    });
}

int zo_peer_read(int32_t pid, uint64_t address, void *dst, uint64_t nbytes) {
    ZO_CHECK(nbytes == 0 ? ZO_OK : check_pointer("zo_peer_read", "dst", dst));
    return zo::peer_read(pid, address, dst, nbytes);
}

int zo_io_open(const zo_io_config *config, zo_io **out) {
    constexpr const char *call = "zo_io_open";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_pointer(call, "config", config));
        ZO_CHECK(check_pointer(call, "out", out));
        ZO_CHECK(check_size(call, config->size, sizeof(*config)));
        ZO_CHECK(check_io_config(call, *config));
        try {
            *out = new zo_io(*config);
        } catch (const std::system_error &error) {
            if (config->kind != ZO_IO_URING) throw;
            return fail(ZO_UNSUPPORTED, "io_uring is not to be had here: %s", error.what());
        }
        return ZO_OK;
    });
}

int zo_io_add_file(zo_io *io, int32_t fd, uint32_t lane) {
    constexpr const char *call = "zo_io_add_file";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        if (lane >= io->engine.num_lanes()) {
            return fail(ZO_INVALID, "%s: lane %u of %u", call, lane, io->engine.num_lanes());
        }
        io->engine.add_file(fd, lane);
        return ZO_OK;
    });
}

int zo_io_add_memory(zo_io *io, void *memory, uint64_t nbytes) {
    constexpr const char *call = "zo_io_add_memory";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        ZO_CHECK(check_pointer(call, "memory", memory));
        io->engine.add_memory(static_cast<char *>(memory), nbytes);
        return ZO_OK;
    });
}

int zo_io_abandon(zo_io *io) {
    constexpr const char *call = "zo_io_abandon";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_pointer(call, "the engine", io));
        if (!io->engine.is_forked_copy())
            return fail(ZO_INVALID, "%s: the engine belongs to this process", call);
        io->engine.abandon();
        return ZO_OK;
    });
}

int zo_io_stop(zo_io *io) {
    return guarded("zo_io_stop", [&]() -> int {
        ZO_CHECK(check_io("zo_io_stop", io));
        io->engine.stop();
        return ZO_OK;
    });
}

int zo_io_give_up(zo_io *io) {
    return guarded("zo_io_give_up", [&]() -> int {
        ZO_CHECK(check_io("zo_io_give_up", io));
        io->engine.give_up();
        return ZO_OK;
    });
}

int zo_io_close(zo_io *io) {
    return guarded("zo_io_close", [&]() -> int {
        ZO_CHECK(check_io("zo_io_close", io));
        delete io;
        return ZO_OK;
    });
}

int zo_io_submit(zo_io *io, int op, zo_io_block *blocks, uint32_t num_blocks, void *base, int urgency,
                 uint64_t *ticket) {
    constexpr const char *call = "zo_io_submit";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        ZO_CHECK(check_pointer(call, "ticket", ticket));
        if (op < ZO_IO_READ || op > ZO_IO_READ_UNVERIFIED)
            return fail(ZO_INVALID, "%s: op is %d, not 0 to 2", call, op);
        if (num_blocks > 0) {
            ZO_CHECK(check_pointer(call, "blocks", blocks));
            ZO_CHECK(check_pointer(call, "base", base));
        }
        *ticket = io->engine.submit(op, blocks, num_blocks, static_cast<char *>(base), urgency != 0);
        return ZO_OK;
    });
}

int zo_io_wait(zo_io *io, uint64_t ticket, double timeout_s, zo_io_result *result) {
    constexpr const char *call = "zo_io_wait";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        ZO_CHECK(check_pointer(call, "result", result));
        ZO_CHECK(check_size(call, result->size, sizeof(*result)));
        return io->engine.wait(ticket, timeout_s, result) ? ZO_OK : unknown_ticket(call, ticket);
    });
}

int zo_io_done(zo_io *io, uint64_t ticket) {
    constexpr const char *call = "zo_io_done";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        bool is_done = false;
        return io->engine.done(ticket, &is_done) ? int(is_done) : unknown_ticket(call, ticket);
    });
}

int zo_io_stats(zo_io *io, zo_io_stats_t *stats) {
    constexpr const char *call = "zo_io_stats";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        ZO_CHECK(check_pointer(call, "stats", stats));
        ZO_CHECK(check_size(call, stats->size, sizeof(*stats)));
        io->engine.stats(stats);
        return ZO_OK;
    });
}

int zo_io_fault(zo_io *io, int kind, int64_t nth) {
    constexpr const char *call = "zo_io_fault";
    return guarded(call, [&]() -> int {
        ZO_CHECK(check_io(call, io));
        if (kind < ZO_FAULT_NONE || kind > ZO_FAULT_STALL || (kind != ZO_FAULT_NONE && nth < 1)) {
            return fail(ZO_INVALID, "%s: kind %d is not 0 to 10, or nth %lld is not 1 or more", call, kind,
                        (long long)nth);
        }
        io->engine.fault(kind, nth);
        return ZO_OK;
    });
}

}  // extern "C"
