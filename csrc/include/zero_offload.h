/* The C ABI of zero_offload: everything Python may call, and nothing else.
 *
 * Rules of the border:
 *   - a call returns 0 (ZO_OK) or a negative zo_status; zo_last_error() tells the calling thread why;
 *   - no exception crosses; no memory changes owner: every buffer stays alive until the call returns,
 *     or for I/O until the ticket is done;
 *   - an args or result struct starts with uint32_t size, set by the caller to sizeof: a mismatch is refused;
 *   - tensors are plain addresses of element-aligned memory; counts are elements unless a name ends in bytes;
 *   - a kernel returns the same bits, whatever the instruction set, the number of threads and their way with
 *     subnormal numbers. That way comes back as it was.
 *
 * zero_offload/hardware/abi.py mirrors this file; tests/house/test_abi.py parses it and compares the two.
 */
#ifndef ZERO_OFFLOAD_H
#define ZERO_OFFLOAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZO_API __attribute__((visibility("default")))
#define ZO_ABI_VERSION 11

enum zo_status {
    ZO_OK = 0,
    ZO_INVALID = -1,     /* an argument that cannot work */
    ZO_UNSUPPORTED = -2, /* not on this processor, or not offered */
    ZO_NO_MEMORY = -3,
    ZO_SYSTEM = -4, /* the operating system refused a facility, such as a thread */
    ZO_FORKED = -5, /* an I/O engine made before a fork was used in the child */
    ZO_INTERNAL = -6
};

enum zo_isa_kind { ZO_ISA_SCALAR = 0, ZO_ISA_AVX2 = 1, ZO_ISA_AVX512 = 2, ZO_ISA_NEON = 3 };

/* Element types. As an optimizer's value, ZO_BF16 is the rounded half of an fp32 master that `residual`
 * completes. ZO_FP16 is a rounded copy of the fp32 `master`: five bits of exponent leave no half to
 * complete. */
enum zo_kind { ZO_FP32 = 0, ZO_BF16 = 1, ZO_FP16 = 2 };
#define ZO_NUM_KINDS 3

enum zo_grad_mode { ZO_OVERWRITE = 0, ZO_ACCUMULATE = 1 };

/* ---- library ----------------------------------------------------------------------------------------------
 */

typedef struct {
    uint32_t size;
    uint32_t version;
    uint32_t sizeof_update_args;
    uint32_t sizeof_segment;
    uint32_t sizeof_grad_args;
    uint32_t sizeof_io_config;
    uint32_t sizeof_io_block;
    uint32_t sizeof_io_result;
    uint32_t sizeof_io_stats;
} zo_abi_info;

/* Fills the version and the sizes; fails when ZERO_OFFLOAD_ISA names what this processor does not have. */
ZO_API int zo_abi(zo_abi_info *info);

/* Why the last failing call of this thread failed; valid until its next failing call. */
ZO_API const char *zo_last_error(void);

/* Bit i set: kernels of zo_isa_kind i can run here. */
ZO_API uint32_t zo_isa_supported_mask(void);

/* The zo_isa_kind in use: the widest supported one unless ZERO_OFFLOAD_ISA or zo_set_isa chose another. */
ZO_API int zo_isa(void);

/* Takes effect from the next kernel call on, in every thread. */
ZO_API int zo_set_isa(int isa);

/* ---- the optimizers' updates ------------------------------------------------------------------------------
 */

/* An update, its states in their order, and what beta1 and beta2 of a segment are to it. */
enum zo_rule {
    ZO_ADAMW = 0,         /* exp_avg, exp_avg_sq */
    ZO_ADAMW_AMSGRAD = 1, /* exp_avg, exp_avg_sq, max_exp_avg_sq */
    ZO_ADAM = 2,          /* as AdamW, but weight_decay is added to the gradient (L2) */
    ZO_ADAM_AMSGRAD = 3,  /* the same with max_exp_avg_sq */
    ZO_ADAGRAD = 4,       /* sum; beta1 is lr_decay, beta2 initial_accumulator_value */
    ZO_LION = 5,          /* exp_avg */
    ZO_SGD = 6,           /* no state */
    ZO_SGD_MOMENTUM = 7,  /* momentum_buffer; beta1 is the momentum, beta2 the dampening */
    ZO_SGD_NESTEROV = 8   /* the same */
};
#define ZO_NUM_RULES 9

