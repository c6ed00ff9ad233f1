// process.h: which process an identity names, and whether it lives. All that is known of other processes is asked here.
//
// A death is what was seen: ESRCH, another start time under the same pid, or a pidfd that is readable. A call that
// failed for any other reason is no evidence: the answer is `unknown`, with the call and its errno, and nothing is
// taken from that process.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "clock.h"
#include "errors.h"

#ifndef SYS_pidfd_open  // headers of before Linux 5.3, as those that wheels for glibc 2.28 are built with
#define SYS_pidfd_open 434
#endif

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

namespace penstock {

inline void poke(int fd) {  // full is as good as written: the reader has yet to look
    char byte = 0;
    ssize_t done = ::write(fd, &byte, 1);
    (void)done;
}

inline int pidfd_open(int pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0u)); }

// ── /proc/PID/stat ─────────────────────────────────────────────────────────────────────────────────────────────────
inline constexpr u64 EXITING = 4;  // PF_EXITING: set before its memory is freed and its descriptors are closed
struct ProcessStat {
    int error = 0;        // 0: it was read
    int pid = 0;          // as the mounted /proc numbers it
    char state = 0;       // 'R', 'S', 'T' stopped, 'Z' zombie
    u64 flags = 0;        // PF_… of the kernel
    u64 start = 0;        // clock ticks since boot at which the process started
    u64 wait_status = 0;  // of a zombie, for its own user
};
// Fields are counted from behind the last ')' because a name may hold anything.
inline ProcessStat read_stat(const char* path) {
    ProcessStat stat;
    int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return stat.error = errno, stat;
    char text[1024];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    stat.error = n < 0 ? errno : 0;
    ::close(fd);
    if (stat.error != 0) return stat;
    text[n] = 0;
    char* at = std::strrchr(text, ')');
    stat.pid = std::atoi(text);
    if (at != nullptr && at[1] == ' ') stat.state = at[2];
    for (int field = 2; at != nullptr && field < 22; ++field) {
        if (field == 9) stat.flags = std::strtoull(at, nullptr, 10);
        at = std::strchr(at + 1, ' ');
    }
    if (at == nullptr) return stat.error = EIO, stat;
    stat.start = std::strtoull(at, nullptr, 10);
    if (const char* last = std::strrchr(at, ' ')) stat.wait_status = std::strtoull(last, nullptr, 10);
    return stat;
}
inline ProcessStat read_stat(int pid, u32 thread) {
    return read_stat(format("/proc/%d/task/%u/stat", pid, thread).c_str());
}
inline ProcessStat read_stat(int pid) { return read_stat(format("/proc/%d/stat", pid).c_str()); }

// Whether this descriptor of a process leads to that inode. Unknown where it may not be looked into.
enum class Openness { open, closed, unknown };
inline Openness look_at_descriptor(int pid, u32 fd, u64 inode) {
    struct stat status{};
    if (::stat(format("/proc/%d/fd/%u", pid, fd).c_str(), &status) == 0)
        return status.st_ino == inode ? Openness::open : Openness::closed;
    return errno == ENOENT ? Openness::closed : Openness::unknown;
}

// ── is it alive? ───────────────────────────────────────────────────────────────────────────────────────────────────
enum class Liveness { alive, gone, unknown };
struct Sight {
    Liveness liveness = Liveness::unknown;
    char state = 0;              // of a process that is alive, as in /proc/PID/stat
    const char* call = nullptr;  // unknown: what failed, and how
    int error = 0;
    std::string why() const { return call == nullptr ? std::string() : describe_failure(call, error); }
};

// `pidfd` receives a descriptor of exactly this process if it is alive, else -1. The pidfd is opened first and the
// start time compared after, so that a pid that was given to another process in between is not taken for it.
inline Sight look_at(int pid, u64 start, int* pidfd = nullptr) {
    if (pidfd != nullptr) *pidfd = -1;
    if (pid <= 0) return {Liveness::gone};
    Sight sight{Liveness::alive};
    int fd = pidfd_open(pid);
    if (fd < 0) {
        sight = {Liveness::unknown, 0, "pidfd_open", errno};
        // Without a descriptor: of a pid that does not exist, this tells too.
        if (sight.error == ESRCH || (::kill(pid, 0) != 0 && errno == ESRCH)) return {Liveness::gone};
    }
    ProcessStat stat = read_stat(pid);
    if (stat.error == 0 && (stat.start & START_MASK) != (start & START_MASK)) {
        sight = {Liveness::gone};
    } else if (fd >= 0) {
        pollfd polled{fd, POLLIN, 0};
        int ready = ::poll(&polled, 1, 0);
        if (ready < 0)
            sight = {Liveness::unknown, 0, "poll", errno};
        else if ((polled.revents & POLLIN) != 0)
            sight = {Liveness::gone};
        else if (stat.error != 0)  // hidden, or /proc is not mounted: this may be another process of the same pid
            sight = {Liveness::unknown, 0, "reading /proc/PID/stat", stat.error};
    }
    sight.state = stat.state;
    if (pidfd != nullptr && sight.liveness == Liveness::alive)
        *pidfd = fd;
    else if (fd >= 0)
        ::close(fd);
    return sight;
}

