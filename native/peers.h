// peers.h: who is attached to a segment, who died, and locks that survive their holder.
// Leaves to reap.h: what a dead peer held. A death is seen through a pidfd, by one thread per process that sleeps until
// there is one; so it is found even when nobody sends, and costs nothing until then.
//
// A pidfd speaks when the kernel has freed the process's memory (0.6 s for 8 GB), and not at all of an exec. So a
// second thread sleeps on robust futexes, which the kernel marks before that:
//
//   the dying process                            a survivor
//   its watcher's thread ends                    futex_waitv on peer.watcher returns
//   peer.watcher |= FUTEX_OWNER_DIED (kernel)    /proc: that thread has ended?  no: the mark is not believed
//   frees its memory                             after GRACE_MS: dying; its ends are dead, waits end; nothing is reaped
//   its pidfd is readable                        reaped; or, after an exec, when its descriptors are closed
#pragma once
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "segment.h"
#include "wait.h"

#ifndef P_PIDFD
#define P_PIDFD 3
#endif
#ifndef SYS_futex_waitv  // Linux 5.16
#define SYS_futex_waitv 449
#endif

namespace penstock {

inline void poke(int fd) {  // full is as good as written: the reader has yet to look
    char byte = 0;
    ssize_t done = ::write(fd, &byte, 1);
    (void)done;
}

// 1 + wait status, where it can be known: from our own child without reaping it, or from a kernel that tells (6.15).
inline u32 how_it_ended(int pidfd, u64 identity) {
    siginfo_t info{};
    if (::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid != 0)
        return 1u +
               (info.si_code == CLD_EXITED ? static_cast<u32>(info.si_status) << 8 : static_cast<u32>(info.si_status));
    // Somebody else's child, not yet reaped: field 52 of /proc/PID/stat has the status, for its own user.
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
    return format("exited with status %d", WEXITSTATUS(status));
}

class Attachment;
void reap_holdings(Attachment& by, u32 slot, u64 identity, EndState ends_become);  // reap.h
u64 mark_ends(Attachment& by, u32 slot, u64 identity, EndState ends_become);       // reap.h
void wake_everybody(Attachment& by);                                               // reap.h

// One per process: sleeps in epoll on the pidfds of all peers of all segments of this process. While there is a peer
// that it could not watch, or not reap, it looks again every RETRY_MS.
class Watcher {
   public:
    static Watcher& instance();
    std::string watch(Attachment* attachment);  // all peers in the segment's table; returns why one cannot be watched
    u32 robust_word();                          // of this process's slots; 0: its deaths are not marked
    std::pair<int, u64> pipe();                 // where others write a byte when they have joined: write end and inode
    void forget(Attachment* attachment);        // returns when no reaping for it is under way
    void retry();                               // there is work that a stopped peer's lock has put off
    void leave_later(std::unique_ptr<Attachment> attachment);

   private:
    // What is read of a peer in shared memory is copied, and compared with /proc, while it lives: what is written there
    // later can start a look at /proc, and nothing else.
    struct Watched {
        int pidfd;
        std::set<Attachment*> attachments;
        Shared<u32>* word = nullptr;  // its robust futex in the segment of `word_of`; null: it is not waited for
        Attachment* word_of = nullptr;
        u32 thread = 0;  // of its watcher; 0: it was marked when it was first seen
        u64 thread_start = 0;
        u32 watch_fd = 0;  // a descriptor that an exec closes
        u64 watch_ino = 0;
        u64 marked_ns = 0;      // when the word was seen marked; 0: it is not
        bool is_dying = false;  // its ends have been marked
    };
    struct Waiter {  // struct futex_waitv, which older headers lack
        u64 value, address;
        u32 flags, reserved;
    };
    static constexpr int RETRY_MS = 100;
    static constexpr int GRACE_MS = 50;      // most pidfds speak within that, and then tell more
    static constexpr u32 MAX_WAITERS = 128;  // of one futex_waitv
    static constexpr u32 FUTEX_SIZE_U32 = 2;
    void loop();
    void start();                               // mutex_ is held
    int start_thread(void (Watcher::*body)());  // returns its errno
    void wait_for_marks();
    void add_word(u64 identity, Watched& watched, Attachment* attachment, PeerSlot& peer);  // mutex_ is held
    void change_words();                                                                    // mutex_ is held
    int settle_marks();                   // mutex_ is held; returns in how many ms to call it again, or -1
    void enlist(Attachment* attachment);  // mutex_ is held
    void delist(Attachment* attachment);  // mutex_ is held
    std::string scan(Attachment* attachment, std::vector<u64>& gone);  // mutex_ is held; returns as watch() does
    std::map<u64, Watched>::iterator unwatch(std::map<u64, Watched>::iterator at);       // mutex_ is held
    void scan_all();                                                                     // mutex_ is held
    bool reap_or_retry(Attachment* attachment, u64 identity, bool only_marked = false);  // mutex_ is held
    std::mutex mutex_;
    std::set<Attachment*> all_;
    int pipe_[2] = {-1, -1};
    u64 pipe_inode_ = 0;
    std::map<u64, Watched> watched_;  // by identity
    int epoll_ = -1;
    bool is_started_ = false, is_waiting_for_marks_ = false;
    Atomic<bool> must_retry_{false};
    std::vector<std::unique_ptr<Attachment>> leaving_;  // to which nothing refers any more, and which have yet to leave
    robust_list_head robust_{};                         // of the watcher's thread: a node for each slot of this process
    Shared<u32> thread_{0};        // the watcher's, once its robust list is registered; NO_LIST: it cannot be
    Atomic<u32> word_changes_{0};  // moved when what futex_waitv waits for has changed
    static constexpr u32 NO_LIST = ~0u;
};

// This process in a segment: a slot in its table. Everything that touches shared state goes through one.
class Attachment : public std::enable_shared_from_this<Attachment> {
   public:
    static std::shared_ptr<Attachment> join(std::shared_ptr<Segment> segment, const std::string& name) {
        segment->require_writable();
        std::shared_ptr<Attachment> self(new Attachment(std::move(segment)), retire);
        self->identity_ = own_identity();
        self->require_watchable(look_at(pid_of(self->identity_), start_of(self->identity_)).why());
        self->claim(name);
        self->require_watchable(self->resync());  // if not, the place is given back
        self->announce();
        return self;
    }
    // Looks without joining: for inspection from outside. Nothing that changes shared state may be called on it.
    static std::shared_ptr<Attachment> observe(std::shared_ptr<Segment> segment) {
        std::shared_ptr<Attachment> self(new Attachment(std::move(segment)));
        self->is_observer_ = true;
        return self;
    }
    ~Attachment() {
        for (auto& bell : bells_)
            if (bell.fd >= 0) ::close(bell.fd);
        if (bell_pipe_[0] >= 0) ::close(bell_pipe_[0]);
        if (bell_pipe_[1] >= 0) ::close(bell_pipe_[1]);
    }

