"""Triton kernels of a step on a CUDA device. None of them depends on the host, so all can be recorded in a graph.

Integers of tables are int32. A slot, a row or a place of -1 is padding: a kernel writes nothing for it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E: Any = tl.constexpr(1.4426950408889634)
TABLE: Any = tl.constexpr(0)  # kinds of writes of `write_state`
TOKENS: Any = tl.constexpr(1)
COMPUTED: Any = tl.constexpr(2)
ROWS: Any = tl.constexpr(3)
PARAMS: Any = tl.constexpr(4)
COUNTS: Any = tl.constexpr(5)
WRITE_FIELDS: Any = tl.constexpr(5)
IN_PROMPT: Any = tl.constexpr(1 << 30)  # of a count of generated ids: the prompt has the id, too
# Columns of a slot's parameters. Those of SEED are two halves, and of ROPE offsets of each axis.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, IS_PENALIZED, PROMPT_SIZE, SEED, ROPE = (
    tl.constexpr(column) for column in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
)
PARAMS_SIZE: Any = tl.constexpr(16)


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit(do_not_specialize=["count"])
def write_state(
    news, count, table, tokens, computed, rows, params, counts, table_stride, tokens_stride, vocabulary,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the news of a step. `news`: `count` writes as columns (kind, slot, first, length, offset), then data."""
    write = tl.program_id(0)
    kind, slot = tl.load(news + write), tl.load(news + count + write).to(tl.int64)
    first, length = tl.load(news + 2 * count + write), tl.load(news + 3 * count + write)
    data = news + WRITE_FIELDS * count + tl.load(news + 4 * count + write)
    if kind == COUNTS:
        count_ids(counts + slot * vocabulary, data, first, length, vocabulary, SIZE)
        return
    target = rows
    if kind == TABLE:
        target = table + slot * table_stride
    elif kind == TOKENS:
        target = tokens + slot * tokens_stride
    elif kind == COMPUTED:
        target = computed + slot
    elif kind == PARAMS:
        target = params + slot * PARAMS_SIZE
    for begin in range(0, length, SIZE):
        at = begin + tl.arange(0, SIZE)
        tl.store(target + first + at, tl.load(data + at, at < length, 0), at < length)


@triton.jit
def count_ids(counts, ids, first, length, vocabulary, SIZE: tl.constexpr):
    """Counts ids for penalties: `first` ids of a prompt, then generated ones."""
    i = tl.arange(0, SIZE)
    for begin in range(0, vocabulary, SIZE):
        tl.store(counts + begin + i, tl.zeros([SIZE], tl.int32), begin + i < vocabulary)
    tl.debug_barrier()
    for begin in range(0, first, SIZE):
        is_id = begin + i < first
        tl.store(counts + tl.load(ids + begin + i, is_id, 0), tl.zeros([SIZE], tl.int32) + IN_PROMPT, is_id)
    tl.debug_barrier()
    for begin in range(first, length, SIZE):
        is_id = begin + i < length
        tl.atomic_add(counts + tl.load(ids + begin + i, is_id, 0), 1, is_id)


