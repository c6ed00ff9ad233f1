// pool_pages.h: pages of a pool that grows: claimed for a block, given back to the machine. Part of pool.h.
#pragma once
#include "pool.h"

namespace penstock {

inline bool Pool::is_claimed(u64 offset, u64 nbytes) const {
    return Granules(attachment_.segment()).are_claimed(offset, nbytes);
}
inline u64 Pool::claimed_from_start() const { return Granules(attachment_.segment()).claimed_from_start(); }
inline void Pool::claim(const Extent& extent, u64 nbytes) {
    try {
        Granules(attachment_.segment()).claim(extent.offset, nbytes);
    } catch (...) {
        head_.exhaustions.add();
        fruitless_returns_.add();
        release(extent.block, extent.generation);
        throw;
    }
}
// Gives the machine back the pages of what is free in a pool that grows, beyond `keep`. Taken as a block meanwhile,
// so that no other peer can be using them.
inline u64 Pool::trim(u64 keep) {
    if (geometry_.shape.granule_nbytes == 0) return 0;
    u64 punched = 0, granule = geometry_.shape.granule_nbytes;
    Granules granules(attachment_.segment());
    int failed = 0;
    while (head_.claimed_nbytes.load(RELAXED) > keep) {
        Extent whole;
        u64 largest = stats().largest_free_nbytes / LINE * LINE;
        if (largest < 2 * granule) break;
        bool was_claimed = false;
        if (!try_take(largest, whole, NEVER, NEVER, false)) break;
        u64 from = std::max(round_up(whole.offset, granule), round_up(keep, granule)),
            to = (whole.offset + largest) / granule;
        for (u64 i = from / granule; i < to; ++i) {
            if (!granules.forget(i)) continue;
            do
                failed =
                    ::fallocate(attachment_.segment().fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                static_cast<off_t>(geometry_.pool_data + i * granule), static_cast<off_t>(granule)) != 0
                        ? errno
                        : 0;
            while (failed == EINTR);
            if (failed != 0) {
                granules.restore(i);
                break;
            }
            head_.claimed_nbytes.fetch_sub(granule, RELAXED);
            punched += granule;
            was_claimed = true;
        }
        release(whole.block, whole.generation);
        if (failed != 0)
            throw os_error("giving memory of '" + attachment_.segment().name() + "' back", "fallocate", failed);
        if (!was_claimed) break;
    }
    return punched;
}

}  // namespace penstock
