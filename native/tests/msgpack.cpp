// msgpack.cpp: every atom that a layout may have, and bytes that nobody wrote: read within their end, or refused.
#include "msgpack.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace penstock;
using enum Atom::Kind;

namespace {

void must(bool is_so, const char* what) {
    if (is_so) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

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
    for (const Case& one : cases) {
        Atom atom;
        Atoms whole(one.bytes.data(), one.bytes.size());
        must(whole.next(atom) && whole.is_at_end(), "an atom was not read to its end");
        must(atom.kind == one.kind && atom.number == one.number, "an atom is another");
        must(atom.kind != real || atom.real == 1.0, "a real number is another");
        must(atom.at == nullptr || *atom.at == 'x', "a text is elsewhere");
        for (size_t cut = 0; cut < one.bytes.size(); ++cut) {
            std::vector<u8> some(one.bytes.begin(), one.bytes.begin() + static_cast<long>(cut));
            must(!Atoms(some.data(), some.size()).next(atom), "an atom was read that is cut off");
        }
    }
}

void whatever_the_bytes_are_nothing_is_read_beyond_them() {
    std::mt19937_64 chance(7);
    for (int round = 0; round < 300'000; ++round) {
        std::vector<u8> some(chance() % 24);  // on the heap, where a sanitizer sees its end
        for (u8& byte : some) byte = static_cast<u8>(chance());
        Atoms atoms(some.data(), some.size());
        Atom atom;
        u64 sum = 0;
        while (atoms.next(atom)) {
            for (u64 i = 0; atom.at != nullptr && i < atom.number; ++i) sum += atom.at[i];
            must(atom.kind != array || atom.at == nullptr, "an array has bytes");
        }
        must(sum != ~u64{0}, "never");
    }
}

}  // namespace

int main() {
    each_kind_is_read_and_is_refused_wherever_it_is_cut_off();
    whatever_the_bytes_are_nothing_is_read_beyond_them();
    std::puts("msgpack: every kind read, 300,000 others within their end");
}
