// scratch.h: memory that a thread keeps from one call to the next, as a step calls a hundred kernels.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "paged_attention.h"

namespace penstock::engine {

// Returns room for `size` elements at the start of a cache line. Each `Owner` has memory of its own. Much memory lies
// in large pages where the kernel has any.
template <class Owner, class Element>
Element* scratch(u64 size) {
    constexpr u64 CACHE_LINE = 64, LARGE_PAGE = 1 << 21;
    struct Free {
        void operator()(Element* at) const { std::free(at); }
    };
    thread_local std::unique_ptr<Element, Free> memory;
    thread_local u64 room = 0;
    if (room < size) {
        memory.reset();
        room = 0;  // in case there is no memory for more
        u64 unit = size * sizeof(Element) < LARGE_PAGE ? CACHE_LINE : LARGE_PAGE;
        u64 nbytes = (size * sizeof(Element) + unit - 1) / unit * unit;
        memory.reset(static_cast<Element*>(std::aligned_alloc(unit, nbytes)));
        if (!memory) throw std::bad_alloc();
        if (unit == LARGE_PAGE) ::madvise(memory.get(), nbytes, MADV_HUGEPAGE);
        room = size;
    }
    return memory.get();
}

}  // namespace penstock::engine
