// The border of the I/O engine, and of ranks on one machine: validate, call, turn every failure into a
// status.
#include "abi_checks.h"
#include "io/engine.h"
#include "ranks/neighbour.h"

namespace {

using zo::check_pointer;
using zo::check_size;
using zo::fail;
using zo::guarded;

constexpr uint32_t kMaxIoThreads = 64, kMaxIoLanes = 64, kMaxIoDepth = 4096;
constexpr uint32_t kIoSector = 4096, kMaxIoPart = 1u << 30;

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
        io->engine.close_inherited();
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
