// scratch.h: memory that a thread keeps from one call to the next, as a step calls a hundred kernels.
#pragma once
#include <memory>
#include <new>

#include "paged_attention.h"

namespace penstock::engine {

// Returns room for `size` elements at the start of a cache line. Each `Owner` has memory of its own.
template <class Owner, class Element>
Element* scratch(u64 size) {
    constexpr std::align_val_t CACHE_LINE{64};
    struct Free {
        void operator()(Element* at) const { ::operator delete(at, CACHE_LINE); }
    };
    thread_local std::unique_ptr<Element, Free> kept;
    thread_local u64 kept_size = 0;
    if (kept_size < size) {
        kept.reset();
        kept_size = 0;  // in case there is no memory for more
        kept.reset(static_cast<Element*>(::operator new(size * sizeof(Element), CACHE_LINE)));
        kept_size = size;
    }
    return kept.get();
}

}  // namespace penstock::engine
