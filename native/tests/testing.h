// testing.h: what the native tests share: their arguments, a generator that can be seeded, segments to play with.
#pragma once
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cinttypes>
#include <functional>

#include "reap.h"
#include "receiver.h"
#include "sender.h"

#if defined(__SANITIZE_THREAD__)
#define WATCHES_THREADS 1
#else
#define WATCHES_THREADS 0
#endif

namespace testing {

using namespace penstock;

struct Random {  // splitmix64: one word of state, so that any round can be begun again by its number
    u64 state;
    explicit Random(u64 seed) : state(seed) {}
    u64 next() {
        u64 z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    u64 below(u64 n) { return n == 0 ? 0 : next() % n; }
    bool one_in(u64 n) { return below(n) == 0; }
    template <class T, size_t N>
    const T& of(const T (&items)[N]) {
        return items[below(N)];
    }
};

struct Arguments {
    bool is_quick = false;
    u64 seed = 0;
    u64 scale = 1;  // multiplies the work of a whole run
    std::vector<std::string> rest;
    Arguments(int argc, char** argv) {
        const char* variable = std::getenv("PENSTOCK_SEED");
        seed = variable != nullptr ? std::strtoull(variable, nullptr, 0) : now_ns() & 0xffffffff;
        for (int i = 1; i < argc; ++i) {
            std::string word = argv[i];
            if (word == "--quick")
                is_quick = true;
            else if (word == "--seed" && i + 1 < argc)
                seed = std::strtoull(argv[++i], nullptr, 0);
            else if (word == "--scale" && i + 1 < argc)
                scale = std::strtoull(argv[++i], nullptr, 0);
            else
                rest.push_back(word);
        }
    }
};

#define REQUIRE(condition, ...)                                                          \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, "%s\n", ::penstock::format(__VA_ARGS__).c_str());       \
            std::abort();                                                                \
        }                                                                                \
    } while (0)

inline Shape channel_shape(ChannelStyle style, u32 lanes, u32 receivers, u64 lane_nbytes, u64 inline_limit,
                           u64 pool_nbytes, u32 max_blocks, u32 max_peers = 16) {
    Shape shape{};
    shape.kind = static_cast<u32>(SegmentKind::channel);
    shape.max_peers = max_peers;
    shape.max_blocks = max_blocks;
    shape.lanes = lanes;
    shape.receivers = receivers;
    shape.latency = static_cast<u32>(Latency::automatic);
    shape.style = static_cast<u32>(style);
    shape.page = PAGE;
    shape.lane_nbytes = lane_nbytes;
    shape.inline_limit = inline_limit;
    shape.pool_nbytes = pool_nbytes;
    return shape;
}
inline Shape pool_shape(u64 nbytes, u32 max_blocks, u32 max_peers = 16) {
    Shape shape{};
    shape.kind = static_cast<u32>(SegmentKind::pool);
    shape.max_peers = max_peers;
    shape.max_blocks = max_blocks;
    shape.has_grants = 1;
    shape.page = PAGE;
    shape.pool_nbytes = nbytes;
    return shape;
}
inline std::shared_ptr<Segment> create(const Shape& shape, const char* name) {
    auto segment = Segment::create(shape, SegmentOptions{.name = name});
    if (shape.kind == static_cast<u32>(SegmentKind::channel)) Channel::lay_out(*segment);
    return segment;
}
// Another mapping of the same segment, as another process would have it.
inline std::shared_ptr<Segment> map_again(const Segment& segment) {
    int fd = ::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, "dup: %s", std::strerror(errno));
    return Segment::adopt(fd);
}

// Do processes see the same start time of each other as of themselves? Under qemu's user emulation they do not, and all
// take each other for dead; there threads must do.
inline bool knows_others_start() {
    // Who runs us under an emulator says so (scripts/test): its times may agree by chance, to the tick.
    if (std::getenv("PENSTOCK_EMULATED") != nullptr) return false;
    int parent = ::getpid();
    u64 own = read_stat(parent).start;
    pid_t child = ::fork();
    if (child == 0) {
        ::usleep(50'000);  // several ticks, so that the times differ if they are the child's own
        ::_exit(read_stat(parent).start == own ? 0 : 1);
    }
    int status = 1;
    ::waitpid(child, &status, 0);
    return status == 0;
}

// A peer that is gone without having said so: of a process that was, or of one whose pid somebody else has now.
inline u64 identity_of_the_dead() {
    pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    u64 start = read_stat(child).start;
    ::waitpid(child, nullptr, 0);
    return make_identity(PeerState::live, child, start);
}
inline u32 forge_peer(Attachment& by, u64 identity) {
    for (u32 slot = 0; slot < by.shape().max_peers; ++slot) {
        if (by.peer(slot).identity.load(RELAXED) != 0) continue;
        by.peer(slot).identity.store(identity, RELAXED);
        by.peer(slot).epoch.store(1, RELAXED);
        by.segment().header().peers_version.fetch_add(1, order::members.release);
        return slot;
    }
    REQUIRE(false, "no place");
    return 0;
}

// What the byte at `at` of record (or block) `number` is: whoever reads a piece of another one sees it.
inline void fill(u8* to, u64 nbytes, u64 number) {
    u64 word = Random(number).next();
    u64 i = 0;
    for (; i + 8 <= nbytes; i += 8, word += 0x9e3779b97f4a7c15) std::memcpy(to + i, &word, 8);
    if (i < nbytes) std::memcpy(to + i, &word, nbytes - i);
}
inline bool is_filled(const u8* at, u64 nbytes, u64 number) {
    u64 word = Random(number).next();
    u64 i = 0;
    for (; i + 8 <= nbytes; i += 8, word += 0x9e3779b97f4a7c15)
        if (std::memcmp(at + i, &word, 8) != 0) return false;
    return i >= nbytes || std::memcmp(at + i, &word, nbytes - i) == 0;
}

}  // namespace testing