    bool is_ours() const { return forks_ == fork_generation(); }
    void require_ours() const {
        if (!is_ours())
            throw Error(
                Fault::closed,
                format(
                    "this end of '%s' belongs to the process before fork(), pid %d: open one of your own from a ticket",
                    segment_->name().c_str(), pid_of(identity_)));
    }
    Segment& segment() const { return *segment_; }
    const std::shared_ptr<Segment>& shared_segment() const { return segment_; }
    const Shape& shape() const { return segment_->geometry().shape; }
    u32 slot() const { return slot_; }
    u32 epoch() const { return epoch_; }
    PeerSlot& peer(u32 slot) const { return segment_->at<PeerSlot>(segment_->geometry().peers)[slot]; }
    bool is_live(u32 slot) const {
        return slot < shape().max_peers &&
               state_of(peer(slot).identity.load(order::identity.acquire)) == PeerState::live;
    }

    // Cheap: has anybody come or gone since this process last looked? If so, look.
    bool is_stale() const { return segment_->header().peers_version.load(RELAXED) != seen_version_.load(RELAXED); }
    void refresh() {
        if (__builtin_expect(is_stale(), 0)) resync();
    }
    // Returns why some peer cannot be watched now; the watcher goes on trying.
    std::string resync() {
        seen_version_.store(segment_->header().peers_version.load(order::members.acquire), RELAXED);
        return Watcher::instance().watch(this);
    }

    // ── a lock whose holder may die (LOCK pool, LOCK block) ──
    // Returns true if the holder died holding it: then what it protects must be repaired from the truth, by the caller.
    // Throws Timeout naming the holder at the deadline. The hold is short; only a stopped or starved holder makes it
    // long. So a deadline that has passed, or passes soon, is kept to HOLD_NS, and to RUNNABLE_NS while the holder is
    // runnable: it goes on as soon as it has a processor.
    static constexpr u64 HOLD_NS = 1'000'000;
    static constexpr u64 RUNNABLE_NS = 20'000'000;
    bool lock(Shared<u32>& word, u64 deadline) {
        u32 mine = (slot_ + 1) | (epoch_ << 9);
        u32 seen = 0;
        if (__builtin_expect(word.compare_exchange_strong(seen, mine, order::lock.acquire), 1)) return false;
        for (int i = 0; i < 100; ++i) {
            pause_cpu();
            seen = 0;
            if (word.compare_exchange_weak(seen, mine, order::lock.acquire)) return false;
        }
        u64 started = now_ns();
        bool is_runnable = false;
        for (u64 look_ns = started;;) {
            seen = word.load(order::lock.acquire);
            if (seen == 0) {
                // others may sleep: keep the bit, so that our unlock wakes one
                if (word.compare_exchange_strong(seen, mine | WAITERS, order::lock.acquire)) return false;
                continue;
            }
            u32 owner = (seen & 0xff) - 1;
            u64 now = now_ns();
            if (now - look_ns >= HOLD_NS || (seen & 0xff) == 0 || owner >= shape().max_peers) {
                look_ns = now;
                if (is_abandoned(owner, is_runnable)) {
                    if (word.compare_exchange_strong(seen, mine | WAITERS, order::lock.acquire)) return true;
                    continue;
                }
            }
            if (now >= deadline && now - started >= (is_runnable ? RUNNABLE_NS : HOLD_NS)) {
                std::string who = owner < shape().max_peers ? describe(owner) : "nobody";
                throw Error(Fault::timeout, format("a lock of '%s' is held by %s for %s", segment_->name().c_str(),
                                                   who.c_str(), in_seconds(now - started).c_str()));
            }
            if ((seen & WAITERS) == 0 && !word.compare_exchange_strong(seen, seen | WAITERS, RELAXED)) continue;
            futex_wait_for_lock(&word, seen | WAITERS, std::clamp(deadline, started + HOLD_NS, now + HOLD_NS));
        }
    }
    void unlock(Shared<u32>& word) {
        u32 before = word.exchange(0, order::lock.release);
        if ((before & WAITERS) != 0) futex_wake(&word, 1);
    }
    // For the reaper: if that peer, in that epoch, holds the word, take it over.
    bool take_over(Shared<u32>& word, u32 slot, u32 epoch) {
        u32 seen = word.load(order::lock.acquire);
        u32 mine = (slot_ + 1) | WAITERS | (epoch_ << 9);
        return (seen & ~WAITERS) == ((slot + 1) | (epoch << 9)) &&
               word.compare_exchange_strong(seen, mine, order::lock.acquire);
    }

