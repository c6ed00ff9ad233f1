// pool_grants.h: grants of blocks: made, used by an open, taken back. Part of pool.h.
#pragma once
#include "pool.h"

namespace penstock {

inline bool Pool::has_right(u32 index, u32 slot) const {
    if (held(index)[slot].load(RELAXED) != 0) return true;
    for (u32 from = 0; from < geometry_.shape.max_peers; ++from)
        if (grants(index, from)[slot].load(RELAXED) != 0) return true;
    return false;
}
inline bool Pool::use_grant(u32 index) {
    if (geometry_.shape.has_grants == 0) return false;
    Shared<u32>& units = block(index).grant_units;
    for (u32 from = 0; from < geometry_.shape.max_peers && units.load(RELAXED) != 0; ++from) {
        Shared<u16>& grant = grants(index, from)[attachment_.slot()];
        u16 many = grant.load(RELAXED);
        if (many == 0) continue;
        Shared<u32>& own = held(index)[attachment_.slot()];
        own.store(own.load(RELAXED) + 1, RELAXED);
        PENSTOCK_POINT("open.half");
        grant.store(static_cast<u16>(many - 1), RELAXED);
        units.store(units.load(RELAXED) - 1, RELAXED);
        return true;
    }
    return false;
}
inline void Pool::open(const Extent& ref) {
    attachment_.refresh();
    Held guard(*this, checked(ref));
    require(ref);
    if (use_grant(ref.block)) return;
    Shared<u32>& own = held(ref.block)[attachment_.slot()];
    own.store(own.load(RELAXED) + 1, RELAXED);
}

inline void Pool::require_right(const Extent& ref) {
    if (geometry_.shape.has_grants == 0)
        throw Error(Fault::value, "this pool belongs to a channel: only the channel grants its blocks");
    if (!has_right(ref.block, attachment_.slot()))
        throw stale(ref, "is not held by this peer, which so has nothing to share");
}
inline void Pool::add_grant(const Extent& ref, u32 to) {
    Shared<u16>& many = grants(ref.block, attachment_.slot())[to];
    if (many.load(RELAXED) == 0xffff)
        throw Error(Fault::memory_exhausted,
                    format("65535 grants of block %u to %s are unused", ref.block, attachment_.describe(to).c_str()))
            .with("requested", 1)
            .with("free", 0);
    Shared<u32>& units = block(ref.block).grant_units;
    units.store(units.load(RELAXED) + 1, RELAXED);  // derived: may be too high, never too low
    PENSTOCK_POINT("share.half");
    many.store(static_cast<u16>(many.load(RELAXED) + 1), RELAXED);
}
inline void Pool::take_grant_back(u32 index, u32 to) {
    Shared<u16>& many = grants(index, attachment_.slot())[to];
    many.store(static_cast<u16>(many.load(RELAXED) - 1), RELAXED);
    Shared<u32>& units = block(index).grant_units;
    units.store(units.load(RELAXED) - 1, RELAXED);
}
inline u32 Pool::grant_all(const Extent& ref, const std::vector<u32>& to, bool passes_over_dead) {
    if (to.empty()) return 0;
    attachment_.refresh();
    Held guard(*this, checked(ref));
    require(ref);
    require_right(ref);
    std::vector<u32> granted;
    granted.reserve(to.size());
    try {
        for (u32 p : to) {
            if (attachment_.is_live(p)) {  // under the lock: its reaper clears its grants after
                add_grant(ref, p);
                granted.push_back(p);
            } else if (!passes_over_dead) {
                throw Error(Fault::peer_died,
                            format("no grant to %s", p < geometry_.shape.max_peers ? attachment_.describe(p).c_str()
                                                                                   : "a peer that does not exist"));
            }
        }
    } catch (...) {
        for (u32 p : granted) take_grant_back(ref.block, p);
        throw;
    }
    return static_cast<u32>(granted.size());
}
inline u32 Pool::grant_all(const Extent& ref) {
    std::vector<u32> others;
    for (u32 p = 0; p < geometry_.shape.max_peers; ++p)
        if (p != attachment_.slot()) others.push_back(p);
    return grant_all(ref, others, true);
}
inline bool Pool::revoke(const Extent& ref, u32 to) {
    bool is_last = false;
    {
        Held guard(*this, checked(ref));
        require(ref);
        if (geometry_.shape.has_grants == 0 || to >= geometry_.shape.max_peers) return false;
        if (grants(ref.block, attachment_.slot())[to].load(RELAXED) == 0) return false;
        take_grant_back(ref.block, to);
        is_last = return_if_last(ref.block);
    }
    if (is_last) announce_return();
    return true;
}
inline u32 Pool::unused_grants(const Extent& ref, u32 to) {
    Held guard(*this, checked(ref));
    require(ref);
    if (geometry_.shape.has_grants == 0 || to >= geometry_.shape.max_peers) return 0;
    return grants(ref.block, attachment_.slot())[to].load(RELAXED);
}

}  // namespace penstock
