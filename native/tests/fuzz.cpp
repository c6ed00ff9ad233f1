// fuzz.cpp: whatever is written into a segment by somebody who must not, a process that uses it gets an Error or a
// value: never a crash, an access outside of the mapping, or a hang. Everything that processes share is mutated, while
// ends are open and between any two calls; Refs and the headers of files too; and, in some rounds, by a second thread
// while a call runs (a number that is fetched twice would be checked in one state and used in another).
//
// A round begins with the segment as it was created and is known by seed and number: `fuzz --seed S --round N` repeats
// it. The rounds run in a child, so that a crash or a hang becomes a line that says which round and which call it was.
#include "snapshot.h"
#include "tap.h"
#include "testing.h"
#include "trace.h"

using namespace testing;

namespace {

constexpr u64 HANG_NS = 60'000'000'000;  // a lock may honestly be waited for as long as Pool::LOCK_NS, twice in a call

// Seen by the parent while the child runs.
struct Progress {
    std::atomic<u64> round{0};
    std::atomic<u64> mutations{0};  // between calls
    std::atomic<u64> shakes{0};     // during calls
    std::atomic<u64> calls{0};
    std::atomic<u64> values{0};
    std::atomic<u64> faults[16]{};
    std::atomic<const char*> call{""};
};
Progress* progress = nullptr;

// ── the mutator ──
struct World {
    std::shared_ptr<Segment> segment;
    std::vector<u8> control, data;
    explicit World(const Shape& shape) : segment(create(shape, "fuzz")) {
        const Geometry& g = segment->geometry();
        control.assign(segment->at<u8>(0), segment->at<u8>(0) + g.data);
        if (segment->data_nbytes() != 0)  // it may lie elsewhere
            data.assign(segment->read_at(g.data), segment->read_at(g.data) + segment->data_nbytes());
    }
    void restore() {
        std::memcpy(segment->at<u8>(0), control.data(), control.size());
        if (!data.empty()) std::memcpy(segment->write_at(segment->geometry().data), data.data(), data.size());
        if (segment->trace_nbytes() != 0) std::memset(segment->trace_mapping(), 0, segment->trace_nbytes());
    }
    const Shape& shape() const { return segment->geometry().shape; }
};

u64 any_value(Random& random, const Shape& shape, u64 before) {
    switch (random.below(8)) {
        case 0: return before ^ 1ull << random.below(64);
        case 1: return before + random.below(5) - 2;
        case 2: return before ^ (1ull << random.below(32));
        case 3: return random.next();
        case 4: return random.below(64);
        case 5: {
            const u64 at_edges[] = {shape.lane_nbytes, shape.inline_limit, shape.pool_nbytes, shape.max_blocks,
                                    shape.max_peers,   shape.receivers,    shape.lanes,       sizeof(Record)};
            return random.of(at_edges) + random.below(3) - 1;
        }
        case 6: {
            const u64 huge[] = {~0ull,      1ull << 63,         (1ull << 63) - 1, 1ull << 32, (1ull << 32) - 1,
                                1ull << 31, 0xffff0000ffff0000, MAX_NBYTES};
            return random.of(huge) - random.below(2);
        }
        default: return random.next() >> random.below(64);
    }
}
void store(u8* at, u64 nbytes, u64 value) {  // as one store where it can be: a torn one is another mutation
    if (nbytes == 8)
        std::atomic_ref(*reinterpret_cast<u64*>(at)).store(value, RELAXED);
    else if (nbytes == 4)
        std::atomic_ref(*reinterpret_cast<u32*>(at)).store(static_cast<u32>(value), RELAXED);
    else
        std::atomic_ref(*at).store(static_cast<u8>(value), RELAXED);
}
void mutate(Random& random, World& world) {
    const Geometry& g = world.segment->geometry();
    u64 from = offsetof(Header, peers_version), to = g.data;  // what is before it: adopt_anything
    bool is_control = true, is_trace = false;
    switch (random.below(13)) {  // every structure as often as any other, however small it is
        case 0: to = sizeof(Header); break;
        case 1: from = g.peers, to = g.peers + g.shape.max_peers * sizeof(PeerSlot); break;
        case 2: from = g.pool, to = g.pool + offsetof(PoolHeader, granules); break;
        case 3: from = g.entries, to = g.blocks; break;
        case 4: from = g.blocks, to = g.blocks + g.block_stride * g.shape.max_blocks; break;
        case 5: from = g.channel != 0 ? g.channel : g.pool; break;
        case 6: from = g.lanes != 0 ? g.lanes : g.blocks, to = g.receivers != 0 ? g.receivers : g.data; break;
        case 7:
            if (g.shape.lanes != 0) {
                is_control = false;
                from = g.data, to = g.pool_data;
            }
            break;
        case 8:
            if (g.trace > g.data) is_control = false, from = g.data, to = g.trace;
            break;
        case 9:
            if (g.store != 0) from = g.store, to = g.store + sizeof(StoreHeader) + 4ull * g.shape.buckets;
            break;
        case 10:
            if (g.grants_stride != 0) from = g.grants, to = g.grants + g.grants_stride * g.shape.max_blocks;
            break;
        case 11:  // the cursors as often as the events
            is_trace = g.total > g.trace;
            if (is_trace) from = g.trace, to = random.one_in(2) ? g.trace_ring(0) : g.total;
            break;
        default: break;
    }
    const u64 widths[] = {1, 4, 8, 8};
    u64 width = random.of(widths), at = from + random.below((to - from) / width) * width;
    if (!is_control && g.shape.lanes != 0 && random.one_in(2))  // a record's header, rather than what it carries
        at =
            from + random.below(std::min<u64>(to - from, 1024) / RECORD_ALIGN) * RECORD_ALIGN + random.below(4) * width;
    u8* target = is_trace     ? world.segment->trace_mapping() + (at - g.trace)
                 : is_control ? world.segment->at<u8>(at)
                              : world.segment->write_at(at);
    u64 before = 0;
    std::memcpy(&before, target, width);
    store(target, width, any_value(random, g.shape, before));
    progress->mutations.fetch_add(1, RELAXED);
}
// A lock whose word names a living peer is waited for, by design, for seconds. One such wait is visited now and then;
// all others are taken from their owners, so that the rounds stay short.
void spare_the_clock(World& world) {
    const Geometry& g = world.segment->geometry();
    if (g.pool == 0) return;
    auto disown = [](Shared<u32>& word) {
        if (word.load(RELAXED) != 0) word.store(word.load(RELAXED) | 0xff, RELAXED);
    };
    disown(world.segment->at<PoolHeader>(g.pool)->lock);
    if (g.shape.buckets != 0) disown(world.segment->at<StoreHeader>(g.store)->lock);
    for (u32 i = 0; i < g.shape.max_blocks; ++i) disown(world.segment->at<Block>(g.blocks + i * g.block_stride)->lock);
}

// Mutates while a call runs. Never a lock: a stolen one makes two holders, and what they then write is not what we
// test.
class Shaker {
   public:
    ~Shaker() {
        is_ending_ = true;
        if (thread_.joinable()) thread_.join();
    }
    void begin(World& world, u64 seed) {
        world_ = &world, seed_ = seed;
        is_shaking_.store(true);
        if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    }
    void end() {
        is_shaking_.store(false);
        while (is_inside_.load()) pause_cpu();
    }

