// snapshot.h: everything a segment tells of itself, read through a read-only mapping, without joining or disturbing it.
#pragma once
#include <map>

#include "channel.h"
#include "store.h"

namespace penstock::snapshot {

struct Node {
    std::vector<std::pair<std::string, i64>> numbers;
    std::vector<std::pair<std::string, std::string>> words;
    std::vector<std::pair<std::string, std::vector<Node>>> lists;
    Node& set(const char* key, u64 value) {
        numbers.emplace_back(key, static_cast<i64>(value));
        return *this;
    }
    Node& set(const char* key, std::string value) {
        words.emplace_back(key, std::move(value));
        return *this;
    }
};

inline std::vector<Node> peers(Attachment& by) {
    std::vector<Node> out;
    for (u32 slot = 0; slot < by.shape().max_peers; ++slot) {
        PeerSlot& peer = by.peer(slot);
        u64 identity = peer.identity.load(order::identity.acquire);
        PeerState state = state_of(identity);
        if (state == PeerState::free) continue;
        bool is_over = state == PeerState::left || state == PeerState::dead;
        Sight sight = is_over ? Sight{Liveness::gone} : look_at(identity);
        const char* word = state == PeerState::left                   ? "left"
                           : state == PeerState::dead                 ? "dead"
                           : state == PeerState::dying                ? "dying"
                           : sight.liveness == Liveness::gone         ? "dying"
                           : sight.liveness == Liveness::unknown      ? "unknown"
                           : sight.state == 'T' || sight.state == 't' ? "stopped"
                                                                      : "live";
        Node node;
        node.set("index", slot).set("epoch", peer.epoch.load(RELAXED)).set("pid", static_cast<u64>(pid_of(identity)));
        node.set("name", by.name_of(slot))
            .set("state", word)
            .set("how", state == PeerState::dead ? how_in_words(peer.how.load(RELAXED)) : "");
        node.set("joined_ns", peer.joined_ns.load(RELAXED))
            .set("reaped_blocks", peer.reaped_blocks.value())
            .set("reaped_nbytes", peer.reaped_nbytes.value())
            .set("reaps", peer.reaps.value());
        u64 since = peer.take_since_ns.load(RELAXED), now = now_ns(), reaped = peer.reaped_ns.load(RELAXED);
        node.set("waiting_for_memory_ns", since != 0 && since <= now ? std::max<u64>(now - since, 1) : 0);
        node.set("reaped_ago_ns", state == PeerState::dead && reaped <= now ? now - reaped : 0);
        out.push_back(std::move(node));
    }
    return out;
}

inline void add_waits(Node& node, const Waits& waits, u64 now) {
    u64 since = waits.since_ns.load(RELAXED);
    node.set("records", waits.records.value())
        .set("nbytes", waits.nbytes.value())
        .set("spins", waits.spins.value())
        .set("parks", waits.parks.value());
    node.set("wakes", waits.wakes.value())
        .set("longest_wait_ns", waits.longest_ns.value())
        .set("furthest_behind_nbytes", waits.furthest_nbytes.value());
    node.set("waiting_ns", since != 0 && since <= now ? std::max<u64>(now - since, 1) : 0);
}
inline const char* end_word(EndState state) {
    switch (state) {
        case EndState::expected: return "expected";
        case EndState::live: return "live";
        case EndState::closed: return "closed";
        case EndState::dead:
        case EndState::failed: return "dead";
        default: return "corrupt";
    }
}
inline void add_end(Node& node, Attachment& by, End end, const Failure& failure) {
    bool is_known = end.state != EndState::expected && end.slot < by.shape().max_peers &&
                    (by.peer(end.slot).epoch.load(RELAXED) & EPOCH_MASK) == end.peer_epoch;
    node.set("state", end_word(end.state)).set("peer", is_known ? end.slot : ~0ull).set("epoch", end.epoch);
    node.set("name", is_known ? by.name_of(end.slot) : "")
        .set("pid", is_known ? static_cast<u64>(pid_of(by.peer(end.slot).identity.load(order::identity.acquire))) : 0)
        .set("failure", has_died(end.state) ? read_failure(failure, end.epoch) : "");
}

inline u64 holder_of_lock(u32 word) { return word == 0 ? ~0ull : (word & 0xff) - 1; }

// Of a pool that keeps blocks by key. The keys are read without the lock: one may be of the block's life before.
inline Node store(Attachment& by) {
    Store store(by);
    StoreStats s = store.stats();
    Node node;
    node.set("hits", s.hits).set("misses", s.misses).set("puts", s.puts).set("evictions", s.evictions);
    node.set("evicted_nbytes", s.evicted_nbytes)
        .set("fills_awaited", s.fills_awaited)
        .set("abandoned", s.abandoned)
        .set("lock_holder", holder_of_lock(store.header().lock.load(RELAXED)));
    u64 nbytes = 0;
    std::vector<Node> items;
    for (const auto& i : s.items) {
        std::string key;
        const u8* bytes = reinterpret_cast<const u8*>(&i.key);
        for (size_t at = 0; at < sizeof i.key; ++at) key += format("%02x", bytes[at]);
        Node item;
        item.set("key", key).set("block", i.block).set("nbytes", i.nbytes).set("hits", i.hits);
        item.set("holders", i.holders)
            .set("age_ns", i.age_ns)
            .set("idle_ns", i.idle_ns)
            .set("state", i.is_filling ? "filling" : "ready")
            .set("writer", i.is_filling && i.taker < by.shape().max_peers ? i.taker : ~0ull);
        nbytes += i.nbytes;
        items.push_back(std::move(item));
    }
    node.set("keys", s.items.size()).set("nbytes", nbytes);
    node.lists.emplace_back("items", std::move(items));
    return node;
}

inline Node take(int fd) {
    auto by = Attachment::observe(Segment::adopt(fd, false, true));
    const Geometry& g = by->segment().geometry();
    Header& header = by->segment().header();
    u64 now = now_ns();
    Node out;
    const char* kinds[] = {"?", "segment", "pool"};              // by SegmentKind
    const char* styles[] = {"?", "ring", "broadcast", "inbox"};  // by ChannelStyle
    out.set("name", by->segment().name()).set("kind", g.channel != 0 ? styles[g.shape.style] : kinds[g.shape.kind]);
    out.set("nonce", format("%016llx", static_cast<unsigned long long>(by->segment().nonce())));
    out.set("nbytes", g.trace)
        .set("page_nbytes", g.shape.page)
        .set("age_ns", now - header.created_ns)
        .set("max_peers", g.shape.max_peers);
    out.lists.emplace_back("peers", peers(*by));
    if (g.pool != 0) {
        Pool pool(*by);
        PoolStats s = pool.stats();
        Node node;
        node.set("nbytes", s.nbytes)
            .set("claimed_nbytes", s.claimed_nbytes)
            .set("taken_nbytes", s.taken_nbytes)
            .set("free_nbytes", s.free_nbytes);
        node.set("largest_free_nbytes", s.largest_free_nbytes)
            .set("blocks", s.blocks)
            .set("max_blocks", g.shape.max_blocks)
            .set("takes", s.takes);
        node.set("taken_nbytes_total", s.taken_nbytes_total)
            .set("exhaustions", s.exhaustions)
            .set("recoveries", s.recoveries)
            .set("stale_refs", s.stale_refs);
        node.set("lock_holder", holder_of_lock(pool.header().lock.load(RELAXED)))
            .set("is_elsewhere", g.shape.elsewhere);
        std::vector<Node> holders;
        for (const auto& h : s.holders) {
            Node holder;
            holder.set("peer", h.slot)
                .set("name", by->name_of(h.slot))
                .set("blocks", h.blocks)
                .set("nbytes", h.nbytes)
                .set("granted", h.granted);
            holders.push_back(std::move(holder));
        }
        node.lists.emplace_back("holders", std::move(holders));
        std::vector<Node> pools;
        pools.push_back(std::move(node));
        out.lists.emplace_back("pool", std::move(pools));
        if (g.shape.buckets != 0) out.lists.emplace_back("store", std::vector<Node>{store(*by)});
        out.set("claimed_nbytes", g.shape.granule_nbytes == 0 ? g.trace : g.pool_data + s.claimed_nbytes);
    } else {
        out.set("claimed_nbytes", g.trace);
    }
    if (g.channel != 0) {
        Channel channel(by);
        const char* latencies[] = {"eco", "auto", "spin"};
        out.set("latency", latencies[g.shape.latency])
            .set("lane_nbytes", g.shape.lane_nbytes)
            .set("inline_limit", g.shape.inline_limit);
        if (g.shape.schema_nbytes != 0) out.set("schema", by->segment().schema());
        std::vector<Node> senders, receivers;
        for (u32 i = 0; i < g.shape.lanes; ++i) {
            Lane& lane = channel.lane(i);
            Node node;
            node.set("index", i);
            add_end(node, *by, end_of(lane.word.load(order::end.acquire)), lane.failure);
            add_waits(node, lane.waits, now);
            node.set("waits_for_memory", lane.waits_for_memory.load(RELAXED))
                .set("spills", lane.spills.value())
                .set("exhaustions", lane.exhaustions.value())
                .set("refused", lane.refused.value());
            u64 last = lane.last_ns.load(RELAXED);
            node.set("last_sent_ns", last != 0 && last <= now ? now - last : 0);
            senders.push_back(std::move(node));
        }
        for (u32 r = 0; r < g.shape.receivers; ++r) {
            Node node;
            node.set("index", r);
            ReceiverSlot& slot = channel.receiver(r);
            add_end(node, *by, end_of(slot.word.load(order::end.acquire)), slot.failure);
            add_waits(node, channel.receiver(r).waits, now);
            std::vector<Node> cursors;
            u64 records_behind = 0, nbytes_behind = 0;
            for (u32 i = 0; i < g.shape.lanes; ++i) {
                Cursor& cursor = channel.cursor(i, r);
                if (mode_of(cursor.mode.load(RELAXED)) != CursorMode::counted) continue;
                u64 sequence = channel.lane(i).sequence.load(RELAXED),
                    committed = channel.lane(i).committed.load(RELAXED);
                u64 records = sequence - std::min(cursor.sequence.load(RELAXED), sequence),
                    nbytes = committed - std::min(cursor.released.load(RELAXED), committed);
                records_behind += records;
                nbytes_behind += nbytes;
                if (g.shape.lanes == 1 || records == 0) continue;
                Node behind;
                behind.set("sender", i).set("records_behind", records).set("nbytes_behind", nbytes);
                cursors.push_back(std::move(behind));
            }
            node.set("records_behind", records_behind).set("nbytes_behind", nbytes_behind);
            node.lists.emplace_back("behind", std::move(cursors));
            receivers.push_back(std::move(node));
        }
        out.lists.emplace_back("senders", std::move(senders));
        out.lists.emplace_back("receivers", std::move(receivers));
    }
    return out;
}

}  // namespace penstock::snapshot