// ── how did it end? ─────────────────────────────────────────────────────────────────────────────────────────────────
// 1 + wait status, where it can be known: from our own child without reaping it, or from a kernel that tells (6.15).
inline u32 how_it_ended(int pidfd, u64 identity) {
    siginfo_t info{};
    if (::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid != 0)
        return 1u +
               (info.si_code == CLD_EXITED ? static_cast<u32>(info.si_status) << 8 : static_cast<u32>(info.si_status));
    // Another process's child, not yet reaped: field 52 of /proc/PID/stat has the status, for its own user.
    ProcessStat stat = read_stat(pid_of(identity));
    if (stat.error == 0 && (stat.start & START_MASK) == start_of(identity) && stat.state == 'Z')
        return 1u + static_cast<u32>(stat.wait_status);
    // Reaped already: a kernel of 6.15 or later still knows, by the pidfd.
    constexpr u64 PIDFD_INFO_EXIT = 1u << 3;
    constexpr unsigned long PIDFD_GET_INFO = _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, 64);
    u8 raw[128]{};
    std::memcpy(raw, &PIDFD_INFO_EXIT, 8);
    if (::ioctl(pidfd, PIDFD_GET_INFO, raw) == 0) {
        u64 mask;
        int code;
        std::memcpy(&mask, raw, 8);
        std::memcpy(&code, raw + 60, 4);
        if ((mask & PIDFD_INFO_EXIT) != 0) return 1u + static_cast<u32>(code);
    }
    return 0;
}

inline constexpr u32 HOW_EXEC = ~0u;
inline std::string how_in_words(u32 how) {
    if (how == 0) return "how is not known";
    if (how == HOW_EXEC) return "replaced by another program (exec)";
    int status = static_cast<int>(how - 1);
    if (WIFSIGNALED(status)) {
        const char* name = ::sigabbrev_np(WTERMSIG(status));
        return format("killed by SIG%s", name == nullptr ? "?" : name);
    }
    return format(WEXITSTATUS(status) == 0 ? "exited with status %d" : "exit status %d", WEXITSTATUS(status));
}

// ── this process ───────────────────────────────────────────────────────────────────────────────────────────────────
// After fork() the child has the parent's mappings and none of its rights: every object remembers the generation it was
// made in, and in another one it does nothing.
struct Process {
    static constexpr u64 UNKNOWN = ~0ull;
    Atomic<u64> forks{0};
    Atomic<int> pid{0};
    Atomic<u64> start{UNKNOWN};  // asked for when it is first needed
};
inline Process* process() {
    static Process* self = [] {
        auto* process = new Process;
        process->pid.store(::getpid(), RELAXED);
        return process;
    }();
    static int registered = ::pthread_atfork(nullptr, nullptr, [] {
        process()->forks.fetch_add(1, RELAXED);
        process()->pid.store(::getpid(), RELAXED);
        process()->start.store(Process::UNKNOWN, RELAXED);
    });
    (void)registered;
    return self;
}
inline u64 fork_generation() { return process()->forks.load(RELAXED); }

inline u64 own_start() {
    u64 known = process()->start.load(RELAXED);
    if (known != Process::UNKNOWN) return known;
    ProcessStat stat = read_stat("/proc/self/stat");
    if (stat.error != 0)
        throw os_error("a process is known by the time it started", "reading /proc/self/stat", stat.error);
    if (stat.pid != process()->pid.load(RELAXED))
        throw Error(Fault::os, format("/proc shows another pid namespace: pid %d here is %d there; mount it anew",
                                      process()->pid.load(RELAXED), stat.pid));
    // The first answer stays: an emulator tells each thread another time, and the process has one identity.
    return process()->start.compare_exchange_strong(known, stat.start, RELAXED) ? stat.start : known;
}
inline u64 own_identity() { return make_identity(PeerState::live, process()->pid.load(RELAXED), own_start()); }

// Of a peer. This process lives, as it asks, whatever an emulator writes into its /proc/PID/stat.
inline Sight look_at(u64 identity, int* pidfd = nullptr) {
    if (pidfd == nullptr && with_state(identity, PeerState::live) == own_identity()) return {Liveness::alive, 'R'};
    return look_at(pid_of(identity), start_of(identity), pidfd);
}

// The inode of a namespace of this process; 0: the kernel has none of this kind, or /proc is not mounted.
inline u64 own_namespace(const char* kind) {
    struct stat status{};
    if (::stat(format("/proc/self/ns/%s", kind).c_str(), &status) == 0) return status.st_ino;
    if (errno == ENOENT) return 0;
    throw Error(Fault::os, describe_failure(format("stat of /proc/self/ns/%s", kind).c_str(), errno));
}

}  // namespace penstock
