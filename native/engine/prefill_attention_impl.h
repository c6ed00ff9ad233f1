// prefill_attention_impl.h: the kernel of prefill_attention.h. Included by one .cpp per instruction set, which defines
// PENSTOCK_KERNEL, the kernel's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in
// functions and the products that its caller chose.
#include "prefill_attention.h"
#include "softmax_impl.h"

namespace penstock::engine {
namespace {

constexpr u64 ROWS = PrefillAttention::ROWS, POSITIONS = PrefillAttention::POSITIONS, PANELS = PrefillAttention::PANELS,
              PANEL = PackedLinear::PANEL, TILE = PackedLinear::TILE, TILE_INPUTS = PackedLinear::TILE_INPUTS,
              TILE_ROWS = PackedLinear::TILE_ROWS;

// Keys as a layer [elements][positions]: pairs of elements. Values as a layer [positions][elements]: pairs of
// positions. Positions beyond the sequence become zeros: their memory may hold NaN of another request.
void pack(const PrefillAttention& p, u64 kv_head, u64 tile, u16* packed) {
    u64 first = (p.first_tile() + tile) * POSITIONS, key_tiles = p.key_tiles();
    u64 count = p.seq_len - first < POSITIONS ? p.seq_len - first : POSITIONS;
    if (count < POSITIONS || p.key_size % TILE_INPUTS != 0 || p.value_size % PANEL != 0)
        __builtin_memset(packed, 0, p.tile_nelements() * sizeof(u16));
    const u16 *keys[POSITIONS], *values[POSITIONS];
    for (u64 i = 0; i < count; ++i) {
        u64 position = first + i;
        u64 place = static_cast<u64>(p.blocks[position / p.block_size]) * p.block_size + position % p.block_size;
        keys[i] = p.keys + (place * p.num_kv_heads + kv_head) * p.key_size;
        values[i] = p.values + (place * p.num_kv_heads + kv_head) * p.value_size;
    }
    for (u64 panel = 0; panel * PANEL < count; ++panel) {  // writes whole lines, in order
        const u16* const* rows = keys + panel * PANEL;
        u64 columns = count - panel * PANEL < PANEL ? count - panel * PANEL : PANEL;
        u16* to = packed + panel * key_tiles * TILE;
        for (u64 k = 0; k + 2 <= p.key_size; k += 2, to += 2 * PANEL)
            for (u64 column = 0; column < columns; ++column)
                __builtin_memcpy(to + column * 2, rows[column] + k, 2 * sizeof(u16));
        if (p.key_size % 2 != 0)
            for (u64 column = 0; column < columns; ++column) to[column * 2] = rows[column][p.key_size - 1];
    }
    for (u64 i = 0; i < count; i += 2)
        for (u64 k = 0; k < p.value_size; k += PANEL) {
            u16 pair[2][PANEL] = {};
            u32 line[PANEL];
            for (u64 row = 0; row < 2 && i + row < count; ++row) {
                if (p.value_size - k >= PANEL)
                    __builtin_memcpy(pair[row], values[i + row] + k, sizeof pair[row]);
                else
                    for (u64 lane = 0; lane < p.value_size - k; ++lane) pair[row][lane] = values[i + row][k + lane];
            }
            for (u64 lane = 0; lane < PANEL; ++lane) line[lane] = pair[0][lane] | u32{pair[1][lane]} << 16;
            u16* panel = packed + p.keys_nelements() + k / PANEL * PrefillAttention::INPUT_TILES * TILE;
            __builtin_memcpy(panel + i * PANEL, line, sizeof line);
        }
}

constexpr float LOG2_E = 1.44269504f;

// The state of a group of rows. Scores are to the base 2.
struct Group {
    u64 first, rows;
    u16* queries;  // tiles of rows, as of packed_linear.h
    float* sums;   // [ROWS][value panels][PANEL], of weights times values
    alignas(64) float scores[ROWS * POSITIONS];
    alignas(64) u16 weights[ROWS * POSITIONS];  // tiles of rows
    float maxima[ROWS];                         // the greatest score so far
    alignas(64) float totals[ROWS * LANES];     // the sums of exp(score - maximum) so far

    u16* weights_of(u64 row) {
        return weights + row / TILE_ROWS * PrefillAttention::INPUT_TILES * TILE + row % TILE_ROWS * TILE_INPUTS;
    }
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
            if (p.key_size - k >= TILE_INPUTS)
                __builtin_memcpy(to, query + k, TILE_INPUTS * sizeof(u16));
            else
                for (u64 i = 0; i < p.key_size - k; ++i) to[i] = query[k + i];
        }
        group.maxima[row] = p.sinks == nullptr ? NO_SCORE : p.sinks[head] * LOG2_E;
        store(group.totals + row * LANES, Floats{});
        group.totals[row * LANES] = p.sinks == nullptr ? 0.0f : 1.0f;
    }
}