    // ── deaths ──
    // MUST: the caller has seen that this process is gone. Many may do it at the same time: every step is idempotent,
    // and checks that the slot is still this identity's under the lock it works under.
    // only_marked: of a process that lives on after an exec, and may have joined again.
    void reap(u64 identity, bool only_marked = false) {
        identity = with_state(identity, PeerState::live);
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 found = 0;
            if (!mark_dying(slot, identity, only_marked, found)) continue;
            reap_holdings(*this, slot, found, EndState::dead);
            // The mark goes with the peer: who has the slot next may be the same process, after an exec.
            u32 word = peer(slot).watcher.load(RELAXED);
            if ((word & FUTEX_OWNER_DIED) != 0) peer(slot).watcher.compare_exchange_strong(word, 0, RELAXED);
            u64 dying = found;
            if (peer(slot).identity.compare_exchange_strong(dying, with_state(identity, PeerState::dead),
                                                            order::identity.seq_cst)) {
                this->peer(slot_).reaps.add();
            }
            segment_->header().peers_version.fetch_add(1, order::members.release);
            segment_->header().changes.fetch_add(1, order::changes.release);
            wake_everybody(*this);
        }
    }
    // The peer's process is ending, and its memory may still be written to: its ends are dead, and what it holds stays.
    void announce_dying(u64 identity) {
        identity = with_state(identity, PeerState::live);
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 found = 0;
            if (!mark_dying(slot, identity, true, found)) continue;
            mark_ends(*this, slot, found, EndState::dead);
            segment_->header().peers_version.fetch_add(1, order::members.release);
            wake_everybody(*this);
        }
    }
    void note_how(u64 identity, u32 how) {
        if (how == 0) return;
        for (u32 slot = 0; slot < shape().max_peers; ++slot)
            if (with_state(peer(slot).identity.load(order::identity.acquire), PeerState::live) ==
                    with_state(identity, PeerState::live) &&
                (how != HOW_EXEC ||
                 (peer(slot).watcher.load(RELAXED) & FUTEX_OWNER_DIED) != 0))  // else it has joined since
                peer(slot).how.store(how, RELAXED);
    }

    std::string name_of(u32 slot) const {
        char name[NAME_NBYTES];
        char* shared = peer(slot).name;  // whoever takes the slot next may be writing its own: half of each is no harm
        for (u32 i = 0; i < NAME_NBYTES; ++i) name[i] = std::atomic_ref<char>(shared[i]).load(RELAXED);
        name[NAME_NBYTES - 1] = 0;
        return name;
    }
    // "'worker 2' (pid 4711, stopped)"
    std::string describe(u32 slot) const {
        u64 identity = peer(slot).identity.load(order::identity.acquire);
        PeerState state = state_of(identity);
        std::string how;
        if (state == PeerState::left) {
            how = ", left";
        } else if (state == PeerState::dead) {
            how = ", dead";
        } else {
            Sight sight = look_at(identity);
            if (sight.liveness == Liveness::gone) how = ", dead";
            if (sight.liveness == Liveness::unknown) how = ", not known to live: " + sight.why();
            if (sight.liveness == Liveness::alive && (sight.state == 'T' || sight.state == 't')) how = ", stopped";
            if (sight.liveness == Liveness::alive && state == PeerState::dying) how = ", ending";
        }
        return format("'%s' (pid %d%s)", name_of(slot).c_str(), pid_of(identity), how.c_str());
    }

    // ── event loops ──
    // The read end of a pipe that others write a byte into when something this process waits for in a loop has come.
    int bell_fd() {
        std::lock_guard guard(bells_mutex_);
        if (bell_pipe_[0] < 0) {
            std::string waking = "waking an event loop of '" + segment_->name() + "'";
            int ends[2];
            if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) throw os_error(waking, "pipe2", errno);
            struct stat status{};
            if (::fstat(ends[1], &status) != 0) {
                int failed = errno;
                for (int fd : ends) ::close(fd);
                throw os_error(waking, "fstat", failed);
            }
            std::copy(ends, ends + 2, bell_pipe_);
            peer(slot_).bell_fd.store(static_cast<u32>(bell_pipe_[1]), RELAXED);
            peer(slot_).bell_ino.store(status.st_ino, order::bell_pipe.release);
        }
        return bell_pipe_[0];
    }
    void wake_async(u32 slot) {
        if (slot >= shape().max_peers) return;
        u64 ino = peer(slot).bell_ino.load(order::bell_pipe.acquire);
        if (ino == 0) return;
        std::lock_guard guard(bells_mutex_);
        if (slot == slot_ && bell_pipe_[1] >= 0) return poke(bell_pipe_[1]);
        if (bells_.size() <= slot) bells_.resize(slot + 1);
        OtherBell& bell = bells_[slot];
        if (bell.ino != ino) {
            if (bell.fd >= 0) ::close(bell.fd);
            bell = {ino, -1};
            bell.fd =
                open_pipe(peer(slot).identity.load(order::identity.acquire), peer(slot).bell_fd.load(RELAXED), ino);
            if (bell.fd < 0) bell.ino = 0;  // gone, or not yet to be had: try again next time
        }
        if (bell.fd >= 0) poke(bell.fd);
    }

    // ── work that met a lock of a stopped peer ──
    // Tried again by the watcher, every RETRY_MS, until it returns true; Timeout is as good as false. What is put off
    // when this peer leaves need not be done: leaving gives all back.
    using Work = std::function<bool(Attachment&)>;
    void put_off(Work work) {
        {
            std::lock_guard guard(put_off_mutex_);
            put_off_.push_back(std::move(work));
            is_put_off_.store(true, RELAXED);
        }
        Watcher::instance().retry();
    }
    // False: there is still some.
    bool finish_put_off() {
        if (__builtin_expect(!is_put_off_.load(RELAXED), 1)) return true;
        std::vector<Work> again;
        {
            std::lock_guard guard(put_off_mutex_);
            again.swap(put_off_);
        }
        std::erase_if(again, [this](Work& work) {
            try {
                return work(*this);
            } catch (const Error&) {
                return false;
            }
        });
        std::lock_guard guard(put_off_mutex_);
        std::move(again.begin(), again.end(), std::back_inserter(put_off_));
        is_put_off_.store(!put_off_.empty(), RELAXED);
        return put_off_.empty();
    }
    // In peace, but by the same steps as after a death: first no peer may grant us anything more (dying), then all is
    // given back. False: a stopped peer holds a lock; to be called again, for until then the slot is dying.
    bool leave() noexcept {
        PENSTOCK_POINT("leave.begun");
        u64 seen = identity_, dying = with_state(identity_, PeerState::dying);
        if (!peer(slot_).identity.compare_exchange_strong(seen, dying, order::identity.seq_cst) && seen != dying)
            return true;
        try {
            reap_holdings(*this, slot_, dying, EndState::closed);
        } catch (const Error&) {
            return false;
        }
        peer(slot_).bell_ino.store(0, RELAXED);
        peer(slot_).identity.compare_exchange_strong(dying, with_state(identity_, PeerState::left),
                                                     order::identity.seq_cst);
        segment_->header().peers_version.fetch_add(1, order::members.release);
        segment_->header().changes.fetch_add(1, order::changes.release);
        wake_everybody(*this);
        return true;
    }

   private:
    // The last reference is gone.
    static void retire(Attachment* attachment) {
        std::unique_ptr<Attachment> self(attachment);
        if (!self->is_ours() || !self->is_joined_) return;
        Watcher::instance().forget(attachment);
        if (!self->leave()) Watcher::instance().leave_later(std::move(self));
    }
    explicit Attachment(std::shared_ptr<Segment> segment) : segment_(std::move(segment)), forks_(fork_generation()) {}

    static constexpr u32 WAITERS = 1u << 8;
    struct OtherBell {
        u64 ino = 0;
        int fd = -1;
    };

    // Everybody who is there learns that there is one more to watch: their watchers through a pipe, who waits by its
    // bell.
    void announce() {
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 identity = peer(slot).identity.load(order::identity.acquire);
            u64 ino = peer(slot).watch_ino.load(order::watch_pipe.acquire);
            if (state_of(identity) != PeerState::live || identity == own_identity() || ino == 0) continue;
            int fd = open_pipe(identity, peer(slot).watch_fd.load(RELAXED), ino);
            if (fd < 0) continue;  // gone, or just coming and yet to look
            poke(fd);
            ::close(fd);
        }
        wake_everybody(*this);
    }
    // A pipe of another process of ours, or -1. It is looked at before it is opened and after. Opened for reading too:
    // so its last reader cannot die under our write, which would be a SIGPIPE for us.
    static int open_pipe(u64 identity, u32 number, u64 ino) {
        std::string path = format("/proc/%d/fd/%u", pid_of(identity), number);
        struct stat status{};
        if (::stat(path.c_str(), &status) != 0 || !S_ISFIFO(status.st_mode) || status.st_ino != ino) return -1;
        int fd = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0 && ::fstat(fd, &status) == 0 && status.st_ino == ino) return fd;
        if (fd >= 0) ::close(fd);
        return -1;
    }
    static void require_watchable(const std::string& why_not) {
        if (!why_not.empty()) throw Error(Fault::os, "deaths of peers cannot be watched: " + why_not);
    }
    // live -> dying, if the slot is that identity's. `found` receives the slot's word. Returns whether it is dying now.
    bool mark_dying(u32 slot, u64 identity, bool only_marked, u64& found) {
        found = peer(slot).identity.load(order::identity.acquire);
        if (with_state(found, PeerState::live) != identity) return false;
        if (only_marked && (peer(slot).watcher.load(RELAXED) & FUTEX_OWNER_DIED) == 0) return false;
        if (state_of(found) == PeerState::live) {
            PENSTOCK_POINT("reap.begun");
            peer(slot).identity.compare_exchange_strong(found, with_state(identity, PeerState::dying),
                                                        order::identity.seq_cst);
            found = peer(slot).identity.load(order::identity.acquire);
        }
        return found == with_state(identity, PeerState::dying);
    }
    void claim(const std::string& name) {
        auto [watch_fd, watch_ino] = Watcher::instance().pipe();
        for (bool reuse : {false, true}) {
            for (u32 slot = 0; slot < shape().max_peers; ++slot) {
                u64 found = peer(slot).identity.load(order::identity.acquire);
                PeerState state = state_of(found);
                bool is_usable = reuse ? state == PeerState::dead || state == PeerState::left
                                       : state == PeerState::free && found == 0;
                if (!is_usable ||
                    !peer(slot).identity.compare_exchange_strong(found, identity_, order::identity.acq_rel))
                    continue;
                PENSTOCK_POINT("join.claimed");
                slot_ = slot;
                is_joined_ = true;
                PeerSlot& own = peer(slot);
                epoch_ = own.epoch.fetch_add(1, order::epoch.acq_rel) + 1;
                own.bell_ino.store(0, RELAXED);
                own.watch_ino.store(0, RELAXED);
                own.watch_fd.store(static_cast<u32>(watch_fd), RELAXED);
                own.watch_ino.store(watch_ino, order::watch_pipe.release);
                own.how.store(0, RELAXED);
                own.watcher.store(Watcher::instance().robust_word(), RELAXED);
                own.joined_ns.store(now_ns(), RELAXED);
                own.reaped_ns.store(0, RELAXED);
                own.reaps.set(0);
                own.reaped_blocks.set(0);
                own.reaped_nbytes.set(0);
                own.take_since_ns.store(0, RELAXED);
                own.thread.store(static_cast<u32>(::syscall(SYS_gettid)), RELAXED);
                std::string shown = name.empty() ? format("pid %d", pid_of(identity_)) : name;
                shown.resize(NAME_NBYTES - 1);
                for (u32 i = 0; i < NAME_NBYTES; ++i)  // the last one is 0
                    std::atomic_ref<char>(own.name[i]).store(shown.c_str()[i], RELAXED);
                segment_->header().peers_version.fetch_add(1, order::members.release);
                return;
            }
        }
        throw Error(Fault::memory_exhausted,
                    format("segment '%s' has %s and no place for one more: raise max_peers", segment_->name().c_str(),
                           counted(shape().max_peers, "peer").c_str()))
            .with("asked", 1)
            .with("free", 0);
    }
    bool is_abandoned(u32 owner, bool& is_runnable) const {
        is_runnable = false;
        if (owner >= shape().max_peers) return true;  // nobody: the word was not written by us
        u64 identity = peer(owner).identity.load(order::identity.acquire);
        PeerState state = state_of(identity);
        if (state != PeerState::live && state != PeerState::dying) return true;
        Sight sight = look_at(identity);
        is_runnable = sight.state == 'R';
        return sight.liveness == Liveness::gone;  // dying may be leaving
    }

    std::shared_ptr<Segment> segment_;
    u64 forks_;
    bool is_observer_ = false, is_joined_ = false;
    u32 slot_ = 0;
    u32 epoch_ = 0;
    u64 identity_ = 0;
    Atomic<u32> seen_version_{0};
    std::mutex bells_mutex_;
    std::vector<OtherBell> bells_;
    std::mutex put_off_mutex_;
    std::vector<Work> put_off_;
    Atomic<bool> is_put_off_{false};
    int bell_pipe_[2] = {-1, -1};
};

