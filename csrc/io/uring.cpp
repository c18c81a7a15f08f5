// A lane's blocks by io_uring: many parts in flight from one thread, files and lasting memory by their
// numbers in the kernel's tables.
//
// While the kernel moves parts, the thread computes the checksums of others. It takes one part at a time: all
// parts that can be launched are on their way before the next.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <list>
#include <system_error>
#include <unordered_map>

#include "io/engine.h"
#include "io/ring.h"

namespace zo {
namespace {

using uring::Cqe;
using uring::Ring;
using uring::Sqe;

constexpr uint32_t kMaxFiles = 64, kMaxBuffers = 64;
constexpr uint64_t kWakeUp = ~0ull;

// A block under way.
struct Active {
    Job job;
    BlockTransfer transfer;
    uint32_t under_way = 0;
    bool launchable = false;  // is in launchable_
    bool to_advance = false;  // is in to_advance_
};

// One part on its way.
struct Request {
    Active *active;
    Part part;
};

class UringTransport : public Transport {
  public:
    UringTransport(IoEngine *engine, Lane *lane, const zo_io_config &config)
        : engine_(engine),
          lane_(lane),
          part_bytes_(config.part_bytes),
          ring_(config.depth + 1),
          event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
          requests_(config.depth) {
        if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        for (uint32_t i = 0; i < config.depth; ++i) free_requests_.push_back(i);
    }

    ~UringTransport() override {
        if (event_fd_ >= 0) close(event_fd_);
    }

    void run() override {
        broken_ = ring_.enable();
        has_file_table_ = ring_.register_files(kMaxFiles);
        has_buffer_table_ = ring_.register_buffers(kMaxBuffers);
        while (broken_ == 0) {
            sleeping_ = true;
            fill();
            if (actives_.empty()) {
                Job job;
                if (!engine_->take(*lane_, &job)) {
                    // The ring may live on until the engine is freed: no file stays open with it.
                    ring_.unregister_files();
                    return;
                }
                begin(job);
                continue;
            }
            launch();
            if (!to_advance_.empty()) {
                advance();
            } else if (may_sum_ahead()) {
                launchable_.front()->transfer.sum_ahead(part_bytes_);
            }
        }
        fail_everything();
    }

    void wake() override {
        if (sleeping_.exchange(false)) {
            const uint64_t one = 1;
            (void)!write(event_fd_, &one, sizeof(one));
        }
    }

    void close_inherited() override {
        ring_.close_inherited();
        close(event_fd_);
        event_fd_ = -1;
    }

  private:
    // Puts parts into the ring as long as there is room and work.
    void fill() {
        release_held();
        if (!held_.empty()) return;  // as if the drive had stopped
        Job job;
        while (!free_requests_.empty() && held_.empty()) {
            if (!launchable_.empty()) {
                put_part();
            } else if (engine_->try_take(*lane_, &job)) {
                begin(job);
            } else {
                break;
            }
        }
    }

    void begin(const Job &job) {
        actives_.push_back(std::make_unique<Active>(Active{job, job.transfer()}));
        Active *active = actives_.back().get();
        if (job.fault == ZO_FAULT_STALL) {
            held_.push_back(active);
        } else {
            queue(active);
        }
    }

    void release_held() {
        if (held_.empty() || engine_->stalled()) return;
        for (Active *active : held_) queue(active);
        held_.clear();
    }

    void queue(Active *active) {
        active->launchable = true;
        launchable_.push_back(active);
    }

    void put_part() {
        Active *active = launchable_.front();
        // A checksum takes its time: what is ready goes first.
        if (active->transfer.lacks_sum(1) && ring_.has_unsubmitted()) enter(0);
        Part part;
        if (engine_->given_up() || !active->transfer.next(part_bytes_, &part)) {
            launchable_.pop_front();
            active->launchable = false;
            if (active->under_way == 0) advance_later(active);
            return;
        }
        const uint32_t index = free_requests_.back();
        free_requests_.pop_back();
        requests_[index] = {active, part};
        ++active->under_way;
        const zo_io_block &block = active->transfer.block();
        Sqe *entry = ring_.put();
        const bool writes = active->transfer.op() == ZO_IO_WRITE;
        if (is_registered(active->job.span)) {
            entry->opcode = writes ? uring::kOpWriteFixed : uring::kOpReadFixed;
            entry->buffer_index = uint16_t(active->job.span);
        } else {
            entry->opcode = writes ? uring::kOpWrite : uring::kOpRead;
        }
        entry->address = reinterpret_cast<uintptr_t>(active->transfer.memory() + part.begin);
        entry->nbytes = uint32_t(part.nbytes());
        entry->offset = block.offset + part.begin;
        entry->user_data = index;
        entry->fd = file_index(block.fd, active->job.file_version);
        if (entry->fd >= 0) {
            entry->flags = uring::kFixedFile;
        } else {
            entry->fd = block.fd;
        }
    }