// Turns the scores of a row into weights, of the positions [begin, end) of the tile. The other weights become zeros.
// `panels`: of scores of each row; behind these are those of the next rows.
template <bool IS_WHOLE>
inline void weigh(const PrefillAttention& p, Group& group, u64 row, u64 panels, u64 begin, u64 end) {
    constexpr u64 VECTORS = POSITIONS / LANES;
    float* own_scores = group.scores + row * panels * PANEL;
    if (p.softcap != 0.0f) cap_scores(own_scores, panels * PANEL, p.scale, p.softcap);
    Floats scores[VECTORS], greatest = Floats{} + group.maxima[row];
    Indices lanes;
    for (u64 lane = 0; lane < LANES; ++lane) lanes[lane] = static_cast<i32>(lane);
    float scale = p.softcap == 0.0f ? p.scale * LOG2_E : LOG2_E;
    for (u64 i = 0; i < VECTORS; ++i) {
        scores[i] = load(own_scores + i * LANES) * scale;
        if constexpr (!IS_WHOLE) {
            Indices at = lanes + static_cast<i32>(i * LANES);
            Indices within = (at >= static_cast<i32>(begin)) & (at < static_cast<i32>(end));
            scores[i] = within ? scores[i] : Floats{} + NO_SCORE;
        }
        greatest = scores[i] > greatest ? scores[i] : greatest;
    }
    float max = find_greatest(greatest);
    if (max != group.maxima[row]) {  // what was summed up so far was relative to the old one
        float rescale = power_of_two<Bits>(Floats{} + (group.maxima[row] - max))[0];
        u64 size = p.value_panels() * PANEL;
        float* sums = group.sums + row * size;
        for (u64 k = 0; k < size; k += LANES) store(sums + k, load(sums + k) * rescale);
        store(group.totals + row * LANES, load(group.totals + row * LANES) * rescale);
        group.maxima[row] = max;
    }
    Floats total = load(group.totals + row * LANES);
    u16* weights = group.weights_of(row);
    for (u64 i = 0; i < VECTORS; ++i) {
        Floats weight = power_of_two<Bits>(scores[i] - max);
        total += weight;
        Bfloat16::store(weights + i * LANES / TILE_INPUTS * TILE + i * LANES % TILE_INPUTS, weight);
    }
    store(group.totals + row * LANES, total);
}

inline void finish(const PrefillAttention& p, u64 kv_head, const Group& group) {
    u64 num_heads = p.heads_per_kv_head(), size = p.value_panels() * PANEL;
    for (u64 row = 0; row < group.rows; ++row) {
        u64 token = (group.first + row) / num_heads, head = kv_head * num_heads + (group.first + row) % num_heads;
        u16* out = p.out + (token * p.num_heads + head) * p.value_size;
        float total = sum_lanes(load(group.totals + row * LANES));
        for (u64 k = 0; k < p.value_size; k += LANES)
            store_part<Bfloat16>(out, k, p.value_size, load(group.sums + row * size + k) / total);
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
        u64 panels = PackedLinear::divide_up(count, PANEL);  // with positions; so many make a row of scores
        multiply({group.queries, key_tiles, group.rows, keys, key_tiles, panels, key_tiles, false}, group.scores);
        for (u64 row = 0; row < group.rows; ++row) {
            u64 position = p.position_of(group.first + row), first = p.first_position(position);
            u64 end = position < base ? 0 : position + 1 - base < POSITIONS ? position + 1 - base : POSITIONS;
            u64 begin = first <= base ? 0 : first - base < end ? first - base : end;
            if (begin == 0 && end == POSITIONS)
                weigh<true>(p, group, row, panels, begin, end);
            else if (begin < end)
                weigh<false>(p, group, row, panels, begin, end);
            else
                for (u64 input = 0; input < PrefillAttention::INPUT_TILES; ++input)
                    __builtin_memset(group.weights_of(row) + input * TILE, 0, TILE_INPUTS * sizeof(u16));
        }
        multiply({group.weights, PrefillAttention::INPUT_TILES, group.rows, keys + p.keys_nelements(),
                  PrefillAttention::INPUT_TILES, p.value_panels(), PackedLinear::divide_up(count, TILE_INPUTS), true},
                 group.sums);
    }
    finish(p, kv_head, group);
}

}  // namespace

const PrefillKernel PENSTOCK_KERNEL{pack, attend};

}  // namespace penstock::engine
