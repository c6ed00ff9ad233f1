// watcher.h: how a process learns that a peer has died: one thread that sleeps until there is one.
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

#include <map>
#include <set>
#include <thread>

#include "peers.h"

#ifndef SYS_futex_waitv  // Linux 5.16
#define SYS_futex_waitv 449
#endif

namespace penstock {

// One per process: sleeps in epoll on the pidfds of all peers of all segments of this process. While there is a peer
// that it could not watch, or not reap, it looks again every RETRY_MS.
class Watcher {
   public:
    static Watcher& instance();
    std::string watch(Attachment* attachment);  // all peers in the segment's table; returns why one cannot be watched
    WatcherNumbers numbers();                   // what others write into, and look at
    // The watcher keeps no attachment alive: between watch() and forget() it has bare pointers, in all_ and in each
    // Watched. It uses them under mutex_ alone, which forget() takes, so when that returns no reaping for the
    // attachment is under way, and none begins.
    void forget(Attachment* attachment);
    void retry();  // there is work that a stopped peer's lock has put off
    void leave_later(std::unique_ptr<Attachment> attachment);
    void end_stays();

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
    void break_group(Attachment* attachment);                                            // mutex_ is held
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

inline Watcher& Watcher::instance() {
    static std::mutex making;
    static Watcher* watcher = nullptr;
    static u64 made_in = 0;
    static int registered = ::pthread_atfork(nullptr, nullptr, [] { new (&making) std::mutex; });
    (void)registered;
    std::lock_guard guard(making);
    if (watcher == nullptr || made_in != fork_generation()) {  // a child has no threads of its parent's: it begins anew
        watcher = new Watcher;
        made_in = fork_generation();
    }
    return *watcher;
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
            break_group(attachment);
        }
        watched.is_dying = true;
        if (is_reaped) {
            watched.marked_ns = 0;
            poke(pipe_[1]);  // it may have joined again
        }
    }
    return again_ms;
}

inline WatcherNumbers Watcher::numbers() {
    std::lock_guard guard(mutex_);
    start();
    u32 thread = thread_.load(order::watcher.acquire);
    return {static_cast<u32>(pipe_[1]), pipe_inode_, thread == NO_LIST ? 0 : thread | FUTEX_WAITERS};
}

inline std::string Watcher::scan(Attachment* attachment, std::vector<u64>& gone) {
    std::string why;
    attachment->drop_bells();  // of peers that have left, or that another process has reaped
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
            if (sight.liveness == Liveness::gone) {  // it ended before it was watched
                attachment->note_how(identity, how_it_ended(-1, identity));
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
        break_group(attachment);
        if (!attachment->finish_put_off()) must_retry_.store(true, RELAXED);
    }
    std::erase_if(leaving_, [](auto& attachment) { return !attachment->is_staying() && attachment->leave(); });
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

inline void Watcher::end_stays() {
    std::lock_guard guard(mutex_);
    std::erase_if(leaving_, [](auto& attachment) { return attachment->is_staying() && attachment->leave(); });
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
    if (attachment->group() != nullptr) {
        std::lock_guard guard(mutex_);
        break_group(attachment);
    }
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

// An end of the group's has died, of a process or alone: every wait in the group ends.
inline void Watcher::break_group(Attachment* attachment) {
    EndGroup* group = attachment->group();
    if (group == nullptr || group->is_broken()) return;
    std::optional<Error> death = find_death(*attachment);
    if (!death) return;
    group->break_by(*death);
    for (Attachment* member : all_)
        if (member->group() == group) wake_everybody(*member);
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
            if (events[i].data.u64 == 0) {  // a peer has joined one of our segments
                char bytes[256];
                while (::read(pipe_[0], bytes, sizeof bytes) > 0) {}
                must_scan = true;
                continue;
            }
            auto watch = watched_.find(events[i].data.u64);
            if (watch == watched_.end()) continue;
            u32 how = how_it_ended(watch->second.pidfd, watch->first);
            for (Attachment* attachment : watch->second.attachments) {
                attachment->note_how(watch->first, how);
                reap_or_retry(attachment, watch->first);
                break_group(attachment);
            }
            unwatch(watch);
        }
        if (must_scan) scan_all();
        again_ms = settle_marks();
        if (must_retry_.load(RELAXED) && (again_ms < 0 || again_ms > RETRY_MS)) again_ms = RETRY_MS;
    }
}

// ── what an attachment asks of it ──
inline std::string Attachment::resync() {
    seen_version_.store(segment_->header().peers_version.load(order::members.acquire), RELAXED);
    return Watcher::instance().watch(this);
}
inline void Attachment::announce_failure() {
    poke_watchers();
    Watcher::instance().retry();
}
inline void Attachment::put_off(Work work) {
    {
        std::lock_guard guard(put_off_mutex_);
        put_off_.push_back(std::move(work));
        is_put_off_.store(true, RELAXED);
    }
    Watcher::instance().retry();
}
inline void Attachment::retire(Attachment* attachment) {
    std::unique_ptr<Attachment> self(attachment);
    if (!self->is_ours() || !self->is_joined_) return;
    Watcher::instance().forget(attachment);
    if (self->is_staying() || !self->leave()) Watcher::instance().leave_later(std::move(self));
}
inline void Attachment::end_stays() { Watcher::instance().end_stays(); }
inline WatcherNumbers Attachment::watcher_numbers() { return Watcher::instance().numbers(); }

}  // namespace penstock
