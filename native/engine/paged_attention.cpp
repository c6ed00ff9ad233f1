// paged_attention.cpp: which kernel of paged_attention.h runs, and what is refused.
#include "paged_attention.h"

#include <stdexcept>

#include "cpu_features.h"
#include "errors.h"
#include "scratch.h"
#include "thread_team.h"

namespace penstock::engine {

void paged_attention(const PagedAttention& problem, u64 first, u64 last, float* scratch) {
#if defined(__x86_64__)
    if (has_avx512()) return paged_attention_avx512(problem, first, last, scratch);
    if (has_avx2()) return paged_attention_avx2(problem, first, last, scratch);
#endif
    paged_attention_portable(problem, first, last, scratch);
}

void attend_rows(const PagedAttention& problem, u64 threads) {
    constexpr u64 MIN_PARALLEL_PRODUCTS = 1 << 18;  // several times what it takes to wake a thread
    if (problem.products() < MIN_PARALLEL_PRODUCTS) threads = 1;
    // KV heads of a sequence are computed together, as their keys lie side by side, unless other threads would wait for
    // a long sequence.
    u64 heads = problem.num_kv_heads, parts = threads < heads ? threads : heads;
    if (problem.num_seqs >= 4 * threads && problem.longest() * threads <= problem.positions()) parts = 1;
    ThreadTeam::get().run(threads, problem.num_seqs * parts, [&](u64 chunk) {
        u64 begin = chunk / parts * heads, part = chunk % parts;
        paged_attention(problem, begin + part * heads / parts, begin + (part + 1) * heads / parts,
                        scratch<PagedAttention, float>(problem.scratch_size()));
    });
}

void require_positions(const PagedAttention& problem, u64 num_blocks) {
    for (u64 seq = 0; seq < problem.num_seqs; ++seq) {
        i64 first = problem.first_positions[seq], end = problem.seq_lens[seq];
        u64 capacity = problem.table_width * problem.block_size;
        if (first < 0 || first >= end || static_cast<u64>(end) > capacity)
            throw std::invalid_argument(format("sequence %llu attends to positions %lld to %lld of %llu",
                                               (unsigned long long)seq, (long long)first, (long long)end,
                                               (unsigned long long)capacity));
        const i32* table = problem.block_tables + seq * problem.table_width;
        u64 last_index = static_cast<u64>(end - 1) / problem.block_size;
        for (u64 index = static_cast<u64>(first) / problem.block_size; index <= last_index; ++index)
            if (table[index] < 0 || static_cast<u64>(table[index]) >= num_blocks)
                throw std::invalid_argument(
                    format("sequence %llu: there is no block %d", (unsigned long long)seq, table[index]));
    }
}

}  // namespace penstock::engine
