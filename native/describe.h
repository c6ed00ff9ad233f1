// describe.h: what an error says: which peer is in the way, the numbers, and the way out.
#pragma once
#include "receiver.h"
#include "sender.h"

namespace penstock {

inline std::string Attachment::describe(u32 slot) const {
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
inline std::string Attachment::remedy(u32 slot) const {
    u64 identity = peer(slot).identity.load(order::identity.acquire);
    Sight sight = look_at(identity);
    if (sight.liveness != Liveness::alive || (sight.state != 'T' && sight.state != 't')) return "";
    return format(": let it go on (kill -CONT %d) or end it", pid_of(identity));
}
// Reads only, takes no lock: the numbers are each right, and together as right as a moving target allows.
inline PoolStats Pool::stats() const {
    PoolStats s;
    s.nbytes = nbytes();
    s.holders.resize(geometry_.shape.max_peers);
    std::vector<std::pair<u64, u64>> taken;
    for (u32 index = 0; index < geometry_.shape.max_blocks; ++index) {
        Block& block = this->block(index);
        if (static_cast<BlockState>(block.state.load(order::block.acquire)) != BlockState::live) continue;
        u64 offset = block.offset.load(RELAXED), extent = block.extent.load(RELAXED);
        if (offset > s.nbytes || extent > s.nbytes - offset) continue;
        taken.emplace_back(offset, extent);
        s.taken_nbytes += extent;
        for (u32 p = 0; p < geometry_.shape.max_peers; ++p) {
            if (held(index)[p].load(RELAXED) != 0)
                ++s.holders[p].blocks, s.holders[p].nbytes += block.nbytes.load(RELAXED);
            if (geometry_.shape.has_grants == 0 || block.grant_units.load(RELAXED) == 0) continue;
            for (u32 from = 0; from < geometry_.shape.max_peers; ++from)
                s.holders[p].granted += grants(index, from)[p].load(RELAXED);
        }
    }
    std::sort(taken.begin(), taken.end());
    u64 at = 0;
    for (auto [offset, extent] : taken) {
        if (offset > at) s.largest_free_nbytes = std::max(s.largest_free_nbytes, offset - at);
        at = std::max(at, offset + extent);
    }
    s.largest_free_nbytes = std::max(s.largest_free_nbytes, s.nbytes - std::min(at, s.nbytes));
    s.free_nbytes = s.nbytes - std::min(s.taken_nbytes, s.nbytes);
    s.blocks = taken.size();
    s.claimed_nbytes = geometry_.shape.granule_nbytes == 0 ? s.nbytes : head_.claimed_nbytes.load(RELAXED);
    s.takes = head_.takes.value();
    s.taken_nbytes_total = head_.taken_nbytes_total.value();
    s.exhaustions = head_.exhaustions.value();
    s.recoveries = head_.recoveries.value();
    s.stale_refs = head_.stale_refs.value();
    for (u32 p = 0; p < geometry_.shape.max_peers; ++p) s.holders[p].slot = p;
    std::erase_if(s.holders, [](const PoolStats::Holder& h) { return h.blocks == 0 && h.granted == 0; });
    return s;
}
inline Error Pool::exhausted(u64 requested) const {
    PoolStats s = stats();
    std::string holders;
    std::sort(s.holders.begin(), s.holders.end(), [](auto& a, auto& b) { return a.nbytes > b.nbytes; });
    for (size_t i = 0; i < s.holders.size() && i < 4; ++i)
        holders += format("%s%s holds %s", i == 0 ? "; " : ", ", attachment_.describe(s.holders[i].slot).c_str(),
                          in_units(s.holders[i].nbytes).c_str());
    const char* advice = requested > s.nbytes                     ? ": raise the pool's nbytes"
                         : s.blocks >= geometry_.shape.max_blocks ? ": all blocks are taken, raise max_blocks"
                                                                  : "";
    return Error(Fault::memory_exhausted, format("block of %s does not fit pool '%s' (%s, %s free, largest gap %s)%s%s",
                                                 in_units(requested).c_str(), attachment_.segment().name().c_str(),
                                                 in_units(s.nbytes).c_str(), in_units(s.free_nbytes).c_str(),
                                                 in_units(s.largest_free_nbytes).c_str(), advice, holders.c_str()))
        .with("requested", static_cast<i64>(requested))
        .with("free", static_cast<i64>(s.free_nbytes))
        .with("largest", static_cast<i64>(s.largest_free_nbytes))
        .with("holders", holders.empty() ? "" : holders.substr(2));
}
inline Error Pool::stale(const Extent& ref, const char* why, u32 actual) const {
    head_.stale_refs.add();
    return Error(Fault::stale_ref, format("block %u, generation %u, of pool '%s' %s%s", ref.block, ref.generation,
                                          attachment_.segment().name().c_str(), why,
                                          actual != 0 ? format(": generation %u found", actual).c_str() : ""))
        .with("expected", ref.generation)
        .with("actual", actual);
}
inline std::string Channel::describe(End end) const {
    return is_known(end) ? by->describe(end.slot) : "a peer whose place has been taken since";
}
// While a peer is being reaped: its ends are marked first, its blocks are counted after (60,000 in 25 to 50 ms). A
// dying peer of a process that is gone is about to be reaped.
inline void Channel::await_count(End end, u64 stay_ns) const {
    for (u64 began = now_ns(); is_known(end); ::usleep(200)) {
        PeerSlot& peer = by->peer(end.slot);
        u64 identity = peer.identity.load(order::identity.acquire), waited = now_ns() - began;
        if (state_of(identity) == PeerState::live && identity != own_identity() && waited < stay_ns) continue;
        if (waited >= std::max(COUNT_NS, stay_ns)) return;
        if (state_of(identity) != PeerState::dying) return;
        if (peer.reaped_ns.load(RELAXED) == 0 && look_at(identity).liveness != Liveness::gone) return;
    }
}
inline Error Channel::died(const char* role, u32 index, End end, bool may_wait) const {
    std::string name = "?", how = "how is not known", held = "what it held was given back";
    i64 pid = 0;
    bool is_sender = std::strcmp(role, "sender") == 0;
    std::string failure = read_failure(is_sender ? lane(index).failure : receiver(index).failure, end.epoch);
    u64 stay_ns = stay_of(failure);
    if (may_wait) await_count(end, stay_ns);
    if (is_known(end)) {
        PeerSlot& peer = by->peer(end.slot);
        u64 identity = peer.identity.load(order::identity.acquire);
        name = by->name_of(end.slot);
        pid = pid_of(identity);
        u32 ended_with = peer.how.load(RELAXED);
        bool is_ending = state_of(identity) == PeerState::dying && peer.reaped_ns.load(RELAXED) == 0;
        how = ended_with == 0 && is_ending ? "the kernel is still ending it" : how_in_words(ended_with);
        if (ended_with == 1) how += " without closing";  // with status 0
        if (stay_ns != 0 && ended_with != 0) failure.clear();
        held = state_of(identity) == PeerState::dead
                   ? format("%s (%s), given back", counted(peer.reaped_blocks.value(), "block").c_str(),
                            in_units(peer.reaped_nbytes.value()).c_str())
                   : std::string("what has not been given back yet");
        // Its end alone is dead.
        if (state_of(identity) == PeerState::live || state_of(identity) == PeerState::left) held.clear();
    }
    if (!failure.empty()) how = failure;
    return Error(Fault::peer_died, format("%s %u of '%s', '%s' (pid %lld), died: %s%s%s", role, index,
                                          by->segment().name().c_str(), name.c_str(), static_cast<long long>(pid),
                                          how.c_str(), held.empty() ? "" : "; it held ", held.c_str()))
        .with("index", static_cast<i64>(index))
        .with("name", name)
        .with("pid", pid)
        .with("how", how)
        .with("held", held);
}
inline void Attachment::set_group(std::shared_ptr<EndGroup> group) {
    const Geometry& g = segment_->geometry();
    if (group == nullptr || g.channel == 0) return;
    auto know = [&](const Shared<u64>& word) {
        End end = end_of(word.load(order::end.acquire));
        known_epochs_.push_back(has_died(end.state) || end.epoch == 0 ? end.epoch : end.epoch - 1);
    };
    for (u32 i = 0; i < g.shape.lanes; ++i) know(segment_->at<Lane>(g.lanes)[i].word);
    for (u32 r = 0; r < g.shape.receivers; ++r) know(segment_->at<ReceiverSlot>(g.receivers)[r].word);
    group_ = std::move(group);
}
// The death of an end of the channel since this peer joined, unless the channel ignores such a death. For the watcher,
// so it waits for nothing.
inline std::optional<Error> find_death(Attachment& by) {
    Channel channel(std::shared_ptr<Attachment>(std::shared_ptr<Attachment>(), &by));  // does not own it
    const Shape& shape = by.shape();
    auto find = [&](const char* role, u32 index, size_t end_index, const auto& slot) -> std::optional<Error> {
        for (const Shared<u64>* word : {&slot.word, &slot.ended})
            if (End end = end_of(word->load(order::end.acquire)); by.has_died_since(end_index, end))
                return channel.died(role, index, end, false);
        return {};
    };
    std::optional<Error> death;
    for (u32 i = 0; i < shape.lanes && shape.sender_death == 0 && !death; ++i)
        death = find("sender", i, i, channel.lane(i));
    for (u32 r = 0; r < shape.receivers && shape.receiver_death == 0 && !death; ++r)
        death = find("receiver", r, shape.lanes + r, channel.receiver(r));
    return death;
}
inline Error Sender::timeout(u64 waited_ns) {
    require_open();
    lane_->refused.count();
    if (is_locked_out()) return Error(Fault::timeout, obstacle_);
    if (waits_for_memory_) {
        Error full = channel_.pool.exhausted(reservation_.nbytes);
        full.fault = Fault::timeout;
        full.text = format("no room for a record within %s: ", in_seconds(waited_ns).c_str()) + full.text;
        return full;
    }
    u32 slowest = slowest_receiver();
    if (slowest == NO_INDEX) return Error(Fault::timeout, format("'%s' has no receiver", name()));
    u64 least = channel_.cursor(index_, slowest).released.load(RELAXED);
    if (least_kept() < least) {
        End keeper = end_of(lane_->keeper.load(RELAXED));
        return Error(
            Fault::timeout,
            format("lane %u of '%s' is full for %s: a view of a reservation by %s, which has closed, can still "
                   "write there: drop the view",
                   index_, name(), in_seconds(waited_ns).c_str(), channel_.describe(keeper).c_str()));
    }
    Record oldest{};
    std::memcpy(&oldest, channel_.by->segment().read_at(channel_.ring_offset(index_, least)), sizeof oldest);
    u64 behind_ns = oldest.position == least ? now_ns() - oldest.committed_ns : waited_ns;
    u64 records = lane_->sequence.load(RELAXED) - channel_.cursor(index_, slowest).sequence.load(RELAXED);
    End end = end_of(channel_.receiver(slowest).word.load(order::end.acquire));
    std::string receiver =
        end.state == EndState::expected ? std::string("which has not attached yet") : channel_.describe(end);
    return Error(Fault::timeout,
                 format("'%s' is full for %s: receiver %u, %s, is %llu records (%s) behind, the oldest for %s", name(),
                        in_seconds(waited_ns).c_str(), slowest, receiver.c_str(),
                        static_cast<unsigned long long>(records), in_units(committed_ - least).c_str(),
                        in_seconds(behind_ns).c_str()))
        .with("receiver", slowest)
        .with("pid", end.state == EndState::live && end.slot < channel_.g.shape.max_peers
                         ? pid_of(channel_.by->peer(end.slot).identity.load(order::identity.acquire))
                         : 0)
        .with("records_behind", static_cast<i64>(records))
        .with("nbytes_behind", static_cast<i64>(committed_ - least))
        .with("ns_behind", static_cast<i64>(behind_ns));
}
inline constexpr u32 MAX_NAMED = 8;
inline Error Receiver::timeout(u64 waited_ns) {
    require_open();
    if (is_locked_out()) return Error(Fault::timeout, obstacle_);
    std::string sender = "no sender is open";
    std::string missing;
    u32 num_missing = 0;
    u64 last = NEVER;  // of an inbox: the sender that has been silent for longest is the one to look at
    for (u32 i = 0; i < channel_.g.shape.lanes; ++i) {
        End end = end_of(channel_.lane(i).word.load(order::end.acquire));
        if (end.state == EndState::expected && ++num_missing <= MAX_NAMED)
            missing += format(num_missing == 1 ? "%u" : ", %u", i);
        if (end.state != EndState::live) continue;
        u64 at = channel_.lane(i).last_ns.load(RELAXED);
        if (at > last) continue;
        last = at;
        sender = channel_.describe(end) +
                 (at == 0 ? " has not sent yet" : " sent last " + in_seconds(now_ns() - at) + " ago");
    }
    if (num_missing > MAX_NAMED) missing += format(" and %u more", num_missing - MAX_NAMED);
    if (!channel_.is_inbox()) missing.clear();
    if (!missing.empty())
        missing = format(num_missing == 1 ? "; sender %s has never opened" : "; senders %s have never opened",
                         missing.c_str());
    return Error(Fault::timeout, format("no record for receiver %u of '%s' within %s; %s%s", index_, name(),
                                        in_seconds(waited_ns).c_str(), sender.c_str(), missing.c_str()));
}
inline Error Receiver::corrupt(u32 lane, const Record& record) {
    return Error(Fault::record_corrupt,
                 format("lane %u of '%s' at position %llu: not a record (position %llu, length %u, kind %u): "
                        "a process has overwritten it",
                        lane, name(), static_cast<unsigned long long>(lanes_[lane].position),
                        static_cast<unsigned long long>(record.position), record.length, record.kind));
}

}  // namespace penstock