/* How the states rest in memory. ZO_STATES_FP32: whole. ZO_STATES_BF16: as uint16_t halves.
 * ZO_STATES_COMPACT: as 8-bit codes, with an fp32 scale for each ZO_STATE_BLOCK elements, counted from the
 * start of the section. A bf16 value then keeps the upper 24 bits of its master, in a residual of 8. Numbers
 * are shortened by random rounding, so that they keep their mean; a step itself uses the new states before.
 * An fp32 value, and the master of an fp16 one, stay whole.
 * A code is the root of a value in units of its block's scale, q. With code c, a state that is never negative
 * (uint8_t) is (c q)^2, another (int8_t) is c |c| q^2. A state above 0 that is never negative does not get
 * code 0. A block with a NaN or an infinity gets the scale NaN: all of it decodes to NaN. */
enum zo_state_format { ZO_STATES_FP32 = 0, ZO_STATES_BF16 = 1, ZO_STATES_COMPACT = 2 };
#define ZO_NUM_STATE_FORMATS 3
#define ZO_STATE_BLOCK 256

/* Elements [begin, end) of all buffers share these hyperparameters; `step` counts from 1. A grad_scale below
 * 0 maximizes. */
typedef struct {
    int64_t begin;
    int64_t end;
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double grad_scale;
    int64_t step;
} zo_segment;

typedef struct {
    uint32_t size;
    uint32_t rule;
    uint32_t value_kind;
    uint32_t grad_kind;
    uint32_t num_threads;
    uint32_t state_format;
    int64_t num_segments;
    void *value;
    void *residual; /* uint16_t, beside compact states uint8_t */
    float *master;
    void *states[3];
    float *scales[3]; /* of compact states */
    const void *grad;
    void *value_out;
    const zo_segment *segments;
    uint64_t seed;  /* of what is rounded at random */
    int64_t origin; /* the index in its section of the buffers' element 0 */
} zo_update_args;

/* One fused pass over the segments, which are sorted and disjoint; elements in no segment are not touched.
 * `residual` is read for bf16 values only, `master` for fp16 values only. `value_out`, when not NULL,
 * receives a second copy of the new value. No two buffers may overlap.
 * Random rounding depends on `seed`, the segment's step and the element's index in its section
 * alone: not on how a section is cut into calls and segments. Sections need seeds of their own. Beside
 * compact states, `origin` and each segment's begin are multiples of ZO_STATE_BLOCK. A segment may end inside
 * a block: what follows it there is not touched and counts as 0, so it must not be anyone's. */
ZO_API int zo_update(const zo_update_args *args);

/* ---- master weights and conversions -----------------------------------------------------------------------
 */

/* An fp32 master x as a bf16 half and a 16-bit residual that completes it:
 *   half = (bits(x) + 0x8000) >> 16, residual = low 16 bits of x; back: (half << 16) +
 * sign_extended(residual). Every finite and infinite x comes back bit for bit, also when the half rounds to
 * infinity. Half-way cases round away from zero. A NaN keeps its sign and top payload bits, becomes quiet,
 * and has residual 0. No two buffers may overlap, here and below. */
ZO_API int zo_master_split(const float *master, uint16_t *half, uint16_t *residual, int64_t numel,
                           uint32_t num_threads);
ZO_API int zo_master_join(const uint16_t *half, const uint16_t *residual, float *master, int64_t numel,
                          uint32_t num_threads);

/* The same with the upper 24 bits of the master, rounded to nearest, and their lower 8 as the residual.
 * Half-way cases round away from zero; a NaN becomes 0x7FC0 with residual 0. */
ZO_API int zo_short_master_split(const float *master, uint16_t *half, uint8_t *residual, int64_t numel,
                                 uint32_t num_threads);
ZO_API int zo_short_master_join(const uint16_t *half, const uint8_t *residual, float *master, int64_t numel,
                                uint32_t num_threads);

