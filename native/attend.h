// attend.h: what rows of vectors see of each other: for each query the softmax of its products with keys, and the
// values weighted by that. Keys and values lie in blocks that a table names, so nothing is put together to be
// multiplied. Whoever calls divides the work: a pair of a row and a group comes out the same, whoever computes others.
#pragma once
#include "attending.h"
#include "errors.h"

namespace penstock {

inline void attend(const Attending& asked, u64 first, u64 last, float* scratch) {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2) return attend_with_avx2(asked, first, last, scratch);
#endif
    attend_plainly(asked, first, last, scratch);
}

// Of so many parts that have about as much to do, the first pair of this one.
inline u64 first_pair(const Attending& asked, u64 part, u64 parts) {
    u64 all = 0;
    for (u64 row = 0; row < asked.rows; ++row) all += static_cast<u64>(asked.lengths[row] - asked.firsts[row]);
    u64 before = all * asked.groups / parts * part, seen = 0;
    if (part == parts) return asked.rows * asked.groups;
    for (u64 row = 0; row < asked.rows; ++row) {
        u64 each = static_cast<u64>(asked.lengths[row] - asked.firsts[row]);
        if (seen + each * asked.groups > before) return row * asked.groups + (before - seen) / each;
        seen += each * asked.groups;
    }
    return asked.rows * asked.groups;
}

// Raises where a row sees nothing, or looks for something that is not there.
inline void require_positions(const Attending& asked, u64 blocks) {
    for (u64 row = 0; row < asked.rows; ++row) {
        i64 first = asked.firsts[row], length = asked.lengths[row];
        if (first < 0 || first >= length || static_cast<u64>(length) > asked.width * asked.block_size)
            throw Error(Fault::value,
                        format("row %llu sees %lld to %lld, of %llu", (unsigned long long)row, (long long)first,
                               (long long)length, (unsigned long long)(asked.width * asked.block_size)));
        const i32* table = asked.table + row * asked.width;
        for (u64 at = static_cast<u64>(first) / asked.block_size; at <= static_cast<u64>(length - 1) / asked.block_size;
             ++at)
            if (table[at] < 0 || static_cast<u64>(table[at]) >= blocks)
                throw Error(Fault::value, format("row %llu: there is no block %d", (unsigned long long)row, table[at]));
    }
}

}  // namespace penstock
