// peers.h: the peers attached to a segment, their deaths, and locks that survive their holder.
// Leaves to watcher.h: how a death is seen; to reap.h: what a dead peer held.
#pragma once
#include <linux/futex.h>

#include <functional>
#include <mutex>
#include <vector>

#include "end_group.h"
#include "segment.h"
#include "wait.h"

namespace penstock {

class Attachment;
void reap_holdings(Attachment& by, u32 slot, u64 identity, EndState ends_become);  // reap.h
u64 mark_ends(Attachment& by, u32 slot, u64 identity, EndState ends_become);       // reap.h
void wake_everybody(Attachment& by);                                               // reap.h
std::optional<Error> find_death(Attachment& by);                                   // describe.h

// What others need to know of this process's watcher (watcher.h).
struct WatcherNumbers {
    u32 fd = 0;           // write end of its pipe
    u64 inode = 0;        // of that pipe
    u32 robust_word = 0;  // 0: its deaths are not marked
};

// This process in a segment: a slot in its table. Everything that touches shared state goes through one.
class Attachment : public std::enable_shared_from_this<Attachment> {
   public:
    // group: of the end that is to be opened; null: the end is in none.
    static std::shared_ptr<Attachment> join(std::shared_ptr<Segment> segment, const std::string& name,
                                            std::shared_ptr<EndGroup> group = nullptr) {
        segment->require_writable();
        std::shared_ptr<Attachment> self(new Attachment(std::move(segment)), retire);
        self->identity_ = own_identity();
        self->require_watchable(look_at(pid_of(self->identity_), start_of(self->identity_)).why());
        end_stays();
        self->claim(name);
        self->set_group(std::move(group));
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
        for (OtherBell& bell : bells_) bell.close();
        if (bell_pipe_[0] >= 0) ::close(bell_pipe_[0]);
        if (bell_pipe_[1] >= 0) ::close(bell_pipe_[1]);
    }

    // After its last reference, this peer stays one for so long, or until the process joins a segment: it goes on.
    void stay(u64 ns) { stays_until_ns_ = now_ns() + ns; }
    bool is_staying() const { return now_ns() < stays_until_ns_; }

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

    // ── the group that shares its fate ──
    EndGroup* group() const { return group_.get(); }
    bool is_group_broken() const { return group_ != nullptr && group_->is_broken(); }
    void require_group() const {
        if (group_ != nullptr) group_->require_whole();
    }
    // Whether this end died after this peer had joined: a death before that is no news of its group.
    bool has_died_since(size_t end_index, End end) const {
        return has_died(end.state) && end.epoch > known_epochs_[end_index];
    }
    // An end of this process has failed while the process lives: no pidfd tells the watchers, which break the groups.
    void announce_failure();

    // Cheap: has anybody come or gone since this process last looked? If so, look.
    bool is_stale() const { return segment_->header().peers_version.load(RELAXED) != seen_version_.load(RELAXED); }
    void refresh() {
        if (__builtin_expect(is_stale(), 0)) resync();
    }
    // Returns why some peer cannot be watched now; the watcher goes on trying.
    std::string resync();

