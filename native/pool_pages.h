// pool_pages.h: which pages of a pool that grows are claimed: a bit for each granule. Part of pool.h.
#pragma once
#include "pool.h"

namespace penstock {

inline bool Pool::is_claimed(u64 offset, u64 nbytes) const {
    if (geometry_.shape.granule_nbytes == 0 || nbytes == 0) return true;
    u64 last = (offset + nbytes - 1) / geometry_.shape.granule_nbytes;
    for (u64 i = offset / geometry_.shape.granule_nbytes; i <= last; ++i)
        if ((head_.granules[i / 64].load(order::granules.acquire) >> (i % 64) & 1) == 0) return false;
    return true;
}
// Two takers may claim the same piece at once: claiming is idempotent, and a piece is only ever given back by
// a peer that has taken all of it as a block.
inline void Pool::claim(const Extent& extent, u64 nbytes) {
    u64 granule = geometry_.shape.granule_nbytes;
    if (granule == 0) return;
    u64 first = extent.offset / granule, last = (extent.offset + nbytes - 1) / granule;
    for (u64 i = first; i <= last; ++i) {
        if ((head_.granules[i / 64].load(order::granules.acquire) >> (i % 64) & 1) != 0) continue;
        u64 until = i + 1;
        while (until <= last && (head_.granules[until / 64].load(order::granules.acquire) >> (until % 64) & 1) == 0)
            ++until;
        try {
            u64 end = std::min(until * granule, geometry_.trace - geometry_.pool_data);
            claim_pages(attachment_.segment().fd(), geometry_.pool_data + i * granule, end - i * granule,
                        "growing a pool");
        } catch (...) {
            head_.exhaustions.add();
            release(extent.block, extent.generation);
            throw;
        }
        PENSTOCK_POINT("pool.claiming");
        for (; i < until; ++i) {
            u64 bit = 1ull << (i % 64);
            if ((head_.granules[i / 64].fetch_or(bit, order::granules.acq_rel) & bit) == 0)
                head_.claimed_nbytes.fetch_add(granule, RELAXED);
        }
        --i;
    }
}
// Gives the machine back the pages of what is free in a pool that grows, beyond `keep`. Taken as a block meanwhile,
// so that no other peer can be using them.
inline u64 Pool::trim(u64 keep) {
    if (geometry_.shape.granule_nbytes == 0) return 0;
    u64 punched = 0, granule = geometry_.shape.granule_nbytes;
    int failed = 0;
    while (head_.claimed_nbytes.load(RELAXED) > keep) {
        Extent whole;
        u64 largest = stats().largest_free_nbytes / LINE * LINE;
        if (largest < 2 * granule) break;
        bool was_claimed = false;
        if (!try_take(largest, whole, NEVER, false)) break;
        u64 from = std::max(round_up(whole.offset, granule), round_up(keep, granule)),
            to = (whole.offset + largest) / granule;
        for (u64 i = from / granule; i < to; ++i) {
            u64 bit = 1ull << (i % 64);
            if ((head_.granules[i / 64].fetch_and(~bit, order::granules.acq_rel) & bit) == 0) continue;
            do
                failed =
                    ::fallocate(attachment_.segment().fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                static_cast<off_t>(geometry_.pool_data + i * granule), static_cast<off_t>(granule)) != 0
                        ? errno
                        : 0;
            while (failed == EINTR);
            if (failed != 0) {
                head_.granules[i / 64].fetch_or(bit, order::granules.acq_rel);
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
