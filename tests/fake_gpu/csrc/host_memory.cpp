// Registered host memory, and copies from and to it that the host cannot see.
//
// The detector sees launches. The host reads and writes its own memory unseen, so its mistakes are made to
// show. The target of a download is poison until the host knows that the download is over. The source of an
// upload is compared until the host knows that the upload is over.
#include "state.h"

#include <bit>
#include <cstring>
#include <list>

namespace fake_gpu {

namespace {

struct HostCopy {
    bool is_upload;
    Span host;
    Stream stream;
    uint64_t position;
    bool has_run = false;
    // Of an upload: the digest of its source, once its bytes are final.
    bool has_digest = false;
    uint64_t digest = 0;
    // Of a download: bytes that come to the host later.
    std::vector<char> arrived;
    bool is_poisoned = false;
};

constexpr char kPoison = char(0xFF);

// Copies that the host does not know to be over, in the order of their launch.
std::list<std::shared_ptr<HostCopy>> &copies() {
    static auto *const one = new std::list<std::shared_ptr<HostCopy>>;
    return *one;
}

std::map<uintptr_t, size_t> &registered() {
    static auto *const one = new std::map<uintptr_t, size_t>;
    return *one;
}

bool is_refusing = false;

char *bytes_of(const Span &span) { return reinterpret_cast<char *>(span.begin); }
size_t size_of(const Span &span) { return span.end - span.begin; }

// A digest that changes with every single word. It has four lanes, since each step waits for the one before.
uint64_t digest_of(const Span &span) {
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
    uint64_t lanes[4] = {1, 2, 3, 4}, words[4];
    const char *bytes = bytes_of(span);
    size_t left = size_of(span);
    for (; left >= sizeof(words); bytes += sizeof(words), left -= sizeof(words)) {
        std::memcpy(words, bytes, sizeof(words));
        for (int i = 0; i < 4; i++) lanes[i] = (std::rotl(lanes[i], 29) ^ words[i]) * kFactor;
    }
    std::memset(words, 0, sizeof(words));
    std::memcpy(words, bytes, left);
    for (int i = 0; i < 4; i++) lanes[i] = (std::rotl(lanes[i], 29) ^ words[i]) * kFactor;
    return ((lanes[0] * kFactor ^ lanes[1]) * kFactor ^ lanes[2]) * kFactor ^ lanes[3];
}

void check_source(const HostCopy &upload) {
    if (upload.has_digest && digest_of(upload.host) != upload.digest)
        report_locked("the host changed memory before it knew that an upload had read it");
}

void poison(HostCopy &download) {
    std::memset(bytes_of(download.host), kPoison, size_of(download.host));
    download.is_poisoned = true;
}

void check_target(const HostCopy &download) {
    const char *bytes = bytes_of(download.host);
    size_t nbytes = size_of(download.host);
    // Each byte is the one before it.
    if (nbytes && (bytes[0] != kPoison || std::memcmp(bytes, bytes + 1, nbytes - 1)))
        report_locked("the host wrote memory before it knew that a download had filled it");
}

void deliver(HostCopy &download) {
    if (download.is_poisoned) check_target(download);
    std::memcpy(bytes_of(download.host), download.arrived.data(), download.arrived.size());
}

void finish(HostCopy &copy) {
    if (copy.is_upload)
        check_source(copy);
    else
        deliver(copy);
}

bool has_unfinished(const Span &span, bool is_upload, const HostCopy *except) {
    for (const auto &copy : copies())
        if (copy.get() != except && copy->is_upload == is_upload && !copy->has_run &&
            copy->host.overlaps(span))
            return true;
    return false;
}

// Copies that have run and touch this memory end here: the device's next work is ordered after them.
void finish_run_copies(const Span &span, const HostCopy *except) {
    std::erase_if(copies(), [&](const std::shared_ptr<HostCopy> &copy) {
        if (copy.get() == except || !copy->has_run || !copy->host.overlaps(span)) return false;
        finish(*copy);
        return true;
    });
}

void finish_run_downloads(const Span &span) {
    std::erase_if(copies(), [&](const std::shared_ptr<HostCopy> &copy) {
        if (copy->is_upload || !copy->has_run || !copy->host.overlaps(span)) return false;
        finish(*copy);
        return true;
    });
}

std::shared_ptr<HostCopy> new_copy(bool is_upload, const Span &host, Stream stream) {
    auto copy = std::make_shared<HostCopy>();
    copy->is_upload = is_upload;
    copy->host = host;
    copy->stream = stream;
    // The position of the launch that follows.
    copy->position = state().queues[stream].num_launched + 1;
    return copy;
}

bool is_at_once() { return state().policy == Policy::kEager; }

void run_upload(HostCopy &copy, const std::function<void()> &run) {
    finish_run_downloads(copy.host);
    check_source(copy);
    copy.digest = digest_of(copy.host);
    copy.has_digest = true;
    run();
    copy.has_run = true;
}

void run_download(HostCopy &copy, const std::function<void(void *)> &run) {
    if (!copy.is_poisoned) {
        finish_run_copies(copy.host, &copy);
        poison(copy);
    }
    copy.arrived.resize(size_of(copy.host));
    run(copy.arrived.data());
    copy.has_run = true;
    if (!is_at_once()) return;
    deliver(copy);
    copies().remove_if([&](const std::shared_ptr<HostCopy> &other) { return other.get() == &copy; });
}

}  // namespace

void launch_upload(Stream stream, Span source, Span target, std::function<void()> run) {
    Lock lock(state().mutex);
    state().counts[k_uploads]++;
    state().counts[k_upload_bytes] += int64_t(size_of(source));
    auto copy = new_copy(true, source, stream);
    bool is_final = true;
    for (const auto &other : copies()) is_final &= other->is_upload || !other->host.overlaps(source);
    if (is_final) {
        copy->digest = digest_of(source);
        copy->has_digest = true;
    }
    copies().push_back(copy);
    QueuedItem item;
    item.run = [copy, run = std::move(run)] { run_upload(*copy, run); };
    launch_locked(stream, "upload", {source, target}, std::move(item));
}

void launch_download(Stream stream, Span source, Span target, std::function<void(void *)> run) {
    Lock lock(state().mutex);
    state().counts[k_downloads]++;
    state().counts[k_download_bytes] += int64_t(size_of(target));
    auto copy = new_copy(false, target, stream);
    if (!has_unfinished(target, true, nullptr) && !has_unfinished(target, false, nullptr)) {
        finish_run_copies(target, nullptr);
        poison(*copy);
    }
    copies().push_back(copy);
    QueuedItem item;
    item.run = [copy, run = std::move(run)] { run_download(*copy, run); };
    launch_locked(stream, "download", {source, target}, std::move(item));
}

void finish_known_copies_locked() {
    std::erase_if(copies(), [](const std::shared_ptr<HostCopy> &copy) {
        if (copy->position > state().host[copy->stream]) return false;
        finish(*copy);
        return true;
    });
}

void forget_copies_locked() { copies().clear(); }

// Registration

bool register_host(uintptr_t address, size_t nbytes) {
    Lock lock(state().mutex);
    if (is_refusing) return false;
    return registered().emplace(address, nbytes).second;
}

bool unregister_host(uintptr_t address) {
    Lock lock(state().mutex);
    auto found = registered().find(address);
    if (found == registered().end()) return false;
    Span span{found->first, found->first + found->second};
    for (const auto &copy : copies())
        if (copy->host.overlaps(span))
            report_locked("host memory is unregistered before the host knows that copies are over");
    // The pages may go next, so queued copies run while they are there.
    while (has_unfinished(span, true, nullptr) || has_unfinished(span, false, nullptr))
        for (auto copy : std::list(copies()))
            if (!copy->has_run && copy->host.overlaps(span))
                run_until_locked(copy->stream, copy->position, lock);
    finish_run_copies(span, nullptr);
    forget_all_accesses_locked(span);
    registered().erase(address);
    return true;
}

Registered registration_of(uintptr_t address, size_t nbytes) {
    Lock lock(state().mutex);
    auto after = registered().lower_bound(address + nbytes);
    if (after == registered().begin()) return Registered::kNo;
    // The last registration that begins before the end.
    auto [begin, size] = *std::prev(after);
    if (begin + size <= address) return Registered::kNo;
    return begin <= address && address + nbytes <= begin + size ? Registered::kYes : Registered::kInParts;
}

void refuse_registration(bool refuse) {
    Lock lock(state().mutex);
    is_refusing = refuse;
}

}  // namespace fake_gpu
