// prefill_attention_impl.h: the kernel of prefill_attention.h. Included by one .cpp per instruction set, which defines
// PENSTOCK_KERNEL, the kernel's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in
// functions and the products that its caller chose.
#include "prefill_attention.h"
#include "softmax_impl.h"

namespace penstock::engine {
namespace {

constexpr u64 ROWS = PrefillAttention::ROWS, POSITIONS = PrefillAttention::POSITIONS, PANEL = PackedLinear::PANEL,
              TILE = PackedLinear::TILE, TILE_INPUTS = PackedLinear::TILE_INPUTS, TILE_ROWS = PackedLinear::TILE_ROWS,
              MAX_PANELS = PackedLinear::MAX_PANELS, HALF = MAX_PANELS * PANEL;  // positions of one product

// Keys as a layer [elements][positions]: pairs of elements. Values as a layer [positions][elements]: pairs of
// positions. Positions beyond the sequence become zeros: their memory may hold NaN of another request.
void pack(const PrefillAttention& p, u64 kv_head, u64 tile, u16* packed) {
    u64 first = (p.first_tile() + tile) * POSITIONS, key_tiles = p.key_tiles(), value_panels = p.value_panels();
    u64 count = p.seq_len - first < POSITIONS ? p.seq_len - first : POSITIONS;
    u16* values = packed + p.keys_nelements();
    __builtin_memset(packed, 0, p.tile_nelements() * sizeof(u16));
    for (u64 i = 0; i < count; ++i) {
        u64 position = first + i;
        u64 place = static_cast<u64>(p.blocks[position / p.block_size]) * p.block_size + position % p.block_size;
        const u16* key = p.keys + (place * p.num_kv_heads + kv_head) * p.key_size;
        u16* panel = packed + i / PANEL * key_tiles * TILE + i % PANEL * 2;
        for (u64 k = 0; k + 2 <= p.key_size; k += 2) __builtin_memcpy(panel + k * PANEL, key + k, 2 * sizeof(u16));
        if (p.key_size % 2 != 0) panel[(p.key_size - 1) * PANEL] = key[p.key_size - 1];
        const u16* value = p.values + (place * p.num_kv_heads + kv_head) * p.value_size;
        for (u64 group = 0; group < value_panels; ++group) {
            u64 rest = p.value_size - group * PANEL, outputs = rest < PANEL ? rest : PANEL;
            u16* to = values + group * PrefillAttention::INPUT_TILES * TILE + i / 2 * 2 * PANEL + i % 2;
            for (u64 k = 0; k < outputs; ++k) to[k * 2] = value[group * PANEL + k];
        }
    }
}

// The state of a group of rows.
struct Group {
    u64 first, rows;
    u16* queries;  // tiles of rows, as of packed_linear.h
    float* sums;   // [ROWS][value panels][PANEL], of weights times values
    alignas(64) float scores[POSITIONS / HALF][ROWS * HALF];
    alignas(64) u16 weights[ROWS * POSITIONS];  // tiles of rows
    alignas(64) float products[ROWS * HALF];
    float maxima[ROWS], totals[ROWS];  // the greatest score so far; the sum of exp(score - maximum) so far
};

inline void begin(const PrefillAttention& p, u64 kv_head, Group& group) {
    u64 num_heads = p.heads_per_kv_head(), key_tiles = p.key_tiles();
    __builtin_memset(group.queries, 0, ROWS * key_tiles * TILE_INPUTS * sizeof(u16));
    __builtin_memset(group.sums, 0, ROWS * p.value_panels() * PANEL * sizeof(float));
    __builtin_memset(group.weights, 0, sizeof group.weights);
    for (u64 row = 0; row < group.rows; ++row) {
        u64 token = (group.first + row) / num_heads, head = kv_head * num_heads + (group.first + row) % num_heads;
        const u16* query =
            p.queries + static_cast<i64>(token) * p.query_token_stride + static_cast<i64>(head) * p.query_head_stride;
        u16* to = group.queries + row / TILE_ROWS * key_tiles * TILE + row % TILE_ROWS * TILE_INPUTS;
        for (u64 k = 0; k < p.key_size; k += TILE_INPUTS, to += TILE) {
            u64 count = p.key_size - k < TILE_INPUTS ? p.key_size - k : TILE_INPUTS;
            __builtin_memcpy(to, query + k, count * sizeof(u16));
        }
        group.maxima[row] = p.sinks == nullptr ? NO_SCORE : p.sinks[head];
        group.totals[row] = p.sinks == nullptr ? 0.0f : 1.0f;
    }
}

// Turns the scores of a row into weights, of the positions [begin, end) of the tile.
inline void weigh(const PrefillAttention& p, Group& group, u64 row, u64 begin, u64 end) {
    alignas(64) float scores[POSITIONS];
    u16* weights =
        group.weights + row / TILE_ROWS * PrefillAttention::INPUT_TILES * TILE + row % TILE_ROWS * TILE_INPUTS;
    for (u64 half = 0; half * HALF < end; ++half)
        for (u64 i = 0; i < HALF; i += LANES)
            store(scores + half * HALF + i, load(&group.scores[half][row * HALF + i]) * p.scale);
    if (p.softcap != 0.0f)
        for (u64 i = begin; i < end; ++i) scores[i] = __builtin_tanhf(scores[i] / p.softcap) * p.softcap;
    float max = find_max(scores + begin, end - begin, group.maxima[row]);
    if (max != group.maxima[row]) {  // what was summed up so far was relative to the old one
        float rescale = exp_nonpositive(group.maxima[row] - max);
        u64 size = p.value_panels() * PANEL;
        for (u64 k = 0; k < size; k += LANES)
            store(group.sums + row * size + k, load(group.sums + row * size + k) * rescale);
        group.totals[row] *= rescale, group.maxima[row] = max;
    }
    group.totals[row] += exponentiate(scores + begin, end - begin, max);
    for (u64 i = 0; i < begin; ++i) scores[i] = 0.0f;
    for (u64 i = end; i < POSITIONS; ++i) scores[i] = 0.0f;
    for (u64 i = 0; i < POSITIONS; i += LANES) {
        Halves halves = __builtin_convertvector(nearest_bfloat16<Bits>(load(scores + i)), Halves);
        __builtin_memcpy(weights + i / TILE_INPUTS * TILE + i % TILE_INPUTS, &halves, sizeof halves);
    }
}

inline void accumulate(const PrefillAttention& p, Group& group, const u16* values, SumsKernel* multiply) {
    u64 panels = p.value_panels(), size = panels * PANEL;
    for (u64 panel = 0; panel < panels; panel += MAX_PANELS) {
        u64 together = panels - panel < MAX_PANELS ? panels - panel : MAX_PANELS, width = together * PANEL;
        multiply(group.weights, group.rows, values + panel * PrefillAttention::INPUT_TILES * TILE, together,
                 PrefillAttention::INPUT_TILES, group.products);
        for (u64 row = 0; row < group.rows; ++row) {
            float* sums = group.sums + row * size + panel * PANEL;
            for (u64 k = 0; k < width; k += LANES)
                store(sums + k, load(sums + k) + load(group.products + row * width + k));
        }
    }
}

inline void finish(const PrefillAttention& p, u64 kv_head, const Group& group) {
    u64 num_heads = p.heads_per_kv_head(), size = p.value_panels() * PANEL;
    for (u64 row = 0; row < group.rows; ++row) {
        u64 token = (group.first + row) / num_heads, head = kv_head * num_heads + (group.first + row) % num_heads;
        u16* out = p.out + (token * p.num_heads + head) * p.value_size;
        for (u64 k = 0; k < p.value_size; k += LANES) {
            Floats numbers = load(group.sums + row * size + k) / group.totals[row];
            Halves halves = __builtin_convertvector(nearest_bfloat16<Bits>(numbers), Halves);
            u64 count = p.value_size - k < LANES ? p.value_size - k : LANES;
            __builtin_memcpy(out + k, &halves, count * sizeof(u16));
        }
    }
}

void attend(const PrefillAttention& p, u64 kv_head, u64 number, const u16* packed, SumsKernel* multiply,
            float* scratch) {
    Group group;
    group.first = number * ROWS;
    group.rows = p.rows() - group.first < ROWS ? p.rows() - group.first : ROWS;
    group.sums = scratch;
    group.queries = reinterpret_cast<u16*>(scratch + ROWS * p.value_panels() * PANEL);
    begin(p, kv_head, group);
    u64 last = p.position_of(group.first + group.rows - 1), key_tiles = p.key_tiles();
    for (u64 tile = p.first_position(p.position_of(group.first)) / POSITIONS; tile * POSITIONS <= last; ++tile) {
        u64 base = tile * POSITIONS, count = last + 1 - base < POSITIONS ? last + 1 - base : POSITIONS;
        const u16* keys = packed + (tile - p.first_tile()) * p.tile_nelements();
        for (u64 half = 0; half * HALF < count; ++half)
            multiply(group.queries, group.rows, keys + half * MAX_PANELS * key_tiles * TILE, MAX_PANELS, key_tiles,
                     group.scores[half]);
        for (u64 row = 0; row < group.rows; ++row) {
            u64 position = p.position_of(group.first + row), first = p.first_position(position);
            u64 end = position < base ? 0 : position + 1 - base < POSITIONS ? position + 1 - base : POSITIONS;
            u64 begin = first <= base ? 0 : first - base < end ? first - base : end;
            if (begin < end) {
                weigh(p, group, row, begin, end);
                continue;
            }
            u16* weights =
                group.weights + row / TILE_ROWS * PrefillAttention::INPUT_TILES * TILE + row % TILE_ROWS * TILE_INPUTS;
            for (u64 input = 0; input < PrefillAttention::INPUT_TILES; ++input)
                __builtin_memset(weights + input * TILE, 0, TILE_INPUTS * sizeof(u16));
        }
        accumulate(p, group, keys + p.keys_nelements(), multiply);
    }
    finish(p, kv_head, group);
}

}  // namespace

const PrefillKernel PENSTOCK_KERNEL{pack, attend};

}  // namespace penstock::engine