/* One state between fp32 and a zo_state_format, from element 0 of a block on. Encoding rounds to nearest;
 * decoded and encoded again, codes and scales come back as they were. `scales` (one for each block that is
 * begun) and `is_signed` (0 or 1) are read for compact states only. */
ZO_API int zo_states_decode(uint32_t format, uint32_t is_signed, const void *states, const float *scales,
                            float *fp32, int64_t numel, uint32_t num_threads);
ZO_API int zo_states_encode(uint32_t format, uint32_t is_signed, const float *fp32, void *states,
                            float *scales, int64_t numel, uint32_t num_threads);

/* Between fp32 and each zo_kind. To bf16 and fp16: round to nearest, ties to even; any NaN becomes 0x7FC0 or
 * 0x7E00. Between bf16 and fp16 is not offered: it would round what was whole. Of one kind, dst may be src;
 * otherwise they may not overlap. */
ZO_API int zo_convert(uint32_t dst_kind, void *dst, uint32_t src_kind, const void *src, int64_t numel,
                      uint32_t num_threads);

/* ---- gradients --------------------------------------------------------------------------------------------
 */

/* dst = src, or dst += src in fp32. `sumsq` and `finite` are of the values written to dst. bf16 and fp16 are
 * stored from their own kind only, and only an fp32 dst accumulates. dst may be src where it is overwritten
 * by its own kind; otherwise they may not overlap. Any NaN becomes 0x7FC00000 where it is added up, and
 * 0x7E00 in fp16. */
typedef struct {
    uint32_t size;
    uint32_t dst_kind;
    uint32_t src_kind;
    uint32_t mode;
    uint32_t num_threads;
    int32_t finite; /* a result, as is sumsq */
    void *dst;
    const void *src;
    int64_t numel;
    double sumsq;
} zo_grad_args;

ZO_API int zo_grad_store(zo_grad_args *args);

/* The same sum over values that are already there. */
ZO_API int zo_sumsq(uint32_t kind, const void *values, int64_t numel, uint32_t num_threads, double *sumsq,
                    int32_t *finite);

/* ---- checksum ---------------------------------------------------------------------------------------------
 */

/* CRC-32C (Castagnoli). Seed 0 is the standard value; the result for one part is the seed for the next. */
ZO_API uint32_t zo_crc32c(uint32_t seed, const void *data, uint64_t nbytes);

/* ---- other processes of this machine ----------------------------------------------------------------------
 */

/* A word in memory that several processes map: who has waited for a value sees all that was written before it
 * was posted. The wait returns 1 when the word is at_least or more, 0 when timeout_us have passed. */
ZO_API int zo_word_post(int64_t *word, int64_t value);
ZO_API int zo_word_wait(const int64_t *word, int64_t at_least, int64_t timeout_us);

/* ---- file I/O ---------------------------------------------------------------------------------------------
 */

typedef struct zo_io zo_io;

/* Who moves the blocks: threads in pread and pwrite, or Linux's io_uring. */
enum zo_io_kind { ZO_IO_THREADS = 0, ZO_IO_URING = 1 };

enum zo_io_op { ZO_IO_READ = 0, ZO_IO_WRITE = 1, ZO_IO_READ_UNVERIFIED = 2 };

enum zo_io_status {
    ZO_IO_DONE = 0,
    ZO_IO_OS_ERROR = 1,
    ZO_IO_TRUNCATED = 2, /* the file ends before the block does */
    ZO_IO_CHECKSUM = 3,  /* the bytes differ from the block's crc, twice */
    ZO_IO_TIMEOUT = 4
};

/* Faults for tests. `nth` counts blocks from the zo_io_fault call on, the first being 1; each fires once. */
enum zo_io_fault_kind {
    ZO_FAULT_NONE = 0,
    ZO_FAULT_WRITE_EIO = 1,
    ZO_FAULT_READ_EIO = 2,
    ZO_FAULT_WRITE_ENOSPC = 3,
    ZO_FAULT_READ_FLIP = 4,   /* one bit of the buffer, after a good read */
    ZO_FAULT_WRITE_FLIP = 5,  /* one bit of what reaches the file; the crc is that of the good bytes */
    ZO_FAULT_WRITE_SHORT = 6, /* the first transfer stops half-way */
    ZO_FAULT_WRITE_DROP = 7,  /* nothing reaches the file, and success is reported */
    ZO_FAULT_READ_SHORT = 8,  /* the file seems to end */
    ZO_FAULT_STORM = 9,       /* EINTR and EAGAIN, forty times */
    ZO_FAULT_STALL = 10       /* nothing happens until the next zo_io_fault call, or close */
};

