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

// A row is read in pairs of vectors. Of bfloat16 the first vector has the elements at even places, and the second those
// at odd ones, as a shift and a mask widen them in place: queries, keys and values have the same order, and only the
// result has to be put in order again.
constexpr u64 PAIR = 2 * LANES;  // elements

struct Float32Pairs {
    using Element = float;
    static void load(const float* at, Floats* pair) {
        pair[0] = Float32::load(at), pair[1] = Float32::load(at + LANES);
    }
    static void store(float* at, const Floats* pair) {
        Float32::store(at, pair[0]), Float32::store(at + LANES, pair[1]);
    }
};

struct Bfloat16Pairs {
    using Element = u16;
    static void load(const u16* at, Floats* pair) {
        Bits words;
        __builtin_memcpy(&words, at, sizeof words);
        pair[0] = __builtin_bit_cast(Floats, words << 16);
        pair[1] = __builtin_bit_cast(Floats, words & 0xffff0000);
    }
    static void store(u16* at, const Floats* pair) {
        Bits words = nearest_bfloat16<Bits>(pair[0]) | nearest_bfloat16<Bits>(pair[1]) << 16;
        __builtin_memcpy(at, &words, sizeof words);
    }
};

// Reads the elements of a row from `first` on; those that it lacks are zeros.
template <class Type>
inline void load_pair(const typename Type::Element* row, u64 first, u64 size, Floats* pair) {
    if (size - first >= PAIR) return Type::load(row + first, pair);
    typename Type::Element part[PAIR] = {};
    __builtin_memcpy(part, row + first, (size - first) * sizeof part[0]);
    Type::load(part, pair);
}

// Writes the elements from `first` on, of those that a row has.
template <class Type>
inline void store_pair(typename Type::Element* row, u64 first, u64 size, const Floats* pair) {
    if (size - first >= PAIR) return Type::store(row + first, pair);
    typename Type::Element part[PAIR];
    Type::store(part, pair);
    __builtin_memcpy(row + first, part, (size - first) * sizeof part[0]);
}

// sums[head][i] += the products of elements [k, k + PAIR) of the head's query and rows[i], for LANES of these.
template <class Type, u64 HEADS, bool IS_WHOLE>
[[gnu::always_inline]] inline void add_products(Floats* sums, const float* queries, u64 stride,
                                                const typename Type::Element* const* rows, u64 k, u64 size) {
    constexpr u64 GROUP = LANES / HEADS;
    Floats query[HEADS][2];
    for (u64 head = 0; head < HEADS; ++head) Float32Pairs::load(queries + head * stride + k, query[head]);
    for (u64 i = 0; i < GROUP; ++i) {
        Floats key[2];
        IS_WHOLE ? Type::load(rows[i] + k, key) : load_pair<Type>(rows[i], k, size, key);
        for (u64 head = 0; head < HEADS; ++head) {
            sums[head * GROUP + i] += query[head][0] * key[0];
            sums[head * GROUP + i] += query[head][1] * key[1];
        }
    }
}

// scores[head][i] = the dot product of the head's query and rows[i], of HEADS heads. Rows are computed in groups of
// LANES / HEADS, so `rows` has as many behind the last one as fill its group.
template <class Type, u64 HEADS>
inline void compute_scores(float* scores, const float* queries, const typename Type::Element* const* rows, u64 count,
                           u64 size) {
    constexpr u64 GROUP = LANES / HEADS;
    u64 stride = PagedAttention::with_room(size);
    for (u64 begin = 0; begin < count; begin += GROUP) {
        Floats sums[LANES] = {};  // [head][row]
        u64 k = 0;
        for (; k + PAIR <= size; k += PAIR)
            add_products<Type, HEADS, true>(sums, queries, stride, rows + begin, k, size);
        if (k < size) add_products<Type, HEADS, false>(sums, queries, stride, rows + begin, k, size);
        Floats products = sum_each(sums);
        for (u64 head = 0; head < HEADS; ++head)
            __builtin_memcpy(scores + head * PagedAttention::TILE + begin,
                             reinterpret_cast<const float*>(&products) + head * GROUP, GROUP * sizeof(float));
    }
}