   private:
    void loop() {
        while (!is_ending_) {
            is_inside_.store(true);
            if (is_shaking_.load()) {
                Random random(seed_ + ++turns_);
                const Geometry& g = world_->segment->geometry();
                u64 at = g.pool + random.below((g.data - g.pool) / 8) * 8;
                bool is_data = g.shape.lanes != 0 && random.one_in(3);
                if (is_data) at = g.data + random.below((g.pool_data - g.data) / 8) * 8;
                if (!is_data && is_lock(g, at)) continue;
                u8* target = is_data ? world_->segment->write_at(at) : world_->segment->at<u8>(at);
                u64 before = std::atomic_ref(*reinterpret_cast<u64*>(target)).load(RELAXED);
                store(target, 8, any_value(random, g.shape, before));
                progress->shakes.fetch_add(1, RELAXED);
                // back to what it was: another look at the same number sees another value
                if (random.one_in(2)) store(target, 8, before);
            } else {
                is_inside_.store(false);
                ::sched_yield();
            }
        }
        is_inside_.store(false);
    }
    static bool is_lock(const Geometry& g, u64 at) {
        if (at == g.pool || (g.shape.buckets != 0 && at == g.store)) return true;
        return at >= g.blocks && at < g.blocks + g.block_stride * g.shape.max_blocks &&
               (at - g.blocks) % g.block_stride == 0;
    }
    std::thread thread_;
    std::atomic<bool> is_shaking_{false}, is_inside_{false}, is_ending_{false};
    World* world_ = nullptr;
    u64 seed_ = 0, turns_ = 0;
};

// ── calls ──
template <class Call>
bool expect_error_or_value(const char* name, Call&& call) {
    progress->call.store(name, RELAXED);
    progress->calls.fetch_add(1, RELAXED);
    try {
        call();
        progress->values.fetch_add(1, RELAXED);
        return true;
    } catch (const Error& error) {
        progress->faults[static_cast<int>(error.fault)].fetch_add(1, RELAXED);
        return false;
    }
}
u64 read_all(const Segment& segment, const u8* at, u64 nbytes) {
    const Geometry& g = segment.geometry();
    u64 offset = static_cast<u64>(at - segment.read_at(g.data));
    REQUIRE(offset <= segment.data_nbytes() && nbytes <= segment.data_nbytes() - offset,
            "%" PRIu64 " bytes at %" PRIu64 " lie outside of %" PRIu64, nbytes, offset, segment.data_nbytes());
    u64 sum = 0;
    for (u64 i = 0; i < nbytes; i += 61) sum += at[i];
    return nbytes == 0 ? 0 : sum + at[nbytes - 1];
}

struct Ends {
    std::vector<std::shared_ptr<Attachment>> peers;
    std::vector<std::shared_ptr<Sender>> senders;
    std::vector<std::shared_ptr<Receiver>> receivers;
    struct Held {
        std::shared_ptr<Attachment> by;
        std::shared_ptr<Receiver> receiver;  // a record in a ring; else a block
        u32 lane;
        u64 id;
        Extent extent;
    };
    std::vector<Held> held;
    std::vector<std::unique_ptr<Tap>> taps;
    std::vector<std::unique_ptr<TraceReader>> tracers;
};
void give_back(Ends::Held& held) {
    if (held.receiver)
        held.receiver->release_record(held.lane, held.id);
    else
        Pool(*held.by).release(held.extent.block, held.extent.generation);
}
template <class T>
T* any(Random& random, std::vector<std::shared_ptr<T>>& items) {
    return items.empty() ? nullptr : items[random.below(items.size())].get();
}

void send(Sender& sender, Random& random) {
    static const std::vector<u8> bytes(1 << 16, 0x5a);
    const Shape& shape = sender.channel().g.shape;
    const u64 sizes[] = {0, 1, 31, 32, 33, 200, shape.inline_limit, shape.inline_limit + 1, 3 * shape.inline_limit};
    u64 total = std::min<u64>(random.of(sizes), bytes.size()), first = random.below(total + 1);
    Part parts[] = {{bytes.data(), first}, {bytes.data() + first, total - first}};
    sender.try_send(parts, 2, total);
}
void receive(World& world, Ends& ends, const std::shared_ptr<Receiver>& receiver, Random& random) {
    FoundRecord record;
    if (!receiver->try_find(record)) return;
    read_all(*world.segment, record.at, record.nbytes);
    if (random.one_in(3))
        ends.held.push_back({receiver->channel().by, record.is_spilled ? nullptr : receiver, record.lane,
                             receiver->lease(record), record.extent});
    else
        receiver->accept(record);
}
// Through a mapping that nobody can write through: a tap that writes is a crash.
void add_tap(World& world, Ends& ends, Random& random) {
    expect_error_or_value("Tap", [&] {
        auto segment = Segment::adopt(::dup(world.segment->fd()), false, true);
        ends.taps.push_back(std::make_unique<Tap>(segment, random.one_in(2)));
    });
}
void look(Tap& tap, Random& random) {
    std::vector<u8> bytes;
    TappedRecord record;
    for (u64 most = 1 + random.below(64); most > 0 && tap.find(record); --most) {
        bytes.assign(record.is_gone ? 0 : record.nbytes, 0);
        tap.copy(record, record.is_gone || random.one_in(8) ? nullptr : bytes.data());
    }
    tap.missed();
}
void trace(Ends& ends, const std::shared_ptr<Segment>& segment, Random& random) {
    if (ends.tracers.size() < 2) ends.tracers.push_back(std::make_unique<TraceReader>(segment));
    TraceReader& reader = *ends.tracers[random.below(ends.tracers.size())];
    reader.extend();
    static std::vector<TraceEvent> events(TRACE_EVENTS);
    for (u32 end = 0; end < reader.ends(); ++end) {
        u64 many = reader.read(end, events.data());
        REQUIRE(many <= TRACE_EVENTS, "%" PRIu64 " events", many);
        for (u64 i = 0; i < many; ++i)
            REQUIRE(events[i].since_ns <= events[i].ns && events[i].kind <= TraceKind::waited, "no event");
    }
    reader.missed();
}
Extent any_extent(Random& random, const Ends& ends, const Shape& shape) {
    Extent extent{static_cast<u32>(random.below(shape.max_blocks)), static_cast<u32>(random.below(4)),
                  random.below(shape.pool_nbytes), random.below(shape.pool_nbytes)};
    if (!ends.held.empty() && !random.one_in(4)) {
        const Extent& real = ends.held[random.below(ends.held.size())].extent;
        if (real.nbytes != 0) extent = real;
    }
    switch (random.below(8)) {
        case 0: extent.block = static_cast<u32>(any_value(random, shape, extent.block)); break;
        case 1: extent.generation = static_cast<u32>(any_value(random, shape, extent.generation)); break;
        case 2: extent.offset = any_value(random, shape, extent.offset); break;
        case 3: extent.nbytes = any_value(random, shape, extent.nbytes); break;
        default: break;
    }
    return extent;
}

void join(World& world, Ends& ends) {
    expect_error_or_value("join", [&] { ends.peers.push_back(Attachment::join(world.segment, "fuzz")); });
}
void open_ends(World& world, Ends& ends, Random& random) {
    const Shape& shape = world.shape();
    for (int i = 0; i < 3; ++i) join(world, ends);
    for (u32 i = 0; i < shape.lanes; ++i)
        expect_error_or_value(
            "Sender", [&] { ends.senders.push_back(std::make_shared<Sender>(ends.peers[i % ends.peers.size()], -1)); });
    for (u32 i = 0; i < shape.receivers; ++i)
        expect_error_or_value("Receiver", [&] {
            ends.receivers.push_back(std::make_shared<Receiver>(ends.peers[(i + 1) % ends.peers.size()], -1));
        });
    if (shape.lanes != 0) add_tap(world, ends, random);
}

void call_pool(World& world, Ends& ends, Random& random) {
    Attachment* by = any(random, ends.peers);
    if (by == nullptr) return;
    auto shared = by->shared_from_this();
    const Shape& shape = world.shape();
    Pool pool(*by);
    switch (random.below(10)) {
        case 0:
        case 1:
            expect_error_or_value("take", [&] {
                Extent extent;
                const u64 sizes[] = {0, 1, 64, 65, 1000, shape.pool_nbytes / 4, shape.pool_nbytes, MAX_NBYTES};
                if (!pool.try_take(random.of(sizes), extent)) return;
                ends.held.push_back({shared, nullptr, 0, 0, extent});
                if (shape.elsewhere != 0) return;
                u8* to = world.segment->write_at(world.segment->geometry().pool_data + extent.offset);
                read_all(*world.segment, world.segment->read_at(world.segment->geometry().pool_data + extent.offset),
                         extent.nbytes);
                std::memset(to, 0x77, extent.nbytes);
            });
            break;
        case 2:
        case 3:
            expect_error_or_value("open", [&] {
                Extent extent = any_extent(random, ends, shape);
                pool.open(extent);
                ends.held.push_back({shared, nullptr, 0, 0, extent});
                if (shape.elsewhere != 0) return;
                read_all(*world.segment, world.segment->read_at(world.segment->geometry().pool_data + extent.offset),
                         extent.nbytes);
            });
            break;
        case 4:
            expect_error_or_value("grant", [&] {
                pool.grant(any_extent(random, ends, shape), static_cast<u32>(random.below(shape.max_peers + 2)));
            });
            break;
        case 5:
            expect_error_or_value("revoke", [&] {
                pool.revoke(any_extent(random, ends, shape), static_cast<u32>(random.below(shape.max_peers + 2)));
            });
            break;
        case 6: expect_error_or_value("stats", [&] { pool.stats(); }); break;
        case 7:
            expect_error_or_value("exhausted", [&] { throw pool.exhausted(random.next() >> random.below(64)); });
            break;
        case 8:
            expect_error_or_value("trim", [&] { pool.trim(random.one_in(2) ? 0 : random.below(shape.pool_nbytes)); });
            break;
        default:
            if (ends.held.empty()) break;
            u64 i = random.below(ends.held.size());
            expect_error_or_value("release", [&] { give_back(ends.held[i]); });
            std::swap(ends.held[i], ends.held.back());
            ends.held.pop_back();
    }
}
void call_store(World& world, Ends& ends, Random& random) {
    Attachment* by = any(random, ends.peers);
    if (by == nullptr) return;
    auto shared = by->shared_from_this();
    Store store(*by);
    Key key{};  // few, so that they meet, in few buckets
    key.words[0] = random.below(3);
    key.words[1] = random.below(4);
    auto have = [&](const Extent& extent) {
        read_all(*world.segment, world.segment->read_at(world.segment->geometry().pool_data + extent.offset),
                 extent.nbytes);
        ends.held.push_back({shared, nullptr, 0, 0, extent});
    };
    Extent extent = any_extent(random, ends, world.shape());
    switch (random.below(12)) {
        case 0:
        case 1:
            expect_error_or_value("Store::get", [&] {
                if (store.get(key, extent)) have(extent);
            });
            break;
        case 2:
        case 3:
        case 4:
        case 5:
            expect_error_or_value("Store::begin", [&] {
                const u64 sizes[] = {0, 1, 64, 1000, 8000, world.shape().pool_nbytes};
                u32 fills_before = 0;
                Store::Begun begun = store.begin(key, random.of(sizes), extent, fills_before);
                if (begun == Store::Begun::wait) {
                    Spinner spinner(Latency::eco);
                    Waits waits{};
                    store.wait_for_fill(fills_before, now_ns() + random.below(50'000), spinner, waits);
                    return;
                }
                have(extent);
                if (begun != Store::Begun::fill) return;
                std::memset(world.segment->write_at(world.segment->geometry().pool_data + extent.offset), 0x77,
                            extent.nbytes);
                if (random.one_in(4)) return;
                random.one_in(4) ? store.abandon(extent) : static_cast<void>(store.commit(extent));
            });
            break;
        case 6: expect_error_or_value("Store::commit", [&] { store.commit(extent); }); break;
        case 7: expect_error_or_value("Store::abandon", [&] { store.abandon(extent); }); break;
        case 8:
            expect_error_or_value("Store::give_up", [&] {
                u32 fills_before = 0;
                Store::Begun begun = store.begin(key, random.below(9000), extent, fills_before);
                if (begun == Store::Begun::fill) store.give_up(extent);
                if (begun == Store::Begun::hit) have(extent);
            });
            break;
        case 9: expect_error_or_value("Store::remove", [&] { store.remove(random.one_in(8) ? nullptr : &key); }); break;
        default: expect_error_or_value("Store::stats", [&] { store.stats(); });
    }
}
void call_channel(World& world, Ends& ends, Random& random) {
    Sender* sender = any(random, ends.senders);
    Receiver* receiver = any(random, ends.receivers);
    switch (random.below(15)) {
        case 14: expect_error_or_value("TraceReader", [&] { trace(ends, world.segment, random); }); break;
        case 0:
        case 1:
        case 2:
            if (sender != nullptr) expect_error_or_value("send", [&] { send(*sender, random); });
            break;
        case 3:
        case 4:
        case 5:
            if (receiver != nullptr)
                expect_error_or_value("receive", [&] { receive(world, ends, receiver->shared_from_this(), random); });
            break;
        case 6:
            if (sender != nullptr)
                expect_error_or_value("Sender::wait", [&] {
                    if (auto* room = sender->try_reserve(1 + random.below(4 * world.shape().inline_limit)))
                        random.one_in(2) ? sender->abort() : sender->commit(*room);
                    else
                        sender->wait(now_ns() + random.below(50'000));
                });
            break;
        case 7:
            if (receiver != nullptr)
                expect_error_or_value("Receiver::wait", [&] { receiver->wait(now_ns() + random.below(50'000)); });
            break;
        case 8:
            if (sender != nullptr)
                expect_error_or_value("Sender::timeout", [&] {
                    if (!sender->arm()) sender->disarm(random.one_in(2));
                    throw sender->timeout(random.next() >> 20);
                });
            break;
        case 9:
            if (receiver != nullptr)
                expect_error_or_value("Receiver::timeout", [&] {
                    if (!receiver->arm()) receiver->disarm(random.one_in(2));
                    throw receiver->timeout(random.next() >> 20);
                });
            break;
        case 10: {  // an end goes, another comes
            bool is_sender = random.one_in(2);
            if (is_sender && !ends.senders.empty()) {
                expect_error_or_value("~Sender", [&] { ends.senders.pop_back(); });
                expect_error_or_value("Sender", [&] {
                    if (!ends.peers.empty())
                        ends.senders.push_back(
                            std::make_shared<Sender>(ends.peers[0], static_cast<int>(random.below(3)) - 1));
                });
            } else if (!is_sender && !ends.receivers.empty()) {
                expect_error_or_value("~Receiver", [&] { ends.receivers.pop_back(); });
                expect_error_or_value("Receiver", [&] {
                    if (!ends.peers.empty())
                        ends.receivers.push_back(
                            std::make_shared<Receiver>(ends.peers[0], static_cast<int>(random.below(3)) - 1));
                });
            }
            break;
        }
        case 11:
            if (random.one_in(4) && ends.taps.size() < 3) add_tap(world, ends, random);
            [[fallthrough]];
        case 12:
            if (!ends.taps.empty())
                expect_error_or_value("Tap::find", [&] { look(*ends.taps[random.below(ends.taps.size())], random); });
            break;
        default:
            if (sender != nullptr)
                expect_error_or_value("describe", [&] {
                    sender->channel().describe(end_of(random.next()));
                    throw sender->channel().died("sender", 0, end_of(random.next()));
                });
    }
}
void call_anything(World& world, Ends& ends, Random& random) {
    Attachment* by = any(random, ends.peers);
    const Shape& shape = world.shape();
    switch (random.below(by == nullptr ? 3 : 9)) {
        case 0: expect_error_or_value("snapshot", [&] { snapshot::take(::dup(world.segment->fd())); }); break;
        case 1:
            if (ends.peers.size() < 6) join(world, ends);
            break;
        case 2: expect_error_or_value("adopt", [&] { Segment::adopt(::dup(world.segment->fd())); }); break;
        case 3:
            expect_error_or_value("reap", [&] {
                u64 identity = by->peer(static_cast<u32>(random.below(shape.max_peers))).identity.load(RELAXED);
                by->reap(random.one_in(4) ? random.next() : identity);
            });
            break;
        case 4: expect_error_or_value("resync", [&] { by->resync(); }); break;
        case 5: expect_error_or_value("peers", [&] { snapshot::peers(*by); }); break;
        case 6:
            expect_error_or_value("wake_async", [&] {
                if (random.one_in(8)) by->bell_fd();
                by->wake_async(static_cast<u32>(random.below(shape.max_peers + 2)));
            });
            break;
        case 7:
            expect_error_or_value("describe", [&] { by->describe(static_cast<u32>(random.below(shape.max_peers))); });
            break;
        default: expect_error_or_value("~Attachment", [&] { ends.peers.pop_back(); });
    }
}

// ── rounds ──
void play(World& world, Shaker& shaker, u64 seed, u64 round, bool may_wait_long) {
    Random random(seed + round * 0x100000001b3);
    Ends ends;
    bool is_shaken = !WATCHES_THREADS && random.one_in(6);
    world.restore();
    open_ends(world, ends, random);
    Header before{};
    std::memcpy(static_cast<void*>(&before), &world.segment->header(), offsetof(Header, peers_version));
    u64 quiet = random.below(12), calls = quiet + 4 + random.below(16);
    if (is_shaken) shaker.begin(world, random.next());
    for (u64 i = 0; i < calls; ++i) {
        if (i >= quiet && !is_shaken)
            for (u64 many = random.below(4); many > 0; --many) mutate(random, world);
        if (!may_wait_long && !is_shaken) spare_the_clock(world);
        u64 kind = random.below(10);
        if (kind < 6 && world.shape().lanes != 0)
            call_channel(world, ends, random);
        else if (kind < 6 && world.shape().buckets != 0)
            call_store(world, ends, random);
        else if (kind < 9)
            call_pool(world, ends, random);
        else
            call_anything(world, ends, random);
    }
    if (is_shaken) shaker.end();
    if (!may_wait_long) spare_the_clock(world);
    REQUIRE(std::memcmp(&before, &world.segment->header(), offsetof(Header, peers_version)) == 0,
            "a call wrote into the header");
    progress->call.store("give_back");
    while (!ends.held.empty()) {
        give_back(ends.held.back());
        ends.held.pop_back();
    }
    progress->call.store("close");
    ends.senders.clear();
    ends.receivers.clear();
    ends.peers.clear();
}

// A file that says of itself what it likes, of any size, sealed or not.
void adopt_anything(World& world, u64 seed, u64 round) {
    Random random(seed ^ round * 0x9e3779b97f4a7c15);
    int fd = static_cast<int>(::syscall(SYS_memfd_create, "penstock:forged", 1u | 2u));
    REQUIRE(fd >= 0, "memfd_create: %s", std::strerror(errno));
    u64 total = world.segment->nbytes();
    if (random.one_in(8)) total = random.below(2 * total);
    REQUIRE(::ftruncate(fd, static_cast<off_t>(total)) == 0, "ftruncate: %s", std::strerror(errno));
    std::vector<u8> image = world.control;
    for (u64 many = random.below(4); many > 0; --many) {
        u64 width = random.one_in(3) ? 4 : 8;
        u64 from = random.one_in(4) ? 0 : offsetof(Header, shape);
        u64 at = from + random.below((sizeof(Header) - from) / width) * width;
        u64 old = 0;
        std::memcpy(&old, image.data() + at, width);
        u64 value = any_value(random, world.shape(), old);
        std::memcpy(image.data() + at, &value, width);
        progress->mutations.fetch_add(1, RELAXED);
    }
    REQUIRE(::pwrite(fd, image.data(), std::min<u64>(image.size(), total), 0) >= 0, "pwrite: %s", std::strerror(errno));
    if (!random.one_in(16)) ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    std::shared_ptr<Segment> segment;
    int again = ::dup(fd);
    if (!expect_error_or_value("adopt (forged)", [&] { segment = Segment::adopt(fd); })) {
        expect_error_or_value("snapshot (forged)", [&] { snapshot::take(again); });
        return;
    }
    expect_error_or_value("snapshot (forged)", [&] { snapshot::take(again); });
    const Geometry& g = segment->geometry();
    expect_error_or_value("use (forged)", [&] {
        auto by = Attachment::join(segment, "forged");
        if (g.pool != 0) {
            Extent extent;
            if (Pool(*by).try_take(100, extent)) {
                if (g.shape.elsewhere == 0)
                    std::memset(segment->write_at(g.pool_data + extent.offset), 1, extent.nbytes);
                Pool(*by).release(extent.block, extent.generation);
            }
        }
        if (g.shape.buckets != 0) {
            Extent extent;
            u32 fills_before = 0;
            Store store(*by);
            if (store.begin(Key{}, 100, extent, fills_before) == Store::Begun::fill) store.commit(extent);
            Pool(*by).release(extent.block, extent.generation);
            store.remove(nullptr);
        }
        if (g.channel != 0) {
            Sender sender(by, -1);
            auto receiver = std::make_shared<Receiver>(by, -1);
            for (int i = 0; i < 4; ++i) {
                send(sender, random);
                FoundRecord record;
                if (!receiver->try_find(record)) continue;
                read_all(*segment, record.at, record.nbytes);
                receiver->accept(record);
            }
        }
        Tap tap(segment, true);
        look(tap, random);
    });
}

[[noreturn]] void run(const Arguments& arguments, u64 first, u64 mutations, bool is_one) {
    std::vector<std::unique_ptr<World>> worlds;
    worlds.push_back(std::make_unique<World>(channel_shape(ChannelStyle::ring, 1, 1, 4096, 256, 16 << 10, 8, 8)));
    worlds.push_back(std::make_unique<World>(channel_shape(ChannelStyle::broadcast, 1, 3, 4096, 512, 32 << 10, 12, 8)));
    worlds.push_back(std::make_unique<World>(channel_shape(ChannelStyle::inbox, 3, 1, 4096, 256, 16 << 10, 12, 8)));
    worlds.push_back(std::make_unique<World>(pool_shape(32 << 10, 16, 8)));
    Shape growing = channel_shape(ChannelStyle::ring, 1, 1, 4096, 256, 64 << 10, 8, 8);
    growing.granule_nbytes = 4096;
    worlds.push_back(std::make_unique<World>(growing));
    Shape keeping = pool_shape(32 << 10, 16, 8);
    keeping.buckets = 4;
    worlds.push_back(std::make_unique<World>(keeping));
    Shape elsewhere = pool_shape(32ull << 30, 16, 8);
    elsewhere.elsewhere = 1;
    worlds.push_back(std::make_unique<World>(elsewhere));
    Shaker shaker;
    for (u64 round = first;; ++round) {
        progress->round.store(round);
        World& world = *worlds[round % worlds.size()];
        if (round % 7 == 6)
            adopt_anything(world, arguments.seed, round);
        else
            play(world, shaker, arguments.seed, round, !arguments.is_quick && round % 20'000 == 777);
        if (is_one || progress->mutations.load() >= mutations) ::_exit(0);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    u64 only = NEVER;
    for (size_t i = 0; i + 1 < arguments.rest.size(); ++i)
        if (arguments.rest[i] == "--round") only = std::strtoull(arguments.rest[i + 1].c_str(), nullptr, 0);
    u64 mutations = (arguments.is_quick ? 20'000 : 1'000'000) * arguments.scale;
    std::printf("fuzz: seed %" PRIu64 ", %" PRIu64 " mutations\n", arguments.seed, mutations);
    std::fflush(stdout);
    progress =
        new (::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Progress;
    int failures = 0;
    u64 began = now_ns();
    for (u64 first = only == NEVER ? 0 : only; failures < 5;) {
        pid_t child = ::fork();
        if (child == 0) run(arguments, first, mutations, only != NEVER);
        int status = 0;
        u64 last_calls = NEVER, moved_ns = now_ns();
        bool is_hung = false;
        while (::waitpid(child, &status, WNOHANG) == 0) {
            if (u64 at = progress->calls.load(); at != last_calls) last_calls = at, moved_ns = now_ns();
            is_hung = now_ns() - moved_ns > HANG_NS;
            if (is_hung) ::kill(child, SIGABRT);
            ::usleep(is_hung ? 1'000'000 : 2'000);
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
        ++failures;
        std::fprintf(stderr, "fuzz: %s in %s: repeat it with --seed %" PRIu64 " --round %" PRIu64 "\n",
                     is_hung ? "HANG" : how_in_words(1 + static_cast<u32>(status)).c_str(), progress->call.load(),
                     arguments.seed, progress->round.load());
        if (only != NEVER) break;
        first = progress->round.load() + 1;
    }
    static const char* const names[] = {"closed",    "end of channel", "would block", "timeout", "peer died", "memory",
                                        "stale ref", "layout",         "value",       "os",      "corrupt"};
    std::printf("fuzz: %" PRIu64 " rounds, %" PRIu64 " mutations, %" PRIu64 " during calls, %" PRIu64
                " calls in %.1f s: %" PRIu64 " values",
                progress->round.load() + 1, progress->mutations.load(), progress->shakes.load(), progress->calls.load(),
                static_cast<double>(now_ns() - began) / 1e9, progress->values.load());
    for (size_t i = 0; i < std::size(names); ++i)
        if (u64 many = progress->faults[i].load()) std::printf(", %" PRIu64 " %s", many, names[i]);
    std::printf("\n");
    if (only == NEVER && failures == 0) {  // a mutator that breaks nothing tests nothing
        REQUIRE(progress->values.load() > progress->calls.load() / 20, "hardly a call succeeds");
        for (Fault fault : {Fault::stale_ref, Fault::record_corrupt, Fault::layout_mismatch, Fault::memory_exhausted})
            REQUIRE(progress->faults[static_cast<int>(fault)].load() != 0, "no %s", names[static_cast<int>(fault)]);
    }
    return failures == 0 ? 0 : 1;
}
