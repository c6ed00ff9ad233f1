// msgpack.h: decodes the layout of a value, one atom at a time. The caller interprets the atoms.
//
// It reads a copy that no other process can change, and never beyond its end. Maps and extensions, which no layout has,
// are no atoms here: for an error about such bytes the caller runs a slower decoder.
#pragma once
#include <bit>
#include <cstring>

#include "layout.h"

namespace penstock {

struct Atom {
    enum class Kind { nothing, boolean, positive, negative, real, text, bytes, array };
    Kind kind = Kind::nothing;
    u64 number = 0;          // boolean, positive; negative: as i64; array: how many follow; text, bytes: their nbytes
    double real = 0;         //
    const u8* at = nullptr;  // of text and bytes
};

class Atoms {
   public:
    Atoms(const u8* at, u64 nbytes) : at_(at), end_(at + nbytes) {}

    bool is_at_end() const { return at_ == end_; }
    // False: these bytes are no atom, or the last one is cut off. Nothing may be read after that.
    bool next(Atom& out) {
        using enum Atom::Kind;
        u64 head = 0;
        if (!number(1, head)) return false;
        out = {};
        if (head < 0x80) return whole(out, positive, head);
        if (head >= 0xe0) return whole(out, negative, head | ~u64{0xff});
        if (head < 0x90) return false;  // a short map
        if (head < 0xa0) return whole(out, array, head & 0x0f);
        if (head < 0xc0) return run(out, text, head & 0x1f);
        switch (head) {
            case 0xc0: return whole(out, nothing, 0);
            case 0xc2:
            case 0xc3: return whole(out, boolean, head & 1);
            case 0xc4:
            case 0xc5:
            case 0xc6: return number(u64{1} << (head - 0xc4), out.number) && run(out, bytes, out.number);
            case 0xca:
                if (!number(4, out.number)) return false;
                out.real = static_cast<double>(std::bit_cast<float>(static_cast<u32>(out.number)));
                return whole(out, real, 0);
            case 0xcb:
                if (!number(8, out.number)) return false;
                out.real = std::bit_cast<double>(out.number);
                return whole(out, real, 0);
            case 0xcc:
            case 0xcd:
            case 0xce:
            case 0xcf: out.kind = positive; return number(u64{1} << (head - 0xcc), out.number);
            case 0xd0:
            case 0xd1:
            case 0xd2:
            case 0xd3: return with_sign(out, u64{1} << (head - 0xd0));
            case 0xd9:
            case 0xda:
            case 0xdb: return number(u64{1} << (head - 0xd9), out.number) && run(out, text, out.number);
            case 0xdc:
            case 0xdd: out.kind = array; return number(u64{2} << (head - 0xdc), out.number);
            default: return false;
        }
    }

   private:
    static bool whole(Atom& out, Atom::Kind kind, u64 number) {
        out.kind = kind;
        out.number = number;
        return true;
    }
    u64 left() const { return static_cast<u64>(end_ - at_); }
    bool number(u64 nbytes, u64& out) {  // big endian
        if (nbytes > left()) return false;
        out = 0;
        for (u64 i = 0; i < nbytes; ++i) out = out << 8 | *at_++;
        return true;
    }
    bool with_sign(Atom& out, u64 nbytes) {
        if (!number(nbytes, out.number)) return false;
        u64 sign = u64{1} << (8 * nbytes - 1);
        out.kind = (out.number & sign) != 0 ? Atom::Kind::negative : Atom::Kind::positive;
        if (out.kind == Atom::Kind::negative) out.number |= ~(sign - 1);
        return true;
    }
    bool run(Atom& out, Atom::Kind kind, u64 nbytes) {
        if (nbytes > left()) return false;
        out.at = at_;
        at_ += nbytes;
        return whole(out, kind, nbytes);
    }

    const u8* at_;
    const u8* end_;
};

}  // namespace penstock
