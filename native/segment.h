// segment.h: an anonymous file of fixed size, its pages claimed, and how this process maps it.
// Leaves to the layers above: what the bytes mean (only Shape and Geometry know where they lie).
#pragma once
#include <dirent.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <memory>
#include <string>
#include <utility>

#include "control_group.h"
#include "geometry.h"
#include "process.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_HUGETLB
#define MFD_HUGETLB 4U
#endif

namespace penstock {

// ── is there enough? ───────────────────────────────────────────────────────────────────────────────────────────────
// What this process may still allocate: the least of what the machine has and what each control group above it leaves.
// The kernel would answer an overdraft of a group by killing a process, so it is asked beforehand.
struct Available {
    u64 nbytes;
    const char* owner;  // what leaves no more, in words
};
inline Available memory_available() {
    Available least{read_number("/proc/meminfo", "MemAvailable"), "the machine"};
    if (least.nbytes != NEVER) least.nbytes *= 1024;
    visit_control_groups("memory", [&](const std::string& folder, bool is_v2) {
        u64 limit = read_number((folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes")).c_str());
        u64 used = read_number((folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes")).c_str());
        if (limit == NEVER || used == NEVER) return;
        // what the group could drop: files of disks in the page cache
        u64 cache = read_number((folder + "/memory.stat").c_str(), is_v2 ? "\ninactive_file " : "total_inactive_file ");
        u64 busy = cache != NEVER && cache < used ? used - cache : used;
        u64 left = limit > busy ? limit - busy : 0;
        if (left < least.nbytes) least = {left, "its control group"};
    });
    return least;
}

// spared: bytes that stay for others.
inline void require_memory(u64 nbytes, const char* what, u64 spared) {
    Available available = memory_available();
    if (nbytes <= available.nbytes && spared <= available.nbytes - nbytes) return;
    std::string stays = spared != 0 ? format(", of which %s stay for others", in_units(spared).c_str()) : std::string();
    throw Error(Fault::memory_exhausted,
                format("%s of %s does not fit: %s has %s left%s", what, in_units(nbytes).c_str(), available.owner,
                       in_units(available.nbytes).c_str(), stays.c_str()))
        .with("requested", static_cast<i64>(nbytes))
        .with("free", static_cast<i64>(available.nbytes));
}

// Gives [offset, offset + nbytes) of the file its pages, or says why not; never a SIGBUS later.
inline void claim_pages(int fd, u64 offset, u64 nbytes, const char* what, u64 spared = 0) {
    require_memory(nbytes, what, spared);
    int failed;
    do failed = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0 ? errno : 0;
    while (failed == EINTR);
    if (failed == 0) return;
    if (failed != ENOSPC && failed != ENOMEM && failed != EFBIG)
        throw os_error(format("%s of %s cannot be claimed", what, in_units(nbytes).c_str()), "fallocate", failed);
    u64 available = memory_available().nbytes;
    rlimit limit{};
    if (failed == EFBIG && ::getrlimit(RLIMIT_FSIZE, &limit) == 0) available = limit.rlim_cur;
    throw Error(Fault::memory_exhausted, format("%s of %s does not fit, %s available: ", what, in_units(nbytes).c_str(),
                                                in_units(available).c_str()) +
                                             describe_failure("fallocate", failed))
        .with("requested", static_cast<i64>(nbytes))
        .with("free", static_cast<i64>(available));
}

// What an unrelated process needs to attach; plain numbers, good while the owner lives and keeps the descriptor.
struct TicketNumbers {
    int pid = 0;
    u64 start = 0;
    int fd = -1;
    u64 inode = 0;
    u64 nonce = 0;
};

struct SegmentOptions {
    std::string name;
    u64 huge_nbytes = 0;  // 0: ordinary pages
    bool huge_required = false;
    int numa_node = -1;
    bool numa_required = false;
    bool prefault = true;
    std::string schema{};  // what a channel's messages are, or where a pool's bytes lie; the core does not look at it
};

// Shared from this, so that a reference which the bindings were given holds no object of Python: the watcher's thread,
// which has not the interpreter, may drop the last one.
class Segment : public std::enable_shared_from_this<Segment> {
   public:
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    static std::shared_ptr<Segment> create(Shape shape, const SegmentOptions& options) {
        shape.schema_nbytes = options.schema.size();
        std::string label = "penstock:" + options.name;
        int fd = -1;
        std::string fallback;
        if (options.huge_nbytes != 0) {
            unsigned log2 = static_cast<unsigned>(__builtin_ctzll(options.huge_nbytes));
            fd = static_cast<int>(::syscall(SYS_memfd_create, label.c_str(), 1u | 2u | MFD_HUGETLB | (log2 << 26)));
            if (fd >= 0) {
                shape.page = options.huge_nbytes;
                Geometry g = Geometry::of(shape);
                if (::ftruncate(fd, static_cast<off_t>(g.total)) != 0 ||
                    ::fallocate(fd, 0, 0, static_cast<off_t>(g.trace)) != 0) {
                    ::close(fd);
                    fd = -1;
                }
            }
            if (fd < 0) {
                if (options.huge_required)
                    throw Error(
                        Fault::memory_exhausted,
                        format("segment '%s' wants huge pages of %s and the machine has not enough of them: raise "
                               "vm.nr_hugepages or leave huge_pages out",
                               options.name.c_str(), in_units(options.huge_nbytes).c_str()))
                        .with("requested", static_cast<i64>(Geometry::of(shape).total))
                        .with("free", 0);
                fallback = "ordinary pages: not enough huge pages";
                shape.page = PAGE;
            }
        }
        Geometry geometry = Geometry::of(shape);
        if (fd < 0) {
            fd = static_cast<int>(::syscall(SYS_memfd_create, label.c_str(), 1u | 2u));  // CLOEXEC | ALLOW_SEALING
            if (fd < 0) throw os_error("segment '" + options.name + "'", "memfd_create", errno);
        }
        std::shared_ptr<Segment> self(new Segment(fd, geometry));
        self->name_ = options.name.substr(0, NAME_NBYTES - 1);
        std::string what = "segment '" + self->name_ + "'";
        struct stat status{};
        if (::fstat(fd, &status) != 0) throw os_error(what, "fstat", errno);
        self->inode_ = status.st_ino;
        if (::fchmod(fd, 0600) != 0) throw os_error(what, "fchmod", errno);
        int failed;
        do failed = ::ftruncate(fd, static_cast<off_t>(geometry.total)) != 0 ? errno : 0;
        while (failed == EINTR);
        if (failed != 0 && failed != EFBIG) throw os_error(what, "ftruncate", failed);
        if (failed != 0) {
            rlimit limit{};
            ::getrlimit(RLIMIT_FSIZE, &limit);
            throw Error(Fault::memory_exhausted, what + " of " + in_units(geometry.total) +
                                                     " does not fit: " + describe_failure("ftruncate", failed))
                .with("requested", static_cast<i64>(geometry.total))
                .with("free", static_cast<i64>(limit.rlim_cur));
        }
        if (options.numa_node >= 0) failed = self->place(options.numa_node);
        if (failed != 0) {
            std::string why = format("no NUMA node %d", options.numa_node);
            bool is_known = failed == EINVAL || failed == ENOSYS;
            if (options.numa_required && is_known)
                throw Error(Fault::value, what + ": this machine has " + why + " that this process may use");
            if (options.numa_required) throw os_error(what, "mbind", failed);
            if (!is_known) why += " (" + describe_failure("mbind", failed) + ")";
            fallback += (fallback.empty() ? "" : "; ") + why;
        }
        claim_pages(fd, 0, geometry.claimed_at_creation(), what.c_str());
        if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
            throw os_error("sealing " + what, "fcntl", errno);
        self->map(options.prefault);
        Header& header = self->header();
        header.version = LAYOUT_VERSION;
        header.fingerprint = layout_fingerprint();
        while (header.nonce == 0) {
            if (::getrandom(&header.nonce, sizeof header.nonce, 0) == sizeof header.nonce) continue;
            if (errno != EINTR && errno != EAGAIN) throw os_error(what, "getrandom", errno);
            header.nonce = 0;
        }
        header.pid_namespace = own_namespace("pid");
        header.time_namespace = own_namespace("time");
        header.created_ns = now_ns();
        header.numa_node_plus_one = static_cast<u64>(options.numa_node + 1);
        header.shape = shape;
        if (!options.schema.empty())
            std::memcpy(self->at<u8>(geometry.schema), options.schema.data(), options.schema.size());
        std::strncpy(header.name, options.name.c_str(), NAME_NBYTES - 1);
        header.magic = MAGIC;
        self->nonce_ = header.nonce;
        self->fallback_ = fallback;
        return self;
    }

    // Takes over fd. Everything that the file says of itself is checked here, once.
    // is_observer: everything is mapped read-only, nothing is faulted in.
    static std::shared_ptr<Segment> adopt(int fd, bool prefault = true, bool is_observer = false) {
        struct Owned {
            int fd;
            ~Owned() {
                if (fd >= 0) ::close(fd);
            }
        } owned{fd};
        auto refuse = [](std::string why) {
            throw Error(Fault::layout_mismatch, "expected a segment of Penstock: " + why);
        };
        struct stat status{};
        if (::fstat(fd, &status) != 0) throw os_error("attaching", "fstat", errno);
        if (status.st_uid != ::geteuid())
            refuse(format("it belongs to user %u, this process is user %u", status.st_uid, ::geteuid()));
        int seals = ::fcntl(fd, F_GET_SEALS);
        if (seals < 0 && errno != EINVAL) throw os_error("attaching", "fcntl", errno);
        if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
            refuse("it is not sealed against resizing");
        Header header{};
        static_assert(std::is_standard_layout_v<Shape>);
        char raw[sizeof(Header)];
        ssize_t got;
        do got = ::pread(fd, raw, sizeof raw, 0);
        while (got < 0 && errno == EINTR);
        if (got < 0) throw os_error("attaching", "pread", errno);
        if (got != static_cast<ssize_t>(sizeof raw)) refuse("it is too short");
        std::memcpy(static_cast<void*>(&header), raw, offsetof(Header, peers_version));
        if (header.magic != MAGIC)
            refuse(format("magic: expected %016llx, found %016llx", static_cast<unsigned long long>(MAGIC),
                          static_cast<unsigned long long>(header.magic)));
        if (header.version != LAYOUT_VERSION || header.fingerprint != layout_fingerprint())
            refuse(format("layout: expected version %u (%08x), found version %u (%08x): both sides need the same build",
                          LAYOUT_VERSION, layout_fingerprint(), header.version, header.fingerprint));
        if (header.pid_namespace != own_namespace("pid"))
            refuse("its processes live in another pid namespace, where their deaths cannot be seen");
        if (header.time_namespace != own_namespace("time"))
            refuse("its processes live in another time namespace, where their clocks and start times are others");
        Geometry geometry = Geometry::of(header.shape);
        if (static_cast<u64>(status.st_size) < geometry.total)
            refuse(format("it has %llu bytes and says %llu", static_cast<unsigned long long>(status.st_size),
                          static_cast<unsigned long long>(geometry.total)));
        std::shared_ptr<Segment> self(new Segment(std::exchange(owned.fd, -1), geometry));
        self->inode_ = status.st_ino;
        self->nonce_ = header.nonce;
        header.name[NAME_NBYTES - 1] = 0;
        self->name_ = header.name;
        self->is_observer_ = is_observer;
        self->map(prefault && !is_observer, is_observer ? PROT_READ : PROT_READ | PROT_WRITE);
        return self;
    }

    static std::shared_ptr<Segment> attach(const TicketNumbers& ticket, bool prefault = true) {
        Sight owner = look_at(ticket.pid, ticket.start);
        if (owner.liveness == Liveness::gone)
            throw Error(Fault::layout_mismatch,
                        format("the owner of the ticket, pid %d, is gone, or lives in another pid or time namespace",
                               ticket.pid));
        std::string attaching = format("attaching to pid %d", ticket.pid);
        if (owner.liveness == Liveness::unknown)
            throw os_error(format("the owner of the ticket, pid %d, cannot be found", ticket.pid), owner.call,
                           owner.error);
        std::string path = format("/proc/%d/fd/%d", ticket.pid, ticket.fd);
        struct stat status{};
        auto fail = [&](const char* call) {
            if (errno == ENOENT)
                throw Error(Fault::layout_mismatch, format("the ticket's owner, pid %d, has closed it", ticket.pid));
            if (errno == EACCES || errno == EPERM) attaching += " (only its own user can attach)";
            throw os_error(attaching, call, errno);
        };
        // Looked at before it is opened: opening a pipe or a terminal has effects.
        if (::stat(path.c_str(), &status) != 0) fail("stat");
        if (!S_ISREG(status.st_mode) || status.st_ino != ticket.inode)
            throw Error(
                Fault::layout_mismatch,
                format("the ticket's owner, pid %d, has closed it: inode %llu expected, %llu found", ticket.pid,
                       static_cast<unsigned long long>(ticket.inode), static_cast<unsigned long long>(status.st_ino)));
        int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) fail("open");
        auto self = adopt(fd, prefault);
        if (self->nonce_ != ticket.nonce)
            throw Error(
                Fault::layout_mismatch,
                format("the ticket is for another segment: nonce %016llx expected, %016llx found",
                       static_cast<unsigned long long>(ticket.nonce), static_cast<unsigned long long>(self->nonce_)));
        return self;
    }

    ~Segment() {
        if (reserved_ != nullptr) ::munmap(reserved_, reserved_nbytes_);
        if (read_ != nullptr) ::munmap(read_, data_nbytes());
        if (u8* mapped = write_.load(RELAXED)) ::munmap(mapped, data_nbytes());
        if (u8* mapped = trace_.load(RELAXED)) ::munmap(mapped, trace_nbytes());
        ::close(fd_);
    }

    TicketNumbers ticket() const { return {process()->pid.load(RELAXED), own_start(), fd_, inode_, nonce_}; }
    int fd() const { return fd_; }
    u64 nonce() const { return nonce_; }
    const std::string& name() const { return name_; }
    const std::string& fallback() const { return fallback_; }
    const Geometry& geometry() const { return geometry_; }
    u64 nbytes() const { return geometry_.total; }
    std::string schema() const {  // a copy: it lies where others could write
        return {at<char>(geometry_.schema), geometry_.shape.schema_nbytes};
    }
    void require_writable() const {
        if (is_observer_)
            throw Error(Fault::value, format("segment '%s' was attached to be looked at only", name_.c_str()));
    }

    template <class T>
    T* at(u64 offset) const {
        return reinterpret_cast<T*>(control_ + offset);
    }
    Header& header() const { return *at<Header>(0); }
    u64 data_nbytes() const { return geometry_.trace - geometry_.data; }
    u64 trace_nbytes() const { return geometry_.total - geometry_.trace; }

    // Offsets are in the file. The read mapping cannot be written through, by anybody in this process.
    const u8* read_at(u64 offset) const { return read_ + (offset - geometry_.data); }
    u8* write_at(u64 offset) {
        u8* mapped = write_.load(order::mapping.acquire);
        if (mapped == nullptr) mapped = map_for_writing();
        return mapped + (offset - geometry_.data);
    }

    // The part for events, mapped when it is first asked for; null: it cannot be mapped.
    u8* trace_mapping() {
        u8* mapped = trace_.load(order::mapping.acquire);
        if (mapped != nullptr) return mapped;
        void* mapping = ::mmap(nullptr, trace_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_,
                               static_cast<off_t>(geometry_.trace));
        if (mapping == MAP_FAILED) return nullptr;
        if (trace_.compare_exchange_strong(mapped, static_cast<u8*>(mapping), order::mapping.acq_rel))
            return static_cast<u8*>(mapping);
        ::munmap(mapping, trace_nbytes());
        return mapped;
    }

    // Puts the pages of these bytes into the writable mapping, where they are not yet: a put into 64 MiB of which this
    // process has written nothing took 20 ms for all of them at once. Of what is claimed only.
    bool is_populated(u64 offset, u64 nbytes) const {
        if (populated_ == nullptr || nbytes == 0) return true;
        u64 last = (offset + nbytes - 1 - geometry_.data) / PIECE;
        for (u64 i = (offset - geometry_.data) / PIECE; i <= last; ++i)
            if ((populated_[i / 64].load(RELAXED) >> (i % 64) & 1) == 0) return false;
        return true;
    }
    void populate(u64 offset, u64 nbytes) {
        u8* mapped = write_at(geometry_.data);
        u64 last = (offset + nbytes - 1 - geometry_.data) / PIECE;
        for (u64 i = (offset - geometry_.data) / PIECE; i <= last; ++i) {
            u64 bit = 1ull << (i % 64);
            if ((populated_[i / 64].load(RELAXED) & bit) != 0) continue;
            u64 from = i * PIECE, many = std::min(PIECE, data_nbytes() - from);
            ::madvise(mapped + from, many, MADV_POPULATE_WRITE);  // a hint, as in map()
            populated_[i / 64].fetch_or(bit, RELAXED);
        }
    }

    // The data part as this process maps it; null where it does not.
    const u8* read_mapping() const { return read_; }
    u8* write_mapping() const { return write_.load(order::mapping.acquire); }

   private:
    Segment(int fd, const Geometry& geometry) : geometry_(geometry), fd_(fd) {}

    u8* map_part(u64 offset, u64 nbytes, int protection) {
        return map_at(nullptr, nbytes, protection, MAP_SHARED | MAP_NORESERVE, fd_, offset);
    }
    // The control part, behind ROBUST_DISTANCE bytes of private memory.
    void map_control(int protection) {
        u64 page = geometry_.shape.page;
        reserved_nbytes_ = ROBUST_DISTANCE + geometry_.data + page - PAGE;
        reserved_ = map_at(nullptr, reserved_nbytes_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        u8* at = reserved_ + (round_up(reinterpret_cast<u64>(reserved_) + ROBUST_DISTANCE, page) -
                              reinterpret_cast<u64>(reserved_));
        control_ = map_at(at, geometry_.data, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_, 0);
    }
    u8* map_at(void* at, u64 nbytes, int protection, int flags, int fd, u64 offset) {
        void* mapped = ::mmap(at, nbytes, protection, flags, fd, static_cast<off_t>(offset));
        if (mapped != MAP_FAILED) return static_cast<u8*>(mapped);
        int failed = errno;
        std::string what = "mapping " + in_units(nbytes) + " of segment '" + name_ + "'";
        if (failed != ENOMEM && failed != EAGAIN) throw os_error(what, "mmap", failed);
        rlimit limit{};
        ::getrlimit(RLIMIT_AS, &limit);
        throw Error(Fault::memory_exhausted, what + ": " + describe_failure("mmap", failed))
            .with("requested", static_cast<i64>(nbytes))
            .with("free", static_cast<i64>(limit.rlim_cur));
    }
    void map(bool prefault, int control_protection = PROT_READ | PROT_WRITE) {
        map_control(control_protection);
        if (data_nbytes() != 0) read_ = map_part(geometry_.data, data_nbytes(), PROT_READ);
        if (prefault) {  // a hint: where the kernel is too old the pages come one by one
            ::madvise(control_, geometry_.data, MADV_POPULATE_WRITE);
            u64 claimed = geometry_.claimed_at_creation() - geometry_.data;
            if (claimed != 0) ::madvise(read_, claimed, MADV_POPULATE_READ);
        }
        prefault_ = prefault;
        // What is written block by block: in pieces, when they are first lent out. A piece lies within one granule.
        u64 granule = geometry_.shape.granule_nbytes;
        bool is_by_piece = geometry_.shape.kind == static_cast<u32>(SegmentKind::pool) &&
                           (granule == 0 || (granule >= PIECE && geometry_.pool_data == geometry_.data));
        if (prefault && is_by_piece && data_nbytes() > PIECE)
            populated_ = std::make_unique<Atomic<u64>[]>(data_nbytes() / PIECE / 64 + 1);
    }
    u8* map_for_writing() {
        require_writable();
        u8* mapped = map_part(geometry_.data, data_nbytes(), PROT_READ | PROT_WRITE);
        u8* before = nullptr;
        if (!write_.compare_exchange_strong(before, mapped, order::mapping.acq_rel)) {
            ::munmap(mapped, data_nbytes());
            return before;
        }
        u64 claimed = geometry_.claimed_at_creation() - geometry_.data;
        if (prefault_ && populated_ == nullptr && claimed != 0) ::madvise(mapped, claimed, MADV_POPULATE_WRITE);
        return mapped;
    }
    // 0, or why not. The policy of a shared mapping belongs to the file: it rules the claim that follows.
    int place(int node) {
        if (node >= 1024) return EINVAL;
        void* mapped = ::mmap(nullptr, geometry_.total, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd_, 0);
        if (mapped == MAP_FAILED) throw os_error("placing segment '" + name_ + "'", "mmap", errno);
        unsigned long nodes[1024 / (8 * sizeof(unsigned long))] = {};
        nodes[static_cast<unsigned>(node) / 64] = 1ul << (node % 64);
        constexpr int BIND = 2;
        int failed = ::syscall(SYS_mbind, mapped, geometry_.total, BIND, nodes, 1024ul + 1, 0u) != 0 ? errno : 0;
        ::munmap(mapped, geometry_.total);
        return failed;
    }

    static constexpr u64 PIECE = 1 << 20;  // bytes: 0.3 ms

    Geometry geometry_;
    int fd_;
    u64 inode_ = 0, nonce_ = 0;
    bool prefault_ = true;
    bool is_observer_ = false;
    std::string name_, fallback_;
    u8* reserved_ = nullptr;  // private memory, and the control part within it
    u64 reserved_nbytes_ = 0;
    u8* control_ = nullptr;
    u8* read_ = nullptr;
    Atomic<u8*> write_{nullptr};
    Atomic<u8*> trace_{nullptr};
    std::unique_ptr<Atomic<u64>[]> populated_;  // a bit per piece of the data; null: as a whole, when it is mapped
};

}  // namespace penstock
