// attend_rows.h: the arithmetic of attending.h, compiled once for every kind of processor: whoever includes it says in
// PENSTOCK_ATTEND what it is called, and in PENSTOCK_LANES how many numbers a vector has. Only built-in functions are
// called, as an inline one of a library may be linked into code for other processors.
#include "attending.h"

namespace penstock {
namespace {

constexpr u64 LANES = PENSTOCK_LANES;
typedef float Floats __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef u32 Bits __attribute__((vector_size(4 * PENSTOCK_LANES)));
constexpr float NOTHING = -__builtin_inff();

inline Floats load(const float* at) {
    Floats out;
    __builtin_memcpy(&out, at, sizeof out);
    return out;
}
inline void store(float* at, Floats numbers) { __builtin_memcpy(at, &numbers, sizeof numbers); }

// e to the power of numbers up to 0, within two units of the last place; what is no number stays none.
inline Floats power(Floats x) {
    constexpr float TO_WHOLE = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
    x = x < -87.0f ? Floats{} - 87.0f : x;
    Floats whole = x * 1.44269504f + TO_WHOLE;
    Bits bits;
    __builtin_memcpy(&bits, &whole, sizeof bits);
    bits = (bits + 127) << 23;
    Floats two;
    __builtin_memcpy(&two, &bits, sizeof two);
    whole -= TO_WHOLE;
    Floats rest = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    return (sum * rest * rest + rest + 1.0f) * two;
}
inline float power(float x) { return power(Floats{} + x)[0]; }

#if defined(__clang__)
#define PENSTOCK_PICK(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define PENSTOCK_PICK(one, other, ...) __builtin_shuffle(one, other, Bits{__VA_ARGS__})
#endif

// The sums of so many vectors' numbers, as one vector.
inline Floats totals(const Floats* of) {
#if PENSTOCK_LANES == 8
    Floats pairs[4], fours[2];
    for (u64 i = 0; i < 4; ++i)
        pairs[i] = PENSTOCK_PICK(of[2 * i], of[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   PENSTOCK_PICK(of[2 * i], of[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (u64 i = 0; i < 2; ++i)
        fours[i] = PENSTOCK_PICK(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   PENSTOCK_PICK(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PENSTOCK_PICK(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           PENSTOCK_PICK(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    Floats pairs[2];
    for (u64 i = 0; i < 2; ++i)
        pairs[i] =
            PENSTOCK_PICK(of[2 * i], of[2 * i + 1], 0, 4, 2, 6) + PENSTOCK_PICK(of[2 * i], of[2 * i + 1], 1, 5, 3, 7);
    return PENSTOCK_PICK(pairs[0], pairs[1], 0, 1, 4, 5) + PENSTOCK_PICK(pairs[0], pairs[1], 2, 3, 6, 7);
#endif
}

inline float total(Floats numbers) {
    float out = 0.0f;
    for (u64 lane = 0; lane < LANES; ++lane) out += numbers[lane];
    return out;
}

// The products of a vector with each of these.
inline void multiply(float* products, const float* one, const float* const* others, u64 count, u64 size) {
    u64 whole = size - size % LANES, which = 0;
    for (; which + LANES <= count; which += LANES) {
        Floats sums[LANES] = {};
        for (u64 at = 0; at < whole; at += LANES) {
            Floats part = load(one + at);
            for (u64 i = 0; i < LANES; ++i) sums[i] += part * load(others[which + i] + at);
        }
        store(products + which, totals(sums));
    }
    for (u64 i = which; i < count; ++i) {
        Floats sum = {};
        for (u64 at = 0; at < whole; at += LANES) sum += load(one + at) * load(others[i] + at);
        products[i] = total(sum);
    }
    if (whole != size)
        for (u64 i = 0; i < count; ++i)
            for (u64 at = whole; at < size; ++at) products[i] += one[at] * others[i][at];
}

// out[size] = out * kept + the weighted sum of so many vectors.
inline void add(float* out, float kept, const float* weights, const float* const* vectors, u64 count, u64 size) {
    u64 at = 0;
    for (; at + 4 * LANES <= size; at += 4 * LANES) {
        Floats sums[4];
        for (u64 i = 0; i < 4; ++i) sums[i] = load(out + at + i * LANES) * kept;
        for (u64 which = 0; which < count; ++which)
            for (u64 i = 0; i < 4; ++i) sums[i] += load(vectors[which] + at + i * LANES) * weights[which];
        for (u64 i = 0; i < 4; ++i) store(out + at + i * LANES, sums[i]);
    }
    for (; at + LANES <= size; at += LANES) {
        Floats sum = load(out + at) * kept;
        for (u64 which = 0; which < count; ++which) sum += load(vectors[which] + at) * weights[which];
        store(out + at, sum);
    }
    for (; at < size; ++at) {
        float sum = out[at] * kept;
        for (u64 which = 0; which < count; ++which) sum += vectors[which][at] * weights[which];
        out[at] = sum;
    }
}

inline float widened(u16 half) {
    u32 bits = u32{half} << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}
inline u16 halved(float number) {  // to the nearest, of two to the even one
    u32 bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<u16>(bits >> 16 | 0x40);
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void widen(float* out, const u16* halves, u64 count) {
    for (u64 i = 0; i < count; ++i) out[i] = widened(halves[i]);
}

// Where the vectors of these positions are, as float32: where they lie, or in the tile.
inline void find(const Attending& a, const i32* table, const void* vectors, u64 size, u64 group, u64 position,
                 u64 count, float* tile, const float** at) {
    u64 which = position / a.block_size, within = position % a.block_size, step = a.groups * size;
    for (u64 i = 0; i < count; within = 0, ++which) {
        u64 offset = ((static_cast<u64>(table[which]) * a.block_size + within) * a.groups + group) * size;
        u64 until = count - i < a.block_size - within ? count : i + a.block_size - within;
        for (; i < until; ++i, offset += step) {
            if (a.number == Number::float32) {
                at[i] = static_cast<const float*>(vectors) + offset;
            } else {
                widen(tile + i * size, static_cast<const u16*>(vectors) + offset, size);
                at[i] = tile + i * size;
            }
        }
    }
}

inline float greatest(const float* numbers, u64 count, float than) {
    u64 at = 0;
    if (count >= LANES) {
        Floats most = load(numbers);
        for (at = LANES; at + LANES <= count; at += LANES) {
            Floats next = load(numbers + at);
            most = next > most ? next : most;
        }
        for (u64 lane = 0; lane < LANES; ++lane) than = most[lane] > than ? most[lane] : than;
    }
    for (; at < count; ++at) than = numbers[at] > than ? numbers[at] : than;
    return than;
}

// Scores become weights of which the greatest is 1 at `most`. Returns their sum.
inline float weigh(float* scores, u64 count, float most) {
    Floats sums = {};
    u64 at = 0;
    for (; at + LANES <= count; at += LANES) {
        Floats weights = power(load(scores + at) - most);
        store(scores + at, weights);
        sums += weights;
    }
    float sum = total(sums);
    for (; at < count; ++at) sum += scores[at] = power(scores[at] - most);
    return sum;
}

void attend_group(const Attending& a, u64 row, u64 group, float* scratch) {
    u64 shared = a.heads / a.groups, first_head = group * shared;
    float* queries = scratch;
    float* sums = queries + shared * a.key_size;
    float* scores = sums + shared * a.value_size;
    float* most = scores + shared * Attending::TOGETHER;
    float* weight = most + shared;
    float* tile = weight + shared;
    const float* at[Attending::TOGETHER];
    const i32* table = a.table + row * a.width;

    for (u64 i = 0; i < shared; ++i) {
        i64 offset = static_cast<i64>(row) * a.query_row + static_cast<i64>(first_head + i) * a.query_head;
        float* query = queries + i * a.key_size;
        if (a.number == Number::float32)
            __builtin_memcpy(query, static_cast<const float*>(a.queries) + offset, a.key_size * sizeof(float));
        else
            widen(query, static_cast<const u16*>(a.queries) + offset, a.key_size);
        for (u64 k = 0; k < a.key_size; ++k) query[k] *= a.scale;
        for (u64 k = 0; k < a.value_size; ++k) sums[i * a.value_size + k] = 0.0f;
        most[i] = a.sinks == nullptr ? NOTHING : a.sinks[first_head + i];
        weight[i] = a.sinks == nullptr ? 0.0f : 1.0f;
    }
    u64 end = static_cast<u64>(a.lengths[row]);
    for (u64 position = static_cast<u64>(a.firsts[row]); position < end; position += Attending::TOGETHER) {
        u64 count = end - position < Attending::TOGETHER ? end - position : Attending::TOGETHER;
        find(a, table, a.keys, a.key_size, group, position, count, tile, at);
        for (u64 i = 0; i < shared; ++i)
            multiply(scores + i * Attending::TOGETHER, queries + i * a.key_size, at, count, a.key_size);
        find(a, table, a.values, a.value_size, group, position, count, tile, at);
        for (u64 i = 0; i < shared; ++i) {
            float* its = scores + i * Attending::TOGETHER;
            if (a.cap != 0.0f)
                for (u64 which = 0; which < count; ++which) its[which] = __builtin_tanhf(its[which] / a.cap) * a.cap;
            float before = most[i];
            most[i] = greatest(its, count, before);
            float kept = power(before - most[i]);
            weight[i] = weight[i] * kept + weigh(its, count, most[i]);
            add(sums + i * a.value_size, kept, its, at, count, a.value_size);
        }
    }
    for (u64 i = 0; i < shared; ++i) {
        u64 offset = (row * a.heads + first_head + i) * a.value_size;
        for (u64 k = 0; k < a.value_size; ++k) {
            float number = sums[i * a.value_size + k] / weight[i];
            if (a.number == Number::float32)
                static_cast<float*>(a.out)[offset + k] = number;
            else
                static_cast<u16*>(a.out)[offset + k] = halved(number);
        }
    }
}

}  // namespace

void PENSTOCK_ATTEND(const Attending& asked, u64 first, u64 last, float* scratch) {
    for (u64 pair = first; pair < last; ++pair) attend_group(asked, pair / asked.groups, pair % asked.groups, scratch);
}

}  // namespace penstock
