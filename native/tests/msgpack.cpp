// msgpack.cpp: every atom that a layout may have, and bytes that nobody wrote: read within their end, or refused.
//
//   msgpack                     300,000 times bytes that nobody wrote
//   msgpack --quick             30,000
#include "msgpack.h"

#include "testing.h"

using namespace testing;
using enum Atom::Kind;

namespace {

struct Case {
    std::vector<u8> bytes;
    Atom::Kind kind;
    u64 number;
};

void each_kind_is_read_and_is_refused_wherever_it_is_cut_off() {
    const std::vector<Case> cases = {
        {{0x7f}, positive, 127},
        {{0xff}, negative, ~u64{0}},
        {{0xe0}, negative, static_cast<u64>(-32)},
        {{0xc0}, nothing, 0},
        {{0xc2}, boolean, 0},
        {{0xc3}, boolean, 1},
        {{0xcc, 0xff}, positive, 255},
        {{0xcd, 1, 2}, positive, 0x102},
        {{0xce, 1, 2, 3, 4}, positive, 0x1020304},
        {{0xcf, 0xff, 0, 0, 0, 0, 0, 0, 1}, positive, 0xff00000000000001},
        {{0xd0, 0x80}, negative, static_cast<u64>(-128)},
        {{0xd0, 0x7f}, positive, 127},
        {{0xd1, 0xff, 0xfe}, negative, static_cast<u64>(-2)},
        {{0xd2, 0x80, 0, 0, 0}, negative, static_cast<u64>(-(i64{1} << 31))},
        {{0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0}, negative, u64{1} << 63},
        {{0x92}, array, 2},
        {{0xdc, 1, 0}, array, 256},
        {{0xdd, 0, 1, 0, 0}, array, 65536},
        {{0xa1, 'x'}, text, 1},
        {{0xd9, 1, 'x'}, text, 1},
        {{0xda, 0, 1, 'x'}, text, 1},
        {{0xdb, 0, 0, 0, 1, 'x'}, text, 1},
        {{0xc4, 1, 'x'}, bytes, 1},
        {{0xc5, 0, 1, 'x'}, bytes, 1},
        {{0xc6, 0, 0, 0, 1, 'x'}, bytes, 1},
        {{0xca, 0x3f, 0x80, 0, 0}, real, 0},
        {{0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0}, real, 0},
    };
    for (const Case& test_case : cases) {
        Atom atom;
        Atoms whole(test_case.bytes.data(), test_case.bytes.size());
        u32 first = test_case.bytes[0];
        REQUIRE(whole.next(atom) && whole.is_at_end(), "atom %02x was not read to its end", first);
        REQUIRE(atom.kind == test_case.kind && atom.number == test_case.number, "atom %02x is another", first);
        REQUIRE(atom.kind != real || atom.real == 1.0, "atom %02x is %g", first, atom.real);
        REQUIRE(atom.at == nullptr || *atom.at == 'x', "the text of atom %02x is elsewhere", first);
        for (size_t cut = 0; cut < test_case.bytes.size(); ++cut) {
            std::vector<u8> some(test_case.bytes.begin(), test_case.bytes.begin() + static_cast<long>(cut));
            REQUIRE(!Atoms(some.data(), some.size()).next(atom), "atom %02x was read, cut off at %zu", first, cut);
        }
    }
}

void whatever_the_bytes_are_nothing_is_read_beyond_them(u64 seed, u64 rounds) {
    Random random(seed);
    for (; rounds != 0; --rounds) {
        std::vector<u8> some(random.below(24));  // on the heap, where a sanitizer sees its end
        for (u8& byte : some) byte = static_cast<u8>(random.next());
        Atoms atoms(some.data(), some.size());
        Atom atom;
        u64 sum = 0;
        while (atoms.next(atom)) {
            for (u64 i = 0; atom.at != nullptr && i < atom.number; ++i) sum += atom.at[i];
            REQUIRE(atom.kind != array || atom.at == nullptr, "an array has bytes, seed %" PRIu64, seed);
        }
        REQUIRE(sum != ~u64{0}, "never");
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    u64 rounds = arguments.is_quick ? 30'000 : 300'000;
    std::printf("msgpack: seed %" PRIu64 "\n", arguments.seed);
    std::fflush(stdout);
    each_kind_is_read_and_is_refused_wherever_it_is_cut_off();
    whatever_the_bytes_are_nothing_is_read_beyond_them(arguments.seed, rounds);
    std::printf("every kind read, %" PRIu64 " others within their end\n", rounds);
    return 0;
}