/* How an engine works. One lane per drive: files are in lane 0 until zo_io_add_file says otherwise. */
typedef struct {
    uint32_t size;
    uint32_t kind;
    uint32_t num_lanes;
    uint32_t threads_per_lane;
    uint32_t depth;      /* of ZO_IO_URING: parts in flight per thread */
    uint32_t part_bytes; /* blocks are moved in parts of at most so many bytes, a multiple of 4096 */
} zo_io_config;

/* One block of a file: a row of an extent's block table. A write fills crc = zo_crc32c(seed, bytes). */
typedef struct {
    uint64_t offset;
    uint32_t nbytes;
    uint32_t crc;
    int32_t fd;
    uint32_t seed;
} zo_io_block;

/* `block` is the first failing block of the submission, whose crcs and errno these are. By CLOCK_MONOTONIC,
 * its first block was started at `begin_ns` and the last one moved at `end_ns`; 0 where there was none. */
typedef struct {
    uint32_t size;
    int32_t status;
    int32_t sys_errno;
    int32_t op;
    uint32_t block;
    uint32_t expected_crc;
    uint32_t actual_crc;
    uint32_t reserved;
    uint64_t bytes_done;
    int64_t begin_ns;
    int64_t end_ns;
} zo_io_result;

typedef struct {
    uint32_t size;
    uint32_t jobs_running;
    uint64_t jobs_queued;
    uint64_t bytes_read;
    uint64_t bytes_written;
} zo_io_stats_t;

/* ZO_UNSUPPORTED when io_uring is asked for and the kernel, or a sandbox around us, does not offer it. */
ZO_API int zo_io_open(const zo_io_config *config, zo_io **out);

/* Waits for everything submitted, and ends the threads; who waits for a ticket still gets its result. */
ZO_API int zo_io_stop(zo_io *io);

/* Stops, and frees the engine: no other call may be under way. */
ZO_API int zo_io_close(zo_io *io);

/* A drive answers no more: what has not started never will, and what has finds its memory left alone. */
ZO_API int zo_io_give_up(zo_io *io);

/* Which drive a file is on; again when the descriptor comes to stand for another file. */
ZO_API int zo_io_add_file(zo_io *io, int32_t fd, uint32_t lane);

/* Memory that is used again and again, and stays where it is for as long as the engine lives. io_uring then
 * keeps its pages at hand. Nothing but speed depends on it. */
ZO_API int zo_io_add_memory(zo_io *io, void *memory, uint64_t nbytes);

/* In a forked child, instead of zo_io_close: lets go of the descriptors it has inherited. */
ZO_API int zo_io_abandon(zo_io *io);

/* Returns at once. Block i lies in memory at base + the sum of nbytes of the blocks before it; each is one
 * job. `blocks` and the memory stay alive until the ticket is done. Urgent submissions go before all others;
 * reads and writes take turns.
 */
ZO_API int zo_io_submit(zo_io *io, int op, zo_io_block *blocks, uint32_t num_blocks, void *base, int urgency,
                        uint64_t *ticket);

/* A negative timeout waits for ever. The ticket is forgotten unless the result says ZO_IO_TIMEOUT. */
ZO_API int zo_io_wait(zo_io *io, uint64_t ticket, double timeout_s, zo_io_result *result);

/* 1 when a wait would not block, 0 when it would, negative on error. */
ZO_API int zo_io_done(zo_io *io, uint64_t ticket);

ZO_API int zo_io_stats(zo_io *io, zo_io_stats_t *stats);

ZO_API int zo_io_fault(zo_io *io, int kind, int64_t nth);

#ifdef __cplusplus
}
#endif

#endif /* ZERO_OFFLOAD_H */
