"""Triton kernels of a step on a CUDA device. None of them depends on the host, so all can be recorded in a graph.

Integers of tables are int32. A slot, a row or a place of -1 is padding: a kernel writes nothing for it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

TABLE: Any = tl.constexpr(0)  # kinds of writes of `write_state`
TOKENS: Any = tl.constexpr(1)
COMPUTED: Any = tl.constexpr(2)
ROWS: Any = tl.constexpr(3)
WRITE_FIELDS: Any = tl.constexpr(5)


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit(do_not_specialize=["count"])
def write_state(news, count, table, tokens, computed, rows, table_stride, tokens_stride, SIZE: tl.constexpr):
    """Writes the news of a step. `news`: `count` writes as columns (kind, slot, first, length, offset), then data."""
    write = tl.program_id(0)
    kind, slot = tl.load(news + write), tl.load(news + count + write).to(tl.int64)
    first, length = tl.load(news + 2 * count + write), tl.load(news + 3 * count + write)
    data = news + WRITE_FIELDS * count + tl.load(news + 4 * count + write)
    target = rows
    if kind == TABLE:
        target = table + slot * table_stride
    elif kind == TOKENS:
        target = tokens + slot * tokens_stride
    elif kind == COMPUTED:
        target = computed + slot
    for begin in range(0, length, SIZE):
        at = begin + tl.arange(0, SIZE)
        tl.store(target + first + at, tl.load(data + at, at < length, 0), at < length)


@triton.jit(do_not_specialize=["num_rows"])
def advance(
    rows, computed, table, tokens, ids, positions, lengths, places, num_rows, table_stride, tokens_stride,
    BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Begins a decode step: the id, the position and the place of each row's next token, and the row's length."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_row = row < num_rows
    slot = tl.load(rows + row, is_row, -1).to(tl.int64)
    runs = slot >= 0
    position = tl.load(computed + slot, runs, 0)
    tl.store(computed + slot, position + 1, runs)
    block = tl.load(table + slot * table_stride + position // BLOCK, runs, 0)
    tl.store(ids + row, tl.load(tokens + slot * tokens_stride + position, runs, 0), is_row)
    tl.store(positions + row, position, is_row)
    tl.store(lengths + row, tl.where(runs, position + 1, 0), is_row)
    tl.store(places + row, tl.where(runs, block * BLOCK + position % BLOCK, -1), is_row)


@triton.jit(do_not_specialize=["num_rows"])
def store_ids(ids, slots, computed, tokens, num_rows, tokens_stride, SIZE: tl.constexpr):
    """Appends sampled ids to the tokens of their slots."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(slots + row, row < num_rows, -1).to(tl.int64)
    position = tl.load(computed + slot, slot >= 0, 0)
    tl.store(tokens + slot * tokens_stride + position, tl.load(ids + row, slot >= 0, 0), slot >= 0)


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