// ── watcher ────────────────────────────────────────────────────────────────────────────────────────────────────────
inline Watcher& Watcher::instance() {
    static std::mutex making;
    static Watcher* one = nullptr;
    static u64 made_in = 0;
    static int registered = ::pthread_atfork(nullptr, nullptr, [] { new (&making) std::mutex; });
    (void)registered;
    std::lock_guard guard(making);
    if (one == nullptr || made_in != fork_generation()) {  // a child has no threads of its parent's: it begins anew
        one = new Watcher;
        made_in = fork_generation();
    }
    return *one;
}

inline void Watcher::start() {
    if (is_started_) return;
    auto require = [this](int failed, const char* call) {
        if (failed == 0) return;
        for (int* fd : {&epoll_, &pipe_[0], &pipe_[1]}) {
            if (*fd >= 0) ::close(*fd);
            *fd = -1;
        }
        throw os_error("deaths of peers cannot be watched", call, failed);
    };
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    require(epoll_ < 0 ? errno : 0, "epoll_create1");
    require(::pipe2(pipe_, O_NONBLOCK | O_CLOEXEC) != 0 ? errno : 0, "pipe2");
    struct stat status{};
    require(::fstat(pipe_[1], &status) != 0 ? errno : 0, "fstat");
    pipe_inode_ = status.st_ino;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = 0;
    require(::epoll_ctl(epoll_, EPOLL_CTL_ADD, pipe_[0], &event) != 0 ? errno : 0, "epoll_ctl");
    require(start_thread(&Watcher::loop), "pthread_create");
    is_started_ = true;
    while (thread_.load(order::watcher.acquire) == 0)
        futex_wait(&thread_, 0, now_ns() + LOOK_UP_NS);  // a wake-up may be refused
}