    // The file's number in the kernel's table; -1 when it has none.
    int file_index(int fd, uint32_t version) {
        if (!has_file_table_ || version == 0) return -1;
        const auto found = files_.find(fd);
        if (found != files_.end() && found->second.version == version) return int(found->second.index);
        const uint32_t index = found != files_.end() ? found->second.index : uint32_t(files_.size());
        if (index >= kMaxFiles || !ring_.register_file(index, fd)) return -1;
        files_[fd] = {index, version};
        return int(index);
    }

    // Whether the kernel has the pages at hand; a limit on locked memory may forbid it.
    bool is_registered(int span) {
        if (span == kNoSpan || !has_buffer_table_ || uint32_t(span) >= kMaxBuffers) return false;
        for (int next = int(buffers_.size()); next <= span; ++next) {
            const MemorySpan memory = engine_->span(next);
            buffers_.push_back(ring_.register_buffer(uint32_t(next), memory.begin, memory.nbytes));
        }
        return buffers_[size_t(span)];
    }

    // With all requests under way, the next part is summed, so that it leaves as soon as there are results.
    // Some drives announce none before they have run out of requests.
    bool may_sum_ahead() const {
        if (launchable_.empty() || engine_->given_up()) return false;
        return launchable_.front()->transfer.lacks_sum(part_bytes_ * requests_.size());
    }

    void launch() {
        const bool may_sleep = to_advance_.empty() && !may_sum_ahead();
        if (may_sleep && !watches_ && (!free_requests_.empty() || !held_.empty())) {
            Sqe *entry = ring_.put();
            entry->opcode = uring::kOpPollAdd;
            entry->fd = event_fd_;
            entry->op_flags = POLLIN;
            entry->user_data = kWakeUp;
            watches_ = true;
        }
        enter(may_sleep ? 1 : 0);
        sleeping_ = false;
        Cqe result;
        while (ring_.take(&result)) completed(result);
    }

    void enter(uint32_t min_results) {
        if (broken_ == 0) broken_ = ring_.enter(min_results);
    }

    // The kernel takes nothing from this ring: each block ends with its errno, those to come too.
    void fail_everything() {
        for (const auto &active : actives_) end(active.get(), broken_);
        actives_.clear();
        Job job;
        while (engine_->take(*lane_, &job)) {
            BlockTransfer transfer = job.transfer();
            transfer.cancel(broken_);
            engine_->finish(job, transfer.outcome());
        }
    }

    void end(Active *active, int sys_errno) {
        active->transfer.cancel(sys_errno);
        engine_->finish(active->job, active->transfer.outcome());
    }

    void completed(const Cqe &result) {
        if (result.user_data == kWakeUp) {
            uint64_t count;
            (void)!read(event_fd_, &count, sizeof(count));
            watches_ = false;
            return;
        }
        const Request request = requests_[result.user_data];
        free_requests_.push_back(uint32_t(result.user_data));
        request.active->transfer.completed(request.part, result.result);
        --request.active->under_way;
        advance_later(request.active);
    }

    void advance_later(Active *active) {
        if (active->to_advance) return;
        active->to_advance = true;
        to_advance_.push_back(active);
    }

    // Sums a part of one block. Then the block ends if it has all its bytes, or is on its way again.
    void advance() {
        Active *active = to_advance_.front();
        // One block after the other: the sooner it ends, the sooner its buffer has the next one.
        if (!engine_->given_up() && active->transfer.sum_next()) return;
        to_advance_.pop_front();
        active->to_advance = false;
        if (active->launchable || active->under_way > 0) return;  // comes back when its parts do
        if (engine_->given_up()) {
            end(active, ETIMEDOUT);
        } else if (!active->transfer.finished()) {
            queue(active);
            return;
        } else {
            engine_->finish(active->job, active->transfer.outcome());
        }
        for (auto each = actives_.begin(); each != actives_.end(); ++each) {
            if (each->get() == active) {
                actives_.erase(each);
                break;
            }
        }
    }

    struct TableEntry {
        uint32_t index;
        uint32_t version;
    };

    IoEngine *engine_;
    Lane *lane_;
    uint64_t part_bytes_;
    Ring ring_;
    int event_fd_;
    std::vector<Request> requests_;  // by user_data
    std::vector<uint32_t> free_requests_;
    std::list<std::unique_ptr<Active>> actives_;
    std::deque<Active *> launchable_, to_advance_;
    std::vector<Active *> held_;
    std::unordered_map<int, TableEntry> files_;  // in the kernel's table, by descriptor
    bool has_file_table_ = false;
    std::vector<bool> buffers_;  // by span: whether it is registered
    bool has_buffer_table_ = false;
    int broken_ = 0;        // the errno that ended the ring
    bool watches_ = false;  // a poll of event_fd_ is in the ring
    std::atomic<bool> sleeping_{false};
};

}  // namespace

std::unique_ptr<Transport> make_uring_transport(IoEngine *engine, Lane *lane, const zo_io_config &config) {
    return std::make_unique<UringTransport>(engine, lane, config);
}

}  // namespace zo
