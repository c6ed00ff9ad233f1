// attending.h: what is asked of attend.h, and who does it on which processors. Without a function of the standard
// library: these files are compiled for some processors only, and an inline one could be linked into what runs on all
// of them.
#pragma once
#include "layout.h"

namespace penstock {

enum class Number : u8 { float32, bfloat16 };

// Strides are in numbers; what has one head lies together.
struct Attending {
    static constexpr u32 TOGETHER = 128;  // positions: their keys and values of one head stay in the second cache

    Number number;        // of queries, keys, values and what comes out; sums are float32
    const void* queries;  // [rows, heads, key_size]
    i64 query_row, query_head;
    const void* keys;    // [blocks * block_size, groups, key_size]
    const void* values;  // [blocks * block_size, groups, value_size]
    void* out;           // [rows, heads, value_size]
    const i32* table;    // [rows, width]
    const i64* firsts;   // per row, the first position that it sees
    const i64* lengths;  // per row, the first that it does not see
    u64 rows, heads, groups, key_size, value_size, block_size, width;
    float scale;
    float cap;           // scores are pulled below it; 0: they are not
    const float* sinks;  // per head, a score that takes its share and has no value; nullptr: there is none

    u64 shared() const { return heads / groups; }  // heads to a group
    // Numbers of float32 that a call needs.
    u64 scratch() const {
        u64 tile = number == Number::float32 ? 0 : TOGETHER * (key_size > value_size ? key_size : value_size);
        return shared() * (key_size + value_size + TOGETHER + 2) + tile;
    }
};

// Pairs [first, last) of rows and groups: row * groups + group. Nothing is checked here.
void attend_plainly(const Attending& asked, u64 first, u64 last, float* scratch);
#if defined(__x86_64__)
void attend_with_avx2(const Attending& asked, u64 first, u64 last, float* scratch);
#endif

}  // namespace penstock