inline int Watcher::start_thread(void (Watcher::*body)()) {
    sigset_t all, before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
    int failed = 0;
    try {
        std::thread(body, this).detach();
    } catch (const std::system_error& error) {
        failed = error.code().value();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return failed;
}

inline u32 Watcher::robust_word() {
    std::lock_guard guard(mutex_);
    u32 thread = thread_.load(order::watcher.acquire);
    return thread == 0 || thread == NO_LIST ? 0 : thread | FUTEX_WAITERS;
}

// ── robust futexes ──
// A list is changed by one store at a time, for the kernel may read it after each.
inline robust_list* node_of(Attachment* attachment) {
    return reinterpret_cast<robust_list*>(reinterpret_cast<u8*>(&attachment->peer(attachment->slot()).watcher) -
                                          ROBUST_DISTANCE);
}
inline void set_next(robust_list& node, robust_list* next) {
    std::atomic_ref<robust_list*>(node.next).store(next, order::robust.release);
}
inline void Watcher::enlist(Attachment* attachment) {
    robust_list* node = node_of(attachment);
    // It is there already if a slot was claimed twice, which takes a peer that writes where it must not. Listed twice,
    // it would be its own successor.
    for (robust_list* at = robust_.list.next; at != &robust_.list; at = at->next)
        if (at == node) return;
    set_next(*node, robust_.list.next);
    set_next(robust_.list, node);
}
inline void Watcher::delist(Attachment* attachment) {
    for (robust_list* at = &robust_.list; at->next != &robust_.list; at = at->next) {
        if (at->next != node_of(attachment)) continue;
        set_next(*at, at->next->next);
        return;
    }
}

// Copies what its slot says of its watcher, if /proc agrees. A slot that is marked when it is first seen may be of a
// process that has replaced itself by exec since.
inline void Watcher::add_word(u64 identity, Watched& watched, Attachment* attachment, PeerSlot& peer) {
    u32 word = peer.watcher.load(RELAXED), thread = word & FUTEX_TID_MASK;
    bool is_marked = (word & FUTEX_OWNER_DIED) != 0;
    if (watched.word != nullptr || watched.marked_ns != 0 || (!is_marked && word != (thread | FUTEX_WAITERS))) return;
    ProcessStat stat = is_marked ? ProcessStat{} : read_stat(pid_of(identity), thread);
    if (stat.error != 0 || (stat.flags & EXITING) != 0) return;
    watched.thread = is_marked ? 0 : thread;
    watched.thread_start = stat.start;
    watched.watch_fd = peer.watch_fd.load(RELAXED);
    watched.watch_ino = peer.watch_ino.load(order::watch_pipe.acquire);
    watched.is_dying = false;
    if (is_marked) {
        watched.marked_ns = now_ns();
        poke(pipe_[1]);
        return;
    }
    if (look_at_descriptor(pid_of(identity), watched.watch_fd, watched.watch_ino) != Openness::open)
        watched.watch_ino = 0;
    watched.word = &peer.watcher;
    watched.word_of = attachment;
    change_words();
}
inline void Watcher::change_words() {
    word_changes_.fetch_add(1, RELAXED);
    ::syscall(SYS_futex, &word_changes_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    if (is_waiting_for_marks_ || thread_.load(order::watcher.acquire) == NO_LIST) return;
    is_waiting_for_marks_ = start_thread(&Watcher::wait_for_marks) == 0;  // if not: at the next change
}

inline void Watcher::wait_for_marks() {
    for (;;) {
        std::vector<Waiter> waiters;
        {
            std::lock_guard guard(mutex_);
            waiters.push_back({word_changes_.load(RELAXED), reinterpret_cast<u64>(&word_changes_),
                               FUTEX_SIZE_U32 | FUTEX_PRIVATE_FLAG, 0});
            for (auto& [identity, watched] : watched_)
                if (watched.word != nullptr && waiters.size() < MAX_WAITERS)
                    waiters.push_back(
                        {watched.thread | FUTEX_WAITERS, reinterpret_cast<u64>(watched.word), FUTEX_SIZE_U32, 0});
        }
        // EFAULT: the word's segment has been unmapped.
        long index = ::syscall(SYS_futex_waitv, waiters.data(), waiters.size(), 0u, nullptr, CLOCK_MONOTONIC);
        if (index < 0 && (errno == ENOSYS || errno == EPERM)) return;
        if (index < 0 && errno != EAGAIN && errno != EINTR && errno != EFAULT) ::usleep(RETRY_MS * 1000);
        std::lock_guard guard(mutex_);
        for (auto& [identity, watched] : watched_) {
            if (watched.word == nullptr || watched.word->load(RELAXED) == (watched.thread | FUTEX_WAITERS)) continue;
            futex_wake(watched.word, INT_MAX);  // the kernel wakes one
            watched.word = nullptr;
            watched.marked_ns = now_ns();
            poke(pipe_[1]);
        }
    }
}

// Why the mark of a peer is there: its process is ending, it has replaced itself by exec, or another peer wrote where
// it must not.
inline int Watcher::settle_marks() {
    int again_ms = -1;
    for (auto& [identity, watched] : watched_) {
        if (watched.marked_ns == 0) continue;
        if (now_ns() - watched.marked_ns < GRACE_MS * 1'000'000ull) {
            again_ms = again_ms < 0 ? GRACE_MS : std::min(again_ms, GRACE_MS);
            continue;
        }
        int pid = pid_of(identity);
        ProcessStat thread{};
        if (watched.thread != 0) thread = read_stat(pid, watched.thread);
        bool is_ended = thread.error == 0 ? thread.start != watched.thread_start || (thread.flags & EXITING) != 0
                                          : thread.error == ENOENT || thread.error == ESRCH;
        // An exec closes descriptors, and the process lives on. At an exit, they are closed when it is EXITING.
        bool is_closed =
            watched.watch_ino != 0 && look_at_descriptor(pid, watched.watch_fd, watched.watch_ino) == Openness::closed;
        ProcessStat process = read_stat(pid);
        bool is_there = process.error == 0 && (process.start & START_MASK) == start_of(identity);
        bool is_exec = is_closed && (process.flags & EXITING) == 0;
        if (watched.thread == 0) is_ended = is_exec;
        if (watched.thread != 0 && is_there && thread.error == 0 && !is_ended) {
            watched.marked_ns = 0;
            continue;
        }
        // Ever more rarely: a program that may not be looked into can live for long after an exec.
        int pause_ms = static_cast<int>(std::clamp<u64>((now_ns() - watched.marked_ns) / 8'000'000, RETRY_MS, 10'000));
        if (again_ms < 0 || pause_ms < again_ms) again_ms = pause_ms;
        if (!is_there || !is_ended) continue;  // unknown; or its pidfd is about to speak
        u32 status = static_cast<u32>(process.wait_status);
        // The thread has ended, so this is the process's status. Older kernels have it once the main thread ends.
        u32 how = is_exec ? HOW_EXEC : status != 0 ? 1 + status : 0;
        bool is_reaped = is_exec;
        for (Attachment* attachment : watched.attachments) {
            attachment->note_how(identity, how);
            if (is_exec) is_reaped = reap_or_retry(attachment, identity, true) && is_reaped;
            if (!is_exec && !watched.is_dying) attachment->announce_dying(identity);
        }
        watched.is_dying = true;
        if (is_reaped) {
            watched.marked_ns = 0;
            poke(pipe_[1]);  // it may have joined again
        }
    }
    return again_ms;
}

inline std::pair<int, u64> Watcher::pipe() {
    std::lock_guard guard(mutex_);
    start();
    return {pipe_[1], pipe_inode_};
}

inline std::string Watcher::scan(Attachment* attachment, std::vector<u64>& gone) {
    std::string why;
    for (u32 slot = 0; slot < attachment->shape().max_peers; ++slot) {
        u64 identity = attachment->peer(slot).identity.load(order::identity.acquire);
        PeerState state = state_of(identity);
        if (state != PeerState::live && state != PeerState::dying) continue;
        identity = with_state(identity, PeerState::live);
        if (identity == own_identity()) continue;
        auto known = watched_.find(identity);
        if (known == watched_.end()) {
            int pidfd = -1;
            Sight sight = look_at(identity, &pidfd);
            if (sight.liveness == Liveness::gone) {
                gone.push_back(identity);
                continue;
            }
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.u64 = identity;
            if (pidfd >= 0 && ::epoll_ctl(epoll_, EPOLL_CTL_ADD, pidfd, &event) != 0) {
                sight = {Liveness::unknown, 0, "epoll_ctl", errno};
                ::close(pidfd);
            }
            if (sight.liveness == Liveness::unknown) {
                why = format("'%s' (pid %d) of '%s': ", attachment->name_of(slot).c_str(), pid_of(identity),
                             attachment->segment().name().c_str()) +
                      sight.why();
                continue;
            }
            known = watched_.emplace(identity, Watched{pidfd, {}}).first;
        }
        known->second.attachments.insert(attachment);
        add_word(identity, known->second, attachment, attachment->peer(slot));
    }
    if (!why.empty()) must_retry_.store(true, RELAXED);
    return why;
}

inline void Watcher::scan_all() {
    must_retry_.store(false, RELAXED);
    for (Attachment* attachment : all_) {
        std::vector<u64> gone;
        scan(attachment, gone);
        for (u64 identity : gone) reap_or_retry(attachment, identity);
        if (!attachment->finish_put_off()) must_retry_.store(true, RELAXED);
    }
    std::erase_if(leaving_, [](auto& attachment) { return attachment->leave(); });
    if (!leaving_.empty()) must_retry_.store(true, RELAXED);
}

inline void Watcher::retry() {
    must_retry_.store(true, RELAXED);
    poke(pipe_[1]);
}

inline void Watcher::leave_later(std::unique_ptr<Attachment> attachment) {
    {
        std::lock_guard guard(mutex_);
        leaving_.push_back(std::move(attachment));
    }
    retry();
}

inline std::string Watcher::watch(Attachment* attachment) {
    std::vector<u64> gone;
    std::string why;
    {
        std::lock_guard guard(mutex_);
        start();
        if (all_.insert(attachment).second) enlist(attachment);
        why = scan(attachment, gone);
        if (!why.empty()) poke(pipe_[1]);  // so that the watcher sleeps no longer than RETRY_MS
    }
    for (u64 identity : gone) attachment->reap(identity);
    return why;
}

inline std::map<u64, Watcher::Watched>::iterator Watcher::unwatch(std::map<u64, Watched>::iterator at) {
    // Closing would not take it out of epoll while a child of fork() has a copy: it would be ready for ever.
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, at->second.pidfd, nullptr);
    ::close(at->second.pidfd);
    return watched_.erase(at);
}

inline void Watcher::forget(Attachment* attachment) {
    std::lock_guard guard(mutex_);
    if (all_.erase(attachment) != 0) delist(attachment);
    for (auto at = watched_.begin(); at != watched_.end();) {
        at->second.attachments.erase(attachment);
        if (at->second.word_of == attachment) {
            at->second.word = nullptr;
            at->second.word_of = nullptr;
            poke(pipe_[1]);  // it may have a word in another segment
        }
        if (!at->second.attachments.empty()) {
            ++at;
            continue;
        }
        at = unwatch(at);
    }
}

inline bool Watcher::reap_or_retry(Attachment* attachment, u64 identity, bool only_marked) {
    try {
        attachment->reap(identity, only_marked);
        return true;
    } catch (const Error&) {  // a lock is held by a stopped peer
        must_retry_.store(true, RELAXED);
        return false;
    }
}

inline void Watcher::loop() {
    robust_.list.next = &robust_.list;
    robust_.futex_offset = ROBUST_DISTANCE;
    bool has_list = ::syscall(SYS_set_robust_list, &robust_, sizeof robust_) == 0;
    thread_.store(has_list ? static_cast<u32>(::syscall(SYS_gettid)) : NO_LIST, order::watcher.release);
    futex_wake(&thread_, 1);
    for (int again_ms = -1;;) {
        epoll_event events[16];
        int n = ::epoll_wait(epoll_, events, 16, again_ms);
        if (n < 0 && errno != EINTR) ::usleep(RETRY_MS * 1000);
        std::lock_guard guard(mutex_);
        bool must_scan = n <= 0 && must_retry_.load(RELAXED);
        for (int i = 0; i < n; ++i) {
            if (events[i].data.u64 == 0) {  // somebody has joined one of our segments
                char bytes[256];
                while (::read(pipe_[0], bytes, sizeof bytes) > 0) {}
                must_scan = true;
                continue;
            }
            auto found = watched_.find(events[i].data.u64);
            if (found == watched_.end()) continue;
            u32 how = how_it_ended(found->second.pidfd, found->first);
            for (Attachment* attachment : found->second.attachments) {
                attachment->note_how(found->first, how);
                reap_or_retry(attachment, found->first);
            }
            unwatch(found);
        }
        if (must_scan) scan_all();
        again_ms = settle_marks();
        if (must_retry_.load(RELAXED) && (again_ms < 0 || again_ms > RETRY_MS)) again_ms = RETRY_MS;
    }
}

}  // namespace penstock