// sums[head] += the sum of weights[head][i] * rows[i], for PAIRS pairs of vectors from `first` on, of HEADS heads.
template <class Type, u64 HEADS, u64 PAIRS, bool IS_WHOLE>
inline void accumulate(float* sums, const float* weights, const typename Type::Element* const* rows, u64 count,
                       u64 first, u64 size) {
    constexpr u64 TILE = PagedAttention::TILE;
    u64 stride = PagedAttention::with_room(size);
    Floats parts[HEADS][PAIRS][2];
    for (u64 head = 0; head < HEADS; ++head)
        for (u64 i = 0; i < PAIRS; ++i) Float32Pairs::load(sums + head * stride + first + i * PAIR, parts[head][i]);
    for (u64 row = 0; row < count; ++row) {
        for (u64 i = 0; i < PAIRS; ++i) {
            Floats value[2];
            const typename Type::Element* at = rows[row] + first + i * PAIR;
            IS_WHOLE ? Type::load(at, value) : load_pair<Type>(rows[row], first + i * PAIR, size, value);
            for (u64 head = 0; head < HEADS; ++head) {
                parts[head][i][0] += value[0] * weights[head * TILE + row];
                parts[head][i][1] += value[1] * weights[head * TILE + row];
            }
        }
    }
    for (u64 head = 0; head < HEADS; ++head)
        for (u64 i = 0; i < PAIRS; ++i) Float32Pairs::store(sums + head * stride + first + i * PAIR, parts[head][i]);
}

// Query heads of one KV head: what is computed of them, and how far.
struct Heads {
    float* queries;  // [heads][key_size with room], scaled
    float* sums;     // [heads][value_size with room], of weights times values
    float* maxima;   // [heads], the greatest score so far
    float* weights;  // [heads], the sum of exp(score - maximum) so far

    Heads from(const PagedAttention& p, u64 head) const {
        return {queries + head * PagedAttention::with_room(p.key_size),
                sums + head * PagedAttention::with_room(p.value_size), maxima + head, weights + head};
    }
};

template <class Type>
struct Tile {
    const typename Type::Element* rows[PagedAttention::TILE];
    u64 count;

    // Finds the keys (or values) of at most TILE positions of a KV head through the block table. Behind them stands
    // the last one again.
    Tile(const PagedAttention& p, const i32* table, const void* cache, u64 size, u64 kv_head, u64 position, u64 end)
        : count(end - position) {
        u64 index = position / p.block_size, within = position % p.block_size, stride = p.num_kv_heads * size, i = 0;
        for (; i < count; within = 0, ++index) {
            u64 offset = ((static_cast<u64>(table[index]) * p.block_size + within) * p.num_kv_heads + kv_head) * size;
            u64 until = count - i < p.block_size - within ? count : i + p.block_size - within;
            for (; i < until; ++i, offset += stride)
                rows[i] = static_cast<const typename Type::Element*>(cache) + offset;
        }
        for (; i < PagedAttention::TILE; ++i) rows[i] = rows[count - 1];
    }
};

// Reads a byte of each cache line of keys (or values) of the KV heads [first, last), in the order in which they lie in
// memory: so the processor's own prefetcher reads ahead. The rows of one head alone lie apart, and waited for two dozen
// lines at a time: with prefetch instructions, a step of 8 rows and 2,048 positions took 1.1 to 1.2 times as long.
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

// Takes a tile of positions into account, for HEADS heads.
template <class Type, u64 HEADS>
inline void attend(const PagedAttention& p, const Tile<Type>& keys, const Tile<Type>& values, const Heads& heads,
                   float* scores) {
    constexpr u64 TILE = PagedAttention::TILE, PAIRS = (LANES == 16 ? 8 : 4) / HEADS;  // half of the registers are sums
    u64 count = keys.count, size = p.value_size, room = PagedAttention::with_room(size);
    compute_scores<Type, HEADS>(scores, heads.queries, keys.rows, count, p.key_size);
    for (u64 head = 0; head < HEADS; ++head) {
        float* head_scores = scores + head * TILE;
        if (p.softcap != 0.0f) cap_scores(head_scores, (count + LANES - 1) / LANES * LANES, 1.0f, p.softcap);
        float max = find_max(head_scores, count, heads.maxima[head]);
        if (max != heads.maxima[head]) {  // the sums so far are relative to the old maximum
            float rescale = exp_nonpositive(heads.maxima[head] - max);
            heads.maxima[head] = max, heads.weights[head] *= rescale;
            float* sums = heads.sums + head * room;
            for (u64 k = 0; k < room; k += LANES) store(sums + k, load(sums + k) * rescale);
        }
        heads.weights[head] += exponentiate(head_scores, count, max);
    }
    u64 k = 0;
    for (; k + PAIRS * PAIR <= size; k += PAIRS * PAIR)
        accumulate<Type, HEADS, PAIRS, true>(heads.sums, scores, values.rows, count, k, size);
    for (; k + PAIR <= size; k += PAIR)
        accumulate<Type, HEADS, 1, true>(heads.sums, scores, values.rows, count, k, size);
    if (k < size) accumulate<Type, HEADS, 1, false>(heads.sums, scores, values.rows, count, k, size);
}

