// paged_attention_impl.h: the kernel of paged_attention.h: one pass over the keys and values of a KV head with a
// running maximum and a running sum of the softmax (FlashAttention, Dao et al. 2022, arXiv:2205.14135), for all query
// heads of the group at once, so that each tile is read from memory once.
//
// Included by one .cpp per instruction set, which defines PENSTOCK_KERNEL, the function's name, and PENSTOCK_LANES, the
// floats in a vector register. Calls only built-in functions; paged_attention.h says why.
#include "paged_attention.h"
#include "softmax_impl.h"

namespace penstock::engine {
namespace {

// Returns the sum of each of LANES vectors, as one vector: a transposition with additions.
inline Floats sum_each(const Floats* of) {
#if PENSTOCK_LANES == 16
    Floats pairs[8], fours[4], halves[2];
    for (u64 i = 0; i < 8; ++i)
        pairs[i] =
            PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
            PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (u64 i = 0; i < 4; ++i)
        fours[i] =
            PENSTOCK_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
            PENSTOCK_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                             31);
    for (u64 i = 0; i < 2; ++i)  // parts 0 and 2 of both vectors, and parts 1 and 3; a part has four lanes
        halves[i] =
            PENSTOCK_SHUFFLE(fours[2 * i], fours[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
            PENSTOCK_SHUFFLE(fours[2 * i], fours[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                             31);
    return PENSTOCK_SHUFFLE(halves[0], halves[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PENSTOCK_SHUFFLE(halves[0], halves[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif PENSTOCK_LANES == 8
    Floats pairs[4], fours[2];
    for (u64 i = 0; i < 4; ++i)
        pairs[i] = PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (u64 i = 0; i < 2; ++i)
        fours[i] = PENSTOCK_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   PENSTOCK_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PENSTOCK_SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           PENSTOCK_SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    Floats pairs[2];
    for (u64 i = 0; i < 2; ++i)
        pairs[i] = PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 0, 4, 2, 6) +
                   PENSTOCK_SHUFFLE(of[2 * i], of[2 * i + 1], 1, 5, 3, 7);
    return PENSTOCK_SHUFFLE(pairs[0], pairs[1], 0, 1, 4, 5) + PENSTOCK_SHUFFLE(pairs[0], pairs[1], 2, 3, 6, 7);
#endif
}

// scores[i] = the dot product of the query and keys[i].
inline void compute_scores(float* scores, const float* query, const float* const* keys, u64 count, u64 size) {
    u64 whole = size - size % LANES, begin = 0;
    for (; begin + LANES <= count; begin += LANES) {
        Floats sums[LANES] = {};
        for (u64 k = 0; k < whole; k += LANES) {
            Floats part = load(query + k);
            for (u64 i = 0; i < LANES; ++i) sums[i] += part * load(keys[begin + i] + k);
        }
        store(scores + begin, sum_each(sums));
    }
    for (u64 i = begin; i < count; ++i) {
        Floats sum = {};
        for (u64 k = 0; k < whole; k += LANES) sum += load(query + k) * load(keys[i] + k);
        scores[i] = sum_lanes(sum);
    }
    if (whole != size)
        for (u64 i = 0; i < count; ++i)
            for (u64 k = whole; k < size; ++k) scores[i] += query[k] * keys[i][k];
}

// out[size] = out * rescale + the sum of weights[i] * values[i].
inline void accumulate(float* out, float rescale, const float* weights, const float* const* values, u64 count,
                       u64 size) {
    u64 k = 0;
    for (; k + 4 * LANES <= size; k += 4 * LANES) {
        Floats sums[4];
        for (u64 part = 0; part < 4; ++part) sums[part] = load(out + k + part * LANES) * rescale;
        for (u64 i = 0; i < count; ++i)
            for (u64 part = 0; part < 4; ++part) sums[part] += load(values[i] + k + part * LANES) * weights[i];
        for (u64 part = 0; part < 4; ++part) store(out + k + part * LANES, sums[part]);
    }
    for (; k + LANES <= size; k += LANES) {
        Floats sum = load(out + k) * rescale;
        for (u64 i = 0; i < count; ++i) sum += load(values[i] + k) * weights[i];
        store(out + k, sum);
    }
    for (; k < size; ++k) {
        float sum = out[k] * rescale;
        for (u64 i = 0; i < count; ++i) sum += values[i][k] * weights[i];
        out[k] = sum;
    }
}

inline u16 to_bfloat16(float number) {  // rounds to nearest, ties to even
    u32 bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<u16>(bits >> 16 | 0x40);  // NaN stays NaN
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(u16 number) {
    u32 bits = u32{number} << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}
inline void from_bfloat16(float* out, const u16* numbers, u64 count) {
    for (u64 i = 0; i < count; ++i) out[i] = from_bfloat16(numbers[i]);
}

// Finds the keys (or values) of `count` positions of a KV head through the block table: rows[i] points into the cache,
// or, of bfloat16, into the tile, which holds them as float32.
inline void gather(const PagedAttention& p, const i32* table, const void* cache, u64 size, u64 kv_head, u64 position,
                   u64 count, float* tile, const float** rows) {
    u64 index = position / p.block_size, within = position % p.block_size, stride = p.num_kv_heads * size;
    for (u64 i = 0; i < count; within = 0, ++index) {
        u64 offset = ((static_cast<u64>(table[index]) * p.block_size + within) * p.num_kv_heads + kv_head) * size;
        u64 until = count - i < p.block_size - within ? count : i + p.block_size - within;
        for (; i < until; ++i, offset += stride) {
            if (p.dtype == DType::float32) {
                rows[i] = static_cast<const float*>(cache) + offset;
            } else {
                from_bfloat16(tile + i * size, static_cast<const u16*>(cache) + offset, size);
                rows[i] = tile + i * size;
            }
        }
    }
}

// Reads a byte of each cache line of keys (or values) of the KV heads [first, last), in the order in which they lie in
// memory: so the processor's own prefetcher reads ahead. The rows of one head alone lie apart, and waited for two dozen
// lines at a time: with prefetch instructions, a step of 8 rows and 2,048 positions took 1.4 times as long.
inline void fetch(const PagedAttention& p, const i32* table, const void* cache, u64 size, u64 first, u64 last,
                  u64 position, u64 end) {
    u64 nbytes = size * (p.dtype == DType::float32 ? sizeof(float) : sizeof(u16));
    u64 sink = 0, index = position / p.block_size, within = position % p.block_size;
    while (position < end) {
        u64 count = end - position < p.block_size - within ? end - position : p.block_size - within;
        u64 place = static_cast<u64>(table[index]) * p.block_size + within;
        const u8* row = static_cast<const u8*>(cache) + (place * p.num_kv_heads + first) * nbytes;
        for (u64 i = 0; i < count; ++i, row += p.num_kv_heads * nbytes)
            for (u64 line = 0; line < (last - first) * nbytes; line += 64) sink += row[line];
        position += count, within = 0, ++index;
    }
    __asm__ volatile("" : : "r"(sink));
}

// All query heads of the KV heads [first, last) of one sequence. A tile of positions is computed for all of them before
// the next one: their keys lie side by side, and share the pages of memory.
void compute_heads(const PagedAttention& p, u64 seq, u64 first, u64 last, float* scratch) {
    u64 group = p.heads_per_kv_head(), first_head = first * group, num_heads = (last - first) * group;
    float* tile = scratch;
    float* queries = tile + p.tile_size();                  // [num_heads, key_size], scaled
    float* sums = queries + num_heads * p.key_size;         // [num_heads, value_size], of weights times values
    float* scores = sums + num_heads * p.value_size;        // [group, TILE]
    float* maxima = scores + group * PagedAttention::TILE;  // [num_heads], the greatest score so far
    float* weights = maxima + num_heads;                    // [num_heads], the sum of exp(score - maximum) so far
    const float* rows[PagedAttention::TILE];
    const i32* table = p.block_tables + seq * p.table_width;

    for (u64 i = 0; i < num_heads; ++i) {
        i64 offset =
            static_cast<i64>(seq) * p.query_seq_stride + static_cast<i64>(first_head + i) * p.query_head_stride;
        float* query = queries + i * p.key_size;
        if (p.dtype == DType::float32)
            __builtin_memcpy(query, static_cast<const float*>(p.queries) + offset, p.key_size * sizeof(float));
        else
            from_bfloat16(query, static_cast<const u16*>(p.queries) + offset, p.key_size);
        for (u64 k = 0; k < p.key_size; ++k) query[k] *= p.scale;
        for (u64 k = 0; k < p.value_size; ++k) sums[i * p.value_size + k] = 0.0f;
        maxima[i] = p.sinks == nullptr ? NO_SCORE : p.sinks[first_head + i];
        weights[i] = p.sinks == nullptr ? 0.0f : 1.0f;
    }
    constexpr u64 TILE = PagedAttention::TILE, FETCHED = 4 * TILE;
    u64 end = static_cast<u64>(p.seq_lens[seq]), begin = static_cast<u64>(p.first_positions[seq]);
    auto least = [](u64 left, u64 right) { return left < right ? left : right; };
    for (u64 position = begin; position < end; position += TILE) {
        u64 count = least(end - position, TILE);
        if ((position - begin) % FETCHED == 0) {
            fetch(p, table, p.keys, p.key_size, first, last, position, least(position + FETCHED, end));
            fetch(p, table, p.values, p.value_size, first, last, position, least(position + FETCHED, end));
        }
        for (u64 kv_head = first; kv_head < last; ++kv_head) {
            u64 head_begin = (kv_head - first) * group;
            gather(p, table, p.keys, p.key_size, kv_head, position, count, tile, rows);
            for (u64 i = 0; i < group; ++i)
                compute_scores(scores + i * TILE, queries + (head_begin + i) * p.key_size, rows, count, p.key_size);
            gather(p, table, p.values, p.value_size, kv_head, position, count, tile, rows);
            for (u64 i = 0; i < group; ++i) {
                u64 head = head_begin + i;
                float* head_scores = scores + i * TILE;
                if (p.softcap != 0.0f) cap_scores(head_scores, (count + LANES - 1) / LANES * LANES, 1.0f, p.softcap);
                float max = find_max(head_scores, count, maxima[head]);
                float rescale = exp_nonpositive(maxima[head] - max);  // the sums so far are relative to the old maximum
                maxima[head] = max;
                weights[head] = weights[head] * rescale + exponentiate(head_scores, count, max);
                accumulate(sums + head * p.value_size, rescale, head_scores, rows, count, p.value_size);
            }
        }
    }
    for (u64 i = 0; i < num_heads; ++i) {
        u64 offset = (seq * p.num_heads + first_head + i) * p.value_size;
        for (u64 k = 0; k < p.value_size; ++k) {
            float number = sums[i * p.value_size + k] / weights[i];
            if (p.dtype == DType::float32)
                static_cast<float*>(p.out)[offset + k] = number;
            else
                static_cast<u16*>(p.out)[offset + k] = to_bfloat16(number);
        }
    }
}

}  // namespace

void PENSTOCK_KERNEL(const PagedAttention& problem, u64 first, u64 last, float* scratch) {
    while (first < last) {
        u64 seq = first / problem.num_kv_heads, begin = seq * problem.num_kv_heads;
        u64 end = begin + problem.num_kv_heads < last ? begin + problem.num_kv_heads : last;
        compute_heads(problem, seq, first - begin, end - begin, scratch);
        first = end;
    }
}

}  // namespace penstock::engine
