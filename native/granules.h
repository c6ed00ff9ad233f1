// granules.h: which pages of a pool that grows are claimed: a bit for each granule of its bytes.
#pragma once
#include "points.h"
#include "segment.h"

namespace penstock {

// Offsets are in the pool. Of a pool that was claimed at creation everything is claimed.
//
// Several peers may claim the same granule at once: fallocate is idempotent, and a call that fails, or is killed in its
// middle, takes back only pages that it has added. A peer that dies before it sets the bit leaves pages that the next
// one claims again. Only trim() clears bits, of granules that it has taken as a block.
class Granules {
   public:
    explicit Granules(Segment& segment)
        : segment_(segment), geometry_(segment.geometry()), granule_(geometry_.shape.granule_nbytes) {}

    bool are_claimed(u64 offset, u64 nbytes) const {
        if (granule_ == 0 || nbytes == 0) return true;
        u64 last = (offset + nbytes - 1) / granule_;
        for (u64 i = offset / granule_; i <= last; ++i)
            if (!is_claimed(i)) return false;
        return true;
    }
    // So many bytes from the start of the pool are claimed.
    u64 claimed_from_start() const {
        u64 nbytes = geometry_.shape.pool_nbytes;
        if (granule_ == 0) return nbytes;
        u64 i = 0;
        while (i * granule_ < nbytes && is_claimed(i)) ++i;
        return std::min(i * granule_, nbytes);
    }
    // Throws MemoryExhausted where there is no memory for them; some may be claimed then.
    void claim(u64 offset, u64 nbytes) {
        if (granule_ == 0 || nbytes == 0) return;
        for (u64 i = offset / granule_, last = (offset + nbytes - 1) / granule_; i <= last; ++i) {
            if (is_claimed(i)) continue;
            u64 until = i + 1;
            while (until <= last && !is_claimed(until)) ++until;
            u64 end = std::min(until * granule_, geometry_.trace - geometry_.pool_data);
            claim_pages(segment_.fd(), geometry_.pool_data + i * granule_, end - i * granule_,
                        ("more memory for '" + segment_.name() + "'").c_str(), spared());
            PENSTOCK_POINT("pool.claiming");
            for (; i < until; ++i)
                if ((word(i).fetch_or(bit(i), order::granules.acq_rel) & bit(i)) == 0)
                    head().claimed_nbytes.fetch_add(granule_, RELAXED);
            --i;
        }
    }
    // Whether the granule was claimed; it counts as claimed no longer.
    bool forget(u64 i) { return (word(i).fetch_and(~bit(i), order::granules.acq_rel) & bit(i)) != 0; }
    void restore(u64 i) { word(i).fetch_or(bit(i), order::granules.acq_rel); }

   private:
    // A store fills up as a matter of course. It stops before other processes find no memory and the kernel kills them.
    u64 spared() const {
        return geometry_.shape.buckets == 0 ? 0 : std::min(geometry_.shape.pool_nbytes / 16, SPARED_NBYTES);
    }
    PoolHeader& head() const { return *segment_.at<PoolHeader>(geometry_.pool); }
    Shared<u64>& word(u64 i) const { return head().granules[i / 64]; }
    static u64 bit(u64 i) { return 1ull << (i % 64); }
    bool is_claimed(u64 i) const { return (word(i).load(order::granules.acquire) & bit(i)) != 0; }

    static constexpr u64 SPARED_NBYTES = 256 << 20;

    Segment& segment_;
    const Geometry& geometry_;
    u64 granule_;
};

}  // namespace penstock