// All query heads of the KV heads [first, last) of one sequence. A tile of positions is computed for all of them before
// the next one: their keys lie side by side, and share the pages of memory.
template <class Type>
inline void compute_heads(const PagedAttention& p, u64 seq, u64 first, u64 last, float* scratch) {
    using Element = typename Type::Element;
    constexpr u64 TILE = PagedAttention::TILE;
    u64 group = p.heads_per_kv_head(), first_head = first * group, num_heads = (last - first) * group;
    u64 key_room = PagedAttention::with_room(p.key_size), value_room = PagedAttention::with_room(p.value_size);
    Heads heads;
    heads.queries = scratch, heads.sums = heads.queries + num_heads * key_room;
    float* scores = heads.sums + num_heads * value_room;  // [group][TILE]
    heads.maxima = scores + group * TILE, heads.weights = heads.maxima + num_heads;
    const i32* table = p.block_tables + seq * p.table_width;

    for (u64 i = 0; i < num_heads; ++i) {
        i64 offset =
            static_cast<i64>(seq) * p.query_seq_stride + static_cast<i64>(first_head + i) * p.query_head_stride;
        for (u64 k = 0; k < p.key_size; k += PAIR) {
            Floats pair[2];
            load_pair<Type>(static_cast<const Element*>(p.queries) + offset, k, p.key_size, pair);
            for (u64 half = 0; half < 2; ++half)
                store(heads.queries + i * key_room + k + half * LANES, pair[half] * p.scale);
        }
        for (u64 k = 0; k < value_room; ++k) heads.sums[i * value_room + k] = 0.0f;
        heads.maxima[i] = p.sinks == nullptr ? NO_SCORE : p.sinks[first_head + i];
        heads.weights[i] = p.sinks == nullptr ? 0.0f : 1.0f;
    }
    u64 end = static_cast<u64>(p.seq_lens[seq]), begin = static_cast<u64>(p.first_positions[seq]);
    for (u64 position = begin; position < end; position += TILE) {
        u64 until = end - position < TILE ? end : position + TILE;
        fetch(p, table, p.keys, p.key_size, first, last, position, until);
        fetch(p, table, p.values, p.value_size, first, last, position, until);
        for (u64 kv_head = first; kv_head < last; ++kv_head) {
            Tile<Type> keys(p, table, p.keys, p.key_size, kv_head, position, until);
            Tile<Type> values(p, table, p.values, p.value_size, kv_head, position, until);
            u64 head = (kv_head - first) * group, end_head = head + group;
            for (; head + 4 <= end_head; head += 4) attend<Type, 4>(p, keys, values, heads.from(p, head), scores);
            for (; head + 2 <= end_head; head += 2) attend<Type, 2>(p, keys, values, heads.from(p, head), scores);
            if (head < end_head) attend<Type, 1>(p, keys, values, heads.from(p, head), scores);
        }
    }
    for (u64 i = 0; i < num_heads; ++i) {
        Element* out = static_cast<Element*>(p.out) + (seq * p.num_heads + first_head + i) * p.value_size;
        for (u64 k = 0; k < p.value_size; k += PAIR) {
            Floats pair[2];
            for (u64 half = 0; half < 2; ++half)
                pair[half] = load(heads.sums + i * value_room + k + half * LANES) / heads.weights[i];
            store_pair<Type>(out, k, p.value_size, pair);
        }
    }
}

}  // namespace

void PENSTOCK_KERNEL(const PagedAttention& problem, u64 first, u64 last, float* scratch) {
    auto* compute = problem.dtype == DType::float32 ? compute_heads<Float32Pairs> : compute_heads<Bfloat16Pairs>;
    while (first < last) {
        u64 seq = first / problem.num_kv_heads, begin = seq * problem.num_kv_heads;
        u64 end = begin + problem.num_kv_heads < last ? begin + problem.num_kv_heads : last;
        compute(problem, seq, first - begin, end - begin, scratch);
        first = end;
    }
}

}  // namespace penstock::engine