@triton.jit(do_not_specialize=["num_rows", "max_short_prompt"])
def advance(
    rows, computed, table, tokens, params, ids, lengths, places, positions, num_rows, max_short_prompt, table_stride,
    tokens_stride, positions_stride, BLOCK: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Begins a decode step: the id, the place and the positions of each row's next token, and the row's length.
    Positions are those of the rotary embedding, see `rope`."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_row = row < num_rows
    slot = tl.load(rows + row, is_row, -1).to(tl.int64)
    runs = slot >= 0
    position = tl.load(computed + slot, runs, 0)
    tl.store(computed + slot, position + 1, runs)
    block = tl.load(table + slot * table_stride + position // BLOCK, runs, 0)
    tl.store(ids + row, tl.load(tokens + slot * tokens_stride + position, runs, 0), is_row)
    tl.store(lengths + row, tl.where(runs, position + 1, 0), is_row)
    tl.store(places + row, tl.where(runs, block * BLOCK + position % BLOCK, -1), is_row)
    own = params + slot * PARAMS_SIZE
    is_long = position + 1 > max_short_prompt  # a row that samples has its whole prompt
    for axis in tl.static_range(AXES):
        rope = position + tl.load(own + ROPE + axis, runs, 0)
        tl.store(positions + axis * positions_stride + row, tl.where(is_long, -1 - rope, rope), is_row)


@triton.jit(do_not_specialize=["num_rows"])
def store_ids(out, slots, computed, tokens, num_rows, tokens_stride, SIZE: tl.constexpr):
    """Appends sampled ids, as `sampling.finish` writes them, to the tokens of their slots."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(slots + row, row < num_rows, -1).to(tl.int64)
    position = tl.load(computed + slot, slot >= 0, 0)
    tl.store(tokens + slot * tokens_stride + position, tl.load(out + 2 * row, slot >= 0, 0), slot >= 0)


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit(do_not_specialize=["num_rows", "num_items"])
def plan_rows(
    items, firsts, counts, lengths, num_rows, num_items,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TARGET: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Cuts the positions that all rows attend to into about TARGET items of one size, so that rows + TARGET items hold
    any lengths. Writes `items` as columns (row, begin, end, items of the row, begin of the row)."""
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, row < num_rows, 0)
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0) // TILE * TILE
    tiles = (length - begin + TILE - 1) // TILE
    size = tl.maximum((tl.sum(tiles, 0) + TARGET - 1) // TARGET, LEAST)
    count = (tiles + size - 1) // size
    last = tl.cumsum(count, 0)
    first = last - count
    item = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_own = (item[:, None] >= first[None, :]) & (item[:, None] < last[None, :])
    item_begin = begin[None, :] + (item[:, None] - first[None, :]) * size * TILE
    item_end = tl.minimum(item_begin + size * TILE, length[None, :])
    is_item = item < num_items
    tl.store(items + item, tl.sum(tl.where(is_own, row[None, :] + 1, 0), 1) - 1, is_item)
    tl.store(items + num_items + item, tl.sum(tl.where(is_own, item_begin, 0), 1), is_item)
    tl.store(items + 2 * num_items + item, tl.sum(tl.where(is_own, item_end, 0), 1), is_item)
    tl.store(items + 3 * num_items + item, tl.sum(tl.where(is_own, count[None, :], 0), 1), is_item)
    tl.store(items + 4 * num_items + item, tl.sum(tl.where(is_own, begin[None, :], 0), 1), is_item)
    if tl.program_id(0) == 0:
        tl.store(firsts + row, first, row < num_rows)
        tl.store(counts + row, count, row < num_rows)


@triton.jit
def load_blocks(table, at, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    if BLOCK % TILE == 0:  # a tile lies in one block
        blocks = tl.load(table + at // BLOCK, at < end, 0)
    else:
        position = at + tl.arange(0, TILE)
        blocks = tl.load(table + position // BLOCK, position < end, 0)
    return blocks.to(tl.int64)


@triton.jit
def attend_tiles(
    begin, end, limit, query0, query1, maximum, total, sum0, sum1, keys, values, own_table, kv_head, position, is_query,
    scale, softcap, key_stride, value_stride,
    BLOCK: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attends to the positions from `begin` to `end`, and continues the sums. Without MASKED every query attends to all
    of these positions, which are whole tiles. `limit`: the end of the item."""
    d0, e0 = tl.arange(0, K0), tl.arange(0, V0)
    if K1:
        d1 = K0 + tl.arange(0, K1)
    if V1:
        e1 = V0 + tl.arange(0, V1)
    next_block = load_blocks(own_table, begin, limit, BLOCK, TILE)
    for at in range(begin, end, TILE):
        key_position = at + tl.arange(0, TILE)
        block = next_block  # loaded one turn earlier: otherwise the pipeline of the compiler has one buffer less
        next_block = load_blocks(own_table, at + TILE, limit, BLOCK, TILE)
        place = block * BLOCK + key_position % BLOCK
        key_at = keys + place * key_stride + kv_head * K
        value_at = values + place * value_stride + kv_head * V
        is_key = key_position < limit
        if MASKED:
            key0 = tl.load(key_at[None, :] + d0[:, None], is_key[None, :] & (d0 < K)[:, None], 0.0)
        elif K0 > K:
            key0 = tl.load(key_at[None, :] + d0[:, None], (d0 < K)[:, None], 0.0)
        else:
            key0 = tl.load(key_at[None, :] + d0[:, None])
        score = tl.dot(query0, key0, input_precision="ieee")
        if K1:
            key1 = tl.load(key_at[None, :] + d1[:, None], is_key[None, :] & (d1 < K)[:, None], 0.0)
            score = tl.dot(query1, key1, score, input_precision="ieee")
        if SOFTCAP:  # tanh(x) as 1 - 2 / (exp(2x) + 1), which saturates
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (scale * 2.0 * LOG2E / softcap)) + 1.0)) * LOG2E
        else:
            score *= scale * LOG2E
        if MASKED:
            attends = is_query[:, None] & is_key[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOW:
                attends = attends & (key_position[None, :] > position[:, None] - WINDOW)
            score = tl.where(attends, score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        base = new_maximum
        if MASKED:
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(score - base[:, None])
        factor = tl.exp2(maximum - base)
        total = total * factor + tl.sum(weight, 1)
        maximum = new_maximum
        if MASKED:
            value0 = tl.load(value_at[:, None] + e0[None, :], is_key[:, None] & (e0 < V)[None, :], 0.0)
        elif V0 > V:
            value0 = tl.load(value_at[:, None] + e0[None, :], (e0 < V)[None, :], 0.0)
        else:
            value0 = tl.load(value_at[:, None] + e0[None, :])
        weight = weight.to(value0.dtype)
        sum0 = tl.dot(weight, value0, sum0 * factor[:, None], input_precision="ieee")
        if V1:
            value1 = tl.load(value_at[:, None] + e1[None, :], is_key[:, None] & (e1 < V)[None, :], 0.0)
            sum1 = tl.dot(weight, value1, sum1 * factor[:, None], input_precision="ieee")
    return maximum, total, sum0, sum1


@triton.jit(do_not_specialize=["num_items"])
def attend(
    queries, keys, values, out, parts, stats, sinks, items, first_queries, slots, starts, lengths, table, num_items,
    scale, softcap, query_stride, out_stride, key_stride, value_stride, table_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, IS_ROWS: tl.constexpr,
):  # fmt: skip
    """Attends with the queries of one item and one KV head. Strides are those of tokens: heads are contiguous.

    With IS_ROWS each row has one query, and items of a row with several items write parts for `merge`. Otherwise an
    item is (row, begin, end) and `first_queries`, and its row has all of its keys in this item. K = K0 + K1 at most,
    where both are powers of two, and so V.
    """
    item, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + item)
    if row < 0:
        return
    begin, end = tl.load(items + num_items + item), tl.load(items + 2 * num_items + item)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + row)
    m = tl.arange(0, M)
    head = kv_head * GROUPS + m % GROUPS
    if IS_ROWS:
        token = row.to(tl.int64) + m * 0
        is_query = m < GROUPS
        first_position = length - 1
        position = first_position + m * 0
    else:
        start = tl.load(starts + row)
        num_tokens = tl.load(starts + row + 1) - start
        first_query = tl.load(first_queries + item)
        query = first_query + m // GROUPS
        token = (start + query).to(tl.int64)
        is_query = (m < M // GROUPS * GROUPS) & (query < num_tokens)
        first_position = length - num_tokens + first_query
        position = length - num_tokens + query
        if WINDOW:  # no query of the item attends to earlier tiles
            begin = tl.maximum(first_position + 1 - WINDOW, begin) // TILE * TILE
    d0, e0 = tl.arange(0, K0), tl.arange(0, V0)
    query_at = queries + token[:, None] * query_stride + head[:, None] * K
    query0 = tl.load(query_at + d0[None, :], is_query[:, None] & (d0 < K)[None, :], 0.0)
    query1 = query0
    if K1:
        d1 = K0 + tl.arange(0, K1)
        query1 = tl.load(query_at + d1[None, :], is_query[:, None] & (d1 < K)[None, :], 0.0)
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        is_first = True
        if IS_ROWS:
            is_first = begin == tl.load(items + 4 * num_items + item)
        if is_first:
            maximum = tl.load(sinks + head, is_query, 0.0).to(tl.float32) * LOG2E
            total += 1.0
    sum0 = tl.zeros([M, V0], tl.float32)
    sum1 = sum0
    if V1:
        e1 = V0 + tl.arange(0, V1)
        sum1 = tl.zeros([M, V1], tl.float32)
    own_table = table + slot * table_stride
    masked_begin = begin
    if not WINDOW:  # whole tiles up to the first query are attended to by all queries
        masked_begin = begin + tl.maximum(tl.minimum(first_position + 1, end) - begin, 0) // TILE * TILE
        maximum, total, sum0, sum1 = attend_tiles(
            begin, masked_begin, end, query0, query1, maximum, total, sum0, sum1, keys, values, own_table, kv_head,
            position, is_query, scale, softcap, key_stride, value_stride, BLOCK, TILE, K, K0, K1, V, V0, V1, WINDOW,
            SOFTCAP, False,
        )  # fmt: skip
    maximum, total, sum0, sum1 = attend_tiles(
        masked_begin, end, end, query0, query1, maximum, total, sum0, sum1, keys, values, own_table, kv_head, position,
        is_query, scale, softcap, key_stride, value_stride, BLOCK, TILE, K, K0, K1, V, V0, V1, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    if IS_ROWS:
        if tl.load(items + 3 * num_items + item) > 1:
            part = item.to(tl.int64) * HEADS + head
            tl.store(stats + 2 * part, maximum, is_query)
            tl.store(stats + 2 * part + 1, total, is_query)
            part_at = parts + part[:, None] * V
            tl.store(part_at + e0[None, :], sum0, is_query[:, None] & (e0 < V)[None, :])
            if V1:
                tl.store(part_at + e1[None, :], sum1, is_query[:, None] & (e1 < V)[None, :])
            return
    share = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    out_at = out + token[:, None] * out_stride + head[:, None] * V
    tl.store(out_at + e0[None, :], (sum0 * share).to(out.dtype.element_ty), is_query[:, None] & (e0 < V)[None, :])
    if V1:
        tl.store(out_at + e1[None, :], (sum1 * share).to(out.dtype.element_ty), is_query[:, None] & (e1 < V)[None, :])


@triton.jit
def merge(out, parts, stats, firsts, counts, out_stride, V: tl.constexpr, VP: tl.constexpr, SIZE: tl.constexpr):
    """Adds up the parts of a row and a head. Rows of one item have written their result themselves."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = tl.load(counts + row)
    if count <= 1:
        return
    first = tl.load(firsts + row).to(tl.int64)
    e, p = tl.arange(0, VP), tl.arange(0, SIZE)
    maximum, total, result = float("-inf"), 0.0, tl.zeros([VP], tl.float32)
    for at in range(0, count, SIZE):
        is_part = at + p < count
        part = (first + at + p) * heads + head
        part_maximum = tl.load(stats + 2 * part, is_part, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        factor, old_factor = tl.exp2(part_maximum - base), tl.exp2(maximum - base)
        total = total * old_factor + tl.sum(tl.load(stats + 2 * part + 1, is_part, 0.0) * factor, 0)
        is_value = is_part[:, None] & (e < V)[None, :]
        part_sum = tl.load(parts + part[:, None] * V + e[None, :], is_value, 0.0)
        result = result * old_factor + tl.sum(part_sum * factor[:, None], 0)
        maximum = new_maximum
    tl.store(out + row.to(tl.int64) * out_stride + head * V + e, (result / total).to(out.dtype.element_ty), e < V)


# ── parts of a layer ─────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def normalize(x, weight, epsilon, size, ADDS_ONE: tl.constexpr):
    """Returns the RMS norm along the last axis, rounded as the modules of transformers round."""
    value = x.to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 1) / size + epsilon)[:, None]
    if ADDS_ONE:
        return (scaled * (1.0 + weight.to(tl.float32))).to(x.dtype)
    return (scaled.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def add_norm(
    x, residual, weight, out, x_stride, epsilon,
    SIZE: tl.constexpr, POWER: tl.constexpr, ADDS_ONE: tl.constexpr, HAS_X: tl.constexpr,
):  # fmt: skip
    """Adds `x` to the residual in place, and writes the RMS norm of the sum to `out`."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, POWER)
    is_value = d < SIZE
    value = tl.load(residual + token * SIZE + d, is_value, 0.0)
    if HAS_X:
        added = tl.load(x + token * x_stride + d, is_value, 0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + token * SIZE + d, value, is_value)
    factor = tl.load(weight + d, is_value, 0.0)
    normal = normalize(value[None, :], factor[None, :], epsilon, SIZE, ADDS_ONE)
    tl.store(out + token * SIZE + d[None, :], normal, is_value[None, :])


@triton.jit
def rotate(x, other, cos, sin, T: tl.constexpr):
    """Returns one half of rotated heads, rounded as the modules of transformers round: each product, then the sum."""
    return ((x.to(tl.float32) * cos).to(T).to(tl.float32) + (other.to(tl.float32) * sin).to(T).to(tl.float32)).to(T)


@triton.jit
def rotate_write(
    qkv, queries, keys, values, cos, sin, places, query_weight, key_weight, qkv_stride, key_stride, value_stride,
    epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, P: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the queries and keys of a token, and writes keys and values to their place of the cache.

    `qkv`: the projections [tokens, HEADS * K + KV_HEADS * K + KV_HEADS * V]. HALF = K / 2 is a power of two; P: the
    power of two from HEADS + KV_HEADS up.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    T: tl.constexpr = queries.dtype.element_ty
    h, d = tl.arange(0, P), tl.arange(0, HALF)
    is_head = (h < HEADS + KV_HEADS)[:, None]
    at = qkv + token * qkv_stride + h[:, None] * K + d[None, :]
    low, high = tl.load(at, is_head, 0.0), tl.load(at + HALF, is_head, 0.0)
    if HAS_NORM:
        low_value, high_value = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(low_value * low_value, 1) + tl.sum(high_value * high_value, 1)
        scale = tl.rsqrt(squares / K + epsilon)[:, None]
        is_query = (h < HEADS)[:, None]
        low_weight = tl.where(is_query, tl.load(query_weight + d)[None, :], tl.load(key_weight + d)[None, :])
        high_weight = tl.where(
            is_query, tl.load(query_weight + HALF + d)[None, :], tl.load(key_weight + HALF + d)[None, :]
        )
        if ADDS_ONE:
            low = (low_value * scale * (1.0 + low_weight.to(tl.float32))).to(T)
            high = (high_value * scale * (1.0 + high_weight.to(tl.float32))).to(T)
        else:
            low = ((low_value * scale).to(T).to(tl.float32) * low_weight.to(tl.float32)).to(T)
            high = ((high_value * scale).to(T).to(tl.float32) * high_weight.to(tl.float32)).to(T)
    cos_low = tl.load(cos + token * K + d).to(tl.float32)[None, :]
    cos_high = tl.load(cos + token * K + HALF + d).to(tl.float32)[None, :]
    sin_low = tl.load(sin + token * K + d).to(tl.float32)[None, :]
    sin_high = tl.load(sin + token * K + HALF + d).to(tl.float32)[None, :]
    new_low, new_high = rotate(low, high, cos_low, -sin_low, T), rotate(high, low, cos_high, sin_high, T)
    query_at = queries + (token * HEADS + h)[:, None] * K + d[None, :]
    tl.store(query_at, new_low, (h < HEADS)[:, None])
    tl.store(query_at + HALF, new_high, (h < HEADS)[:, None])
    if place < 0:
        return
    is_key = is_head & (h >= HEADS)[:, None]
    key_at = keys + place * key_stride + (h - HEADS)[:, None] * K + d[None, :]
    tl.store(key_at, new_low, is_key)
    tl.store(key_at + HALF, new_high, is_key)
    e = tl.arange(0, VP)
    value = tl.load(qkv + token * qkv_stride + (HEADS + KV_HEADS) * K + e, e < KV_HEADS * V, 0.0)
    tl.store(values + place * value_stride + e, value, e < KV_HEADS * V)


@triton.jit
def write_cache(
    key, value, keys, values, places, key_token_stride, value_token_stride, key_stride, value_stride,
    KEY_SIZE: tl.constexpr, KP: tl.constexpr, VALUE_SIZE: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Writes keys and values of a token, the heads of which are contiguous, to their place of the cache."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    if place < 0:
        return
    d, e = tl.arange(0, KP), tl.arange(0, VP)
    tl.store(
        keys + place * key_stride + d, tl.load(key + token * key_token_stride + d, d < KEY_SIZE, 0.0), d < KEY_SIZE
    )
    own = tl.load(value + token * value_token_stride + e, e < VALUE_SIZE, 0.0)
    tl.store(values + place * value_stride + e, own, e < VALUE_SIZE)


@triton.jit
def gate(x, out, x_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Writes silu(gate) * up of `x` [tokens, gate and up], rounded as the modules of transformers round."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate_value = tl.load(x + token * x_stride + d, d < SIZE, 0.0)
    up = tl.load(x + token * x_stride + SIZE + d, d < SIZE, 0.0)
    value = gate_value.to(tl.float32)
    silu = (value / (1.0 + tl.exp(-value))).to(x.dtype.element_ty)
    result = (silu.to(tl.float32) * up.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + d, result, d < SIZE)