    // ── a lock that survives its holder (LOCK pool, LOCK block) ──
    // Returns true if the holder died holding it: then what it protects must be repaired from the truth, by the caller.
    // Throws Timeout naming the holder at the deadline. The hold is short; only a stopped or starved holder makes it
    // long. So a deadline that has passed, or passes soon, is kept to HOLD_NS, and to RUNNABLE_NS while the holder is
    // runnable: it goes on as soon as it has a processor.
    static constexpr u64 HOLD_NS = 1'000'000;
    static constexpr u64 RUNNABLE_NS = 20'000'000;
    bool lock(Shared<u32>& word, u64 deadline) {
        u32 mine = (slot_ + 1) | (epoch_ << 9);
        u32 current = 0;
        if (__builtin_expect(word.compare_exchange_strong(current, mine, order::lock.acquire), 1)) return false;
        for (int i = 0; i < 100; ++i) {
            pause_cpu();
            current = 0;
            if (word.compare_exchange_weak(current, mine, order::lock.acquire)) return false;
        }
        u64 started = now_ns();
        bool is_runnable = false;
        for (u64 look_ns = started;;) {
            current = word.load(order::lock.acquire);
            if (current == 0) {
                // others may sleep: keep the bit, so that our unlock wakes one
                if (word.compare_exchange_strong(current, mine | WAITERS, order::lock.acquire)) return false;
                continue;
            }
            u32 owner = (current & 0xff) - 1;
            u64 now = now_ns();
            if (now - look_ns >= HOLD_NS || (current & 0xff) == 0 || owner >= shape().max_peers) {
                look_ns = now;
                if (is_abandoned(owner, is_runnable)) {
                    if (word.compare_exchange_strong(current, mine | WAITERS, order::lock.acquire)) return true;
                    continue;
                }
            }
            if (now >= deadline && now - started >= (is_runnable ? RUNNABLE_NS : HOLD_NS)) {
                bool is_peer = owner < shape().max_peers;
                throw Error(Fault::timeout,
                            format("a lock of '%s' is held by %s for %s%s", segment_->name().c_str(),
                                   is_peer ? describe(owner).c_str() : "no peer", in_seconds(now - started).c_str(),
                                   is_peer ? remedy(owner).c_str() : ""));
            }
            if ((current & WAITERS) == 0 && !word.compare_exchange_strong(current, current | WAITERS, RELAXED))
                continue;
            futex_wait_for_lock(&word, current | WAITERS, std::clamp(deadline, started + HOLD_NS, now + HOLD_NS));
        }
    }
    void unlock(Shared<u32>& word) {
        u32 before = word.exchange(0, order::lock.release);
        if ((before & WAITERS) != 0) futex_wake(&word, 1);
    }
    // For the reaper: if that peer, in that epoch, holds the word, take it over.
    bool take_over(Shared<u32>& word, u32 slot, u32 epoch) {
        u32 current = word.load(order::lock.acquire);
        u32 mine = (slot_ + 1) | WAITERS | (epoch_ << 9);
        return (current & ~WAITERS) == ((slot + 1) | (epoch << 9)) &&
               word.compare_exchange_strong(current, mine, order::lock.acquire);
    }

