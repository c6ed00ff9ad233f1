// paged_attention.h: attention of one query token per sequence over a paged KV cache, on CPUs: a decode step.
//
// Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over blocks named by a block table (PagedAttention,
// Kwon et al. 2023, arXiv:2309.06180), with the softmax computed tile by tile as in FlashAttention (Dao et al. 2022,
// arXiv:2205.14135). Threads share out (sequence, KV head) pairs; the keys of one pair are not split among threads, as
// they are in Flash-Decoding (Dao et al. 2023): so the result does not depend on the number of threads.
//
// The kernel is compiled once per instruction set. A file that is compiled for AVX2 may not define an inline function
// that others define, too: the linker could take that copy for every processor. So this header includes no header with
// functions, and the kernel calls only functions of its own, built-in ones, and those that are always inlined.
#pragma once
#include <cstdint>

namespace penstock::engine {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

enum class DType : u8 { float32, bfloat16 };

// Strides are in elements; the elements of one head are contiguous.
struct PagedAttention {
    static constexpr u32 TILE = 32;  // positions: their keys or values of one head stay in the first-level cache
    static constexpr u32 ROOM = 32;  // floats: rows are read in pairs of vectors, of 16 floats at most

    DType dtype;          // of queries, keys, values and out; sums are float32
    const void* queries;  // [num_seqs, num_heads, key_size]
    i64 query_seq_stride, query_head_stride;
    const void* keys;            // [num_blocks * block_size, num_kv_heads, key_size]
    const void* values;          // [num_blocks * block_size, num_kv_heads, value_size]
    void* out;                   // [num_seqs, num_heads, value_size]
    const i32* block_tables;     // [num_seqs, table_width]
    const i64* first_positions;  // per sequence, the first position that its query attends to: above 0 with a window
    const i64* seq_lens;         // per sequence, the first position after the last one that it attends to
    u64 num_seqs, num_heads, num_kv_heads, key_size, value_size, block_size, table_width;
    float scale;
    float softcap;       // scores become tanh(score / softcap) * softcap; 0: they stay
    const float* sinks;  // per query head, a score that is part of the softmax and has no value; nullptr: none

    [[gnu::always_inline]] u64 heads_per_kv_head() const { return num_heads / num_kv_heads; }
    u64 num_pairs() const { return num_seqs * num_kv_heads; }
    u64 positions_of(u64 seq) const { return static_cast<u64>(seq_lens[seq] - first_positions[seq]); }
    u64 positions() const {  // of all sequences
        u64 sum = 0;
        for (u64 seq = 0; seq < num_seqs; ++seq) sum += positions_of(seq);
        return sum;
    }
    u64 longest() const {
        u64 most = 0;
        for (u64 seq = 0; seq < num_seqs; ++seq) most = positions_of(seq) > most ? positions_of(seq) : most;
        return most;
    }
    u64 products() const { return positions() * num_heads * (key_size + value_size); }  // of all pairs
    // Floats of scratch memory that a call needs, for the rows of queries and sums with room at their ends. At the
    // start of a cache line, no vector lies in two lines.
    u64 scratch_size() const {
        return heads_per_kv_head() * TILE + num_heads * (with_room(key_size) + with_room(value_size) + 2);
    }
    [[gnu::always_inline]] static u64 with_room(u64 size) { return (size + ROOM - 1) / ROOM * ROOM; }
};

// Raises std::invalid_argument where a sequence attends to nothing, or to a block that is not there.
void require_positions(const PagedAttention& problem, u64 num_blocks);

// Computes the pairs [first, last); pair = sequence * num_kv_heads + KV head. Nothing is checked. Takes the kernel for
// this processor, which is one of those below.
void paged_attention(const PagedAttention& problem, u64 first, u64 last, float* scratch);

void attend_rows(const PagedAttention& problem, u64 threads);  // all pairs

void paged_attention_portable(const PagedAttention& problem, u64 first, u64 last, float* scratch);
#if defined(__x86_64__)
void paged_attention_avx2(const PagedAttention& problem, u64 first, u64 last, float* scratch);
void paged_attention_avx512(const PagedAttention& problem, u64 first, u64 last, float* scratch);
#endif

}  // namespace penstock::engine