    // ── deaths ──
    // MUST: the caller has seen that this process is gone. Many may do it at the same time: every step is idempotent,
    // and checks that the slot is still this identity's under the lock it works under.
    // only_marked: of a process that lives on after an exec, and may have joined again.
    void reap(u64 identity, bool only_marked = false) {
        identity = with_state(identity, PeerState::live);
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 current = 0;
            if (!mark_dying(slot, identity, only_marked, current)) continue;
            reap_holdings(*this, slot, current, EndState::dead);
            // The mark goes with the peer: the next one in the slot may be the same process, after an exec.
            u32 word = peer(slot).watcher.load(RELAXED);
            if ((word & FUTEX_OWNER_DIED) != 0) peer(slot).watcher.compare_exchange_strong(word, 0, RELAXED);
            u64 dying = current;
            if (peer(slot).identity.compare_exchange_strong(dying, with_state(identity, PeerState::dead),
                                                            order::identity.seq_cst)) {
                this->peer(slot_).reaps.add();
            }
            segment_->header().peers_version.fetch_add(1, order::members.release);
            segment_->header().changes.fetch_add(1, order::changes.release);
            wake_everybody(*this);
        }
        drop_bells();
    }
    // The peer's process is ending, and its memory may still be written to: its ends are dead, and what it holds stays.
    void announce_dying(u64 identity) {
        identity = with_state(identity, PeerState::live);
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 current = 0;
            if (!mark_dying(slot, identity, true, current)) continue;
            mark_ends(*this, slot, current, EndState::dead);
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
        char* shared = peer(slot).name;  // the next one in the slot may be writing its own: half of each is no harm
        for (u32 i = 0; i < NAME_NBYTES; ++i) name[i] = std::atomic_ref<char>(shared[i]).load(RELAXED);
        name[NAME_NBYTES - 1] = 0;
        return name;
    }
    std::string describe(u32 slot) const;  // describe.h: "'worker 2' (pid 4711, stopped)"
    std::string remedy(u32 slot) const;    // for a peer that is stopped; else empty

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
            bell.close();
            // Once drop_bells has seen that a peer is not live, no pipe of that peer is opened again: both hold the
            // mutex.
            if (!is_live(slot)) return;
            bell.fd =
                open_pipe(peer(slot).identity.load(order::identity.acquire), peer(slot).bell_fd.load(RELAXED), ino);
            if (bell.fd >= 0) bell.ino = ino;  // else gone, or not yet to be had: the next call tries again
        }
        if (bell.fd >= 0) poke(bell.fd);
    }
    // Closes the cached pipes of peers that are no longer live. The mutex is held, as in wake_async, so no thread
    // writes into a descriptor that another thread closes.
    void drop_bells() {
        std::lock_guard guard(bells_mutex_);
        for (u32 slot = 0; slot < bells_.size(); ++slot)
            if (bells_[slot].fd >= 0 &&
                (!is_live(slot) || peer(slot).bell_ino.load(order::bell_pipe.acquire) != bells_[slot].ino))
                bells_[slot].close();
    }

    // ── work that met a lock of a stopped peer ──
    // Tried again by the watcher, every RETRY_MS, until it returns true; Timeout is as good as false. What is put off
    // when this peer leaves need not be done: leaving gives all back.
    using Work = std::function<bool(Attachment&)>;
    void put_off(Work work);
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
        u64 expected = identity_, dying = with_state(identity_, PeerState::dying);
        if (!peer(slot_).identity.compare_exchange_strong(expected, dying, order::identity.seq_cst) &&
            expected != dying)
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
    static void retire(Attachment* attachment);  // the last reference is gone
    static void end_stays();
    static WatcherNumbers watcher_numbers();
    explicit Attachment(std::shared_ptr<Segment> segment) : segment_(std::move(segment)), forks_(fork_generation()) {}

    static constexpr u32 WAITERS = 1u << 8;
    struct OtherBell {
        u64 ino = 0;
        int fd = -1;
        void close() {
            if (fd >= 0) ::close(fd);
            ino = 0;
            fd = -1;
        }
    };

    // All peers learn that there is one more to watch: their watchers through a pipe, those that wait by their
    // bell.
    void announce() {
        poke_watchers();
        wake_everybody(*this);
    }
    void poke_watchers() {
        for (u32 slot = 0; slot < shape().max_peers; ++slot) {
            u64 identity = peer(slot).identity.load(order::identity.acquire);
            u64 ino = peer(slot).watch_ino.load(order::watch_pipe.acquire);
            if (state_of(identity) != PeerState::live || identity == own_identity() || ino == 0) continue;
            int fd = open_pipe(identity, peer(slot).watch_fd.load(RELAXED), ino);
            if (fd < 0) continue;  // gone, or just coming and yet to look
            poke(fd);
            ::close(fd);
        }
    }
    void set_group(std::shared_ptr<EndGroup> group);
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
    // live -> dying, if the slot is that identity's. `current` receives the slot's word. Returns whether it is dying
    // now.
    bool mark_dying(u32 slot, u64 identity, bool only_marked, u64& current) {
        current = peer(slot).identity.load(order::identity.acquire);
        if (with_state(current, PeerState::live) != identity) return false;
        if (only_marked && (peer(slot).watcher.load(RELAXED) & FUTEX_OWNER_DIED) == 0) return false;
        if (state_of(current) == PeerState::live) {
            PENSTOCK_POINT("reap.begun");
            peer(slot).identity.compare_exchange_strong(current, with_state(identity, PeerState::dying),
                                                        order::identity.seq_cst);
            current = peer(slot).identity.load(order::identity.acquire);
        }
        return current == with_state(identity, PeerState::dying);
    }
    void claim(const std::string& name) {
        WatcherNumbers watcher = watcher_numbers();
        for (bool reuse : {false, true}) {
            for (u32 slot = 0; slot < shape().max_peers; ++slot) {
                u64 current = peer(slot).identity.load(order::identity.acquire);
                PeerState state = state_of(current);
                bool is_usable = reuse ? state == PeerState::dead || state == PeerState::left
                                       : state == PeerState::free && current == 0;
                if (!is_usable ||
                    !peer(slot).identity.compare_exchange_strong(current, identity_, order::identity.acq_rel))
                    continue;
                PENSTOCK_POINT("join.claimed");
                slot_ = slot;
                is_joined_ = true;
                PeerSlot& own = peer(slot);
                epoch_ = own.epoch.fetch_add(1, order::epoch.acq_rel) + 1;
                own.bell_ino.store(0, RELAXED);
                own.watch_ino.store(0, RELAXED);
                own.watch_fd.store(watcher.fd, RELAXED);
                own.watch_ino.store(watcher.inode, order::watch_pipe.release);
                own.how.store(0, RELAXED);
                own.watcher.store(watcher.robust_word, RELAXED);
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
            .with("requested", 1)
            .with("free", 0);
    }
    bool is_abandoned(u32 owner, bool& is_runnable) const {
        is_runnable = false;
        if (owner >= shape().max_peers) return true;  // no peer: the word was not written by us
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
    u64 stays_until_ns_ = 0;
    u32 slot_ = 0;
    u32 epoch_ = 0;
    u64 identity_ = 0;
    std::shared_ptr<EndGroup> group_;
    std::vector<u32> known_epochs_;  // of the lanes, then of the receivers, as this peer joined; empty: it has no group
    Atomic<u32> seen_version_{0};
    std::mutex bells_mutex_;
    std::vector<OtherBell> bells_;
    std::mutex put_off_mutex_;
    std::vector<Work> put_off_;
    Atomic<bool> is_put_off_{false};
    int bell_pipe_[2] = {-1, -1};
};

}  // namespace penstock
