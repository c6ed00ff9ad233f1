"""Sampling by two kernels, for all rows of a step: greedy and random rows, with and without cuts and penalties.

`scan` reads the logits once and leaves, for each group of GROUP ids, the largest logit and the sum of the weights.
`finish` has one program a row and reads only the groups that can hold the answer. The weight of an id is
`exp((logit - largest) / temperature)`. A cut is the least logit that `top_k` and `top_p` keep. The kernels search
the cut in the order-preserving integers of the logits (`_key`), from a bound that follows from the groups.

Parameters are read by slot, so a graph holds for all parameters. Penalties are applied whenever a logit is read: the
argument `row` of most functions has pointers to a row's logits, counts and parameters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.worker import sampler
from penstock.engine.worker.cuda.kernels import (
    FREQUENCY,
    IN_PROMPT,
    IS_PENALIZED,
    MIN_P,
    PARAMS_SIZE,
    PRESENCE,
    PROMPT_SIZE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

GROUP: tl.constexpr = tl.constexpr(128)  # ids
LISTED: tl.constexpr = tl.constexpr(16)  # groups that a program reads at a time
MAX_KEPT: tl.constexpr = tl.constexpr(8192)  # logits that a program holds in registers to search a cut
BOUNDS: tl.constexpr = tl.constexpr(8)  # that a pass over a row tries at a time
PASS: tl.constexpr = tl.constexpr(1024)  # ids of a step of such a pass
GREEDY: tl.constexpr = tl.constexpr(sampler.GREEDY)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # the key of -inf
SLACK: tl.constexpr = tl.constexpr(4e-6)  # of a row's sum of weights: more than rounding can add to a bound


# ── logits, their keys and their weights ─────────────────────────────────────────────────────────────────────────────
@triton.jit
def _param(params, column: tl.constexpr):
    return tl.load(params + column).to(tl.float32, bitcast=True)


@triton.jit
def _row_of(logits, counts, params):
    return logits, counts, params, tl.load(params + IS_PENALIZED) != 0


@triton.jit
def _read(row, v, is_there):
    """Reads the logits of ids as float32, with penalties. NaN becomes infinity, which fails the row as well."""
    x = tl.load(row[0] + v, is_there, float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    if row[3]:
        x = _penalized(x, tl.load(row[1] + v, is_there, 0), row[2])
    return x


@triton.jit
def _penalized(x, counts, params):
    """Rounds as the sampler does: launches turn fused operations off."""
    repetition = _param(params, REPETITION)
    x = tl.where(counts == 0, x, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition))
    counts = counts & (IN_PROMPT - 1)
    x -= _param(params, FREQUENCY) * counts.to(tl.float32)
    return x - tl.where(counts > 0, _param(params, PRESENCE), 0.0)


@triton.jit
def _lowest(shift):
    return (tl.zeros_like(shift) + LOWEST) >> shift


@triton.jit
def _key(x, shift):
    """Returns integers in the order of `x`. `shift`: trailing bits of a float32 that no logit of the row has."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def _value(key, shift):
    key = key << shift
    return (((key ^ ((key >> 31) & 0x7FFFFFFF)) >> shift) << shift).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, scale):
    return tl.exp2((x - largest) * scale)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


# ── lower bounds of a cut, from the groups alone ─────────────────────────────────────────────────────────────────────
@triton.jit
def _bound_of_top_k(keys, k, low, high, shift):
    """Returns a key with at least `k` groups above: so many ids are above, too."""
    while high.to(tl.int64) - low > (1023 >> shift) + 1:
        middle = _middle(low, high)
        is_below = tl.sum((keys > middle).to(tl.int32), 0) >= k
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _bound_of_top_p(keys, sums, parts, rest, largest, scale, low, high, shift):
    """Returns a key such that the ids up to it weigh less than `rest`. `parts`: the weights of the largest ids."""
    others = tl.maximum(sums - parts, 0.0)
    while high.to(tl.int64) - low > (1023 >> shift) + 1:
        middle = _middle(low, high)
        weight = _weight(_value(middle, shift), largest, scale)
        most = tl.where(keys > middle, tl.minimum(others, (GROUP - 1) * weight), sums)
        is_below = tl.sum(most, 0) <= rest
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


# ── passes over a row ────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _list(listed, keys, low, GROUPS: tl.constexpr):
    """Lists the groups with an id above `low`, in their order, and returns how many there are."""
    is_listed = (keys > low).to(tl.int32)
    tl.debug_barrier()  # the list before has been read
    tl.store(listed + tl.cumsum(is_listed, 0) - 1, tl.arange(0, GROUPS).to(tl.float32), is_listed != 0)
    tl.debug_barrier()
    return tl.sum(is_listed, 0)


@triton.jit
def _listed_logits(row, listed, at, size, n):
    place = at + tl.arange(0, LISTED)
    group = tl.load(listed + place, place < size, 0.0).to(tl.int32)
    v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return group, _read(row, v, (place < size)[:, None] & (v < n))


@triton.jit
def _weigh(row, listed, sums, keys, largest, scale, low, least, n, shift, GROUPS: tl.constexpr):
    """Stores the weight of each group's ids above `low` that weigh `least`. Returns the number and weight of all."""
    size = _list(listed, keys, low, GROUPS)
    count, whole, at = tl.zeros([], tl.int32), tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    while at < size:
        group, x = _listed_logits(row, listed, at, size, n)
        weight = _weight(x, largest, scale)
        is_kept = (_key(x, shift) > low) & (weight >= least)
        weight = tl.where(is_kept, weight, 0.0)
        part = tl.sum(weight, 1)
        tl.store(sums + group, part, at + tl.arange(0, LISTED) < size)
        count += tl.sum(tl.sum(is_kept.to(tl.int32), 1), 0)
        whole += tl.sum(part.to(tl.float64), 0)
        at += LISTED
    tl.debug_barrier()
    return count, whole


@triton.jit
def _gather(row, listed, candidates, keys, low, high, n, shift, GROUPS: tl.constexpr):
    """Stores the logits above `low`, up to `high`. Returns how many there are; more than MAX_KEPT: at least so many."""
    listed_groups = _list(listed, keys, low, GROUPS)
    size, at = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while (at < listed_groups) & (size <= MAX_KEPT):
        _, x = _listed_logits(row, listed, at, listed_groups, n)
        x = tl.reshape(x, [LISTED * GROUP])
        key = _key(x, shift)
        is_kept = ((key > low) & (key <= high)).to(tl.int32)
        place = size + tl.cumsum(is_kept, 0) - 1
        tl.store(candidates + place, x, (is_kept != 0) & (place < MAX_KEPT))
        size += tl.sum(is_kept, 0)
        at += LISTED
    tl.debug_barrier()
    return size


@triton.jit
def _narrow(row, largest, scale, low, high, above, limit, is_linear, n, shift, MASS: tl.constexpr):
    """Tries BOUNDS keys between `low` and `high` in a pass over the row. Returns closer `low`, `high` and `above`."""
    step = tl.arange(0, BOUNDS) + 1
    first, last = tl.maximum(_value(low, shift), -3e38), _value(high, shift)
    linear = _key(first + (last - first) * (step.to(tl.float32) / (BOUNDS + 1)), shift)
    width = high.to(tl.int64) - low
    even = (low + width * step // (BOUNDS + 1)).to(tl.int32)
    bounds = tl.where(is_linear, tl.minimum(tl.maximum(linear, low), high), even)
    total = tl.zeros([PASS, BOUNDS], tl.float32)
    v = tl.arange(0, PASS)
    for at in range(0, n, PASS):
        x = _read(row, at + v, at + v < n)
        measure = _weight(x, largest, scale) if MASS else tl.full([PASS], 1.0, tl.float32)
        total += tl.where(_key(x, shift)[:, None] > bounds[None, :], measure[:, None], 0.0)
    sums = tl.sum(total, 0)
    is_less = sums < limit
    above = tl.max(tl.where(is_less & (bounds < high), sums, above), 0)
    return tl.max(tl.where(is_less, low, bounds), 0), tl.min(tl.where(is_less, bounds, high), 0), above


@triton.jit
def _cut(
    row, listed, candidates, keys, largest, scale, low, high, limit, n,
    shift, MASS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns the least key above `low` that has less than `limit` above: ids, or (MASS) weight."""
    above = tl.zeros([], tl.float32)  # what is above `high`
    is_linear = True
    size = _gather(row, listed, candidates, keys, low, high, n, shift, GROUPS)
    while (size > MAX_KEPT) & (_middle(low, high) > low):
        low, high, above = _narrow(row, largest, scale, low, high, above, limit, is_linear, n, shift, MASS)
        size = _gather(row, listed, candidates, keys, low, high, n, shift, GROUPS)
        is_linear = is_linear == False  # noqa: E712  (the compiler has no `not` of a tensor)
    place = tl.arange(0, MAX_KEPT)
    x = tl.load(candidates + place, place < tl.minimum(size, MAX_KEPT), float("-inf"))
    key = tl.where(place < size, _key(x, shift), _lowest(shift))
    measure = _weight(x, largest, scale) if MASS else tl.full([MAX_KEPT], 1.0, tl.float32)
    while _middle(low, high) > low:
        middle = _middle(low, high)
        is_less = above + tl.sum(tl.where(key > middle, measure, 0.0), 0) < limit
        high = tl.where(is_less, middle, high)
        low = tl.where(is_less, low, middle)
    return high


# ── a row's draw ─────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _uniform(params, computed):
    """Returns the number that the sampler's `_uniforms` returns: 23 bits of splitmix64."""
    low = tl.load(params + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (tl.load(params + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    count = (computed - tl.load(params + PROMPT_SIZE)).to(tl.uint64)
    mixed = seed + (count + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed >> 41).to(tl.int64).to(tl.float32) * (1.0 / 8388608.0)


@triton.jit
def _lowest_kept(
    row, listed, candidates, sums, keys, weights, largest, scale, k, p, least, n,
    shift, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns a key: the ids above are candidates, by `top_k` and `top_p`, and (nearly) by `min_p`."""
    high = tl.max(keys, 0)
    low = _lowest(shift)
    if least > 0:
        low = tl.maximum(low, _key(largest + (tl.log2(least) - 0.01) / scale, shift) - 1)
    cut = low
    whole = tl.sum(weights.to(tl.float64), 0)
    if k < n:
        bound = _bound_of_top_k(keys, k, _lowest(shift), high, shift)
        last = _cut(row, listed, candidates, keys, largest, scale, bound, high, k, n, shift, False, GROUPS)
        cut = tl.maximum(cut, last - 1)
        if p < 1:
            count, above = _weigh(row, listed, sums, keys, largest, scale, last, 0.0, n, shift, GROUPS)
            whole = above + (_weight(_value(last, shift), largest, scale) * (k - count)).to(tl.float64)
    if p < 1:
        all_weigh = tl.sum(weights, 0)
        rest = (1.0 - p - SLACK) * all_weigh
        bound = _lowest(shift)
        if rest > 0:
            bound = tl.maximum(bound, _key(largest + (tl.log2(rest / n) - 0.01) / scale, shift))
            parts = _weight(tl.where(keys > bound, _value(keys, shift), float("-inf")), largest, scale)
            bound = _bound_of_top_p(keys, weights, parts, rest, largest, scale, bound, high, shift)
        bound = tl.maximum(bound, cut)
        if bound < high:
            limit = p * whole.to(tl.float32)
            last = _cut(row, listed, candidates, keys, largest, scale, bound, high, limit, n, shift, True, GROUPS)
            cut = tl.maximum(cut, last - 1)
    return cut


@triton.jit
def _draw(
    row, temperature, k, p, least, uniform, scratch, maxima, largest, n,
    shift, GROUPS: tl.constexpr,
):  # fmt: skip
    scale = LOG2E / temperature
    g, v = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    sums = scratch + GROUPS
    weights = tl.load(sums + g, maxima > float("-inf"), 0.0) * _weight(maxima, largest, scale)
    low = _lowest(shift)
    if (k < n) | (p < 1) | (least > 0):
        keys = _key(maxima, shift)
        listed, candidates = sums + GROUPS, sums + 2 * GROUPS
        low = _lowest_kept(row, listed, candidates, sums, keys, weights, largest, scale, k, p, least, n, shift, GROUPS)
        _weigh(row, listed, sums, keys, largest, scale, low, least, n, shift, GROUPS)
        weights = tl.load(sums + g, keys > low, 0.0)
    exact = weights.to(tl.float64)
    target = uniform * tl.sum(exact, 0).to(tl.float32)
    group = tl.sum((tl.cumsum(exact, 0).to(tl.float32) <= target).to(tl.int32), 0)
    group = tl.minimum(group, tl.max(tl.where(weights > 0, g, 0), 0))
    before = tl.sum(tl.where(g < group, exact, 0.0), 0)
    x = _read(row, group * GROUP + v, group * GROUP + v < n)
    weight = _weight(x, largest, scale)
    weight = tl.where((_key(x, shift) > low) & (weight >= least), weight, 0.0)
    passed = tl.sum(((before + tl.cumsum(weight.to(tl.float64), 0)).to(tl.float32) <= target).to(tl.int32), 0)
    first, last = tl.min(tl.where(weight > 0, v, GROUP), 0), tl.max(tl.where(weight > 0, v, 0), 0)
    return group * GROUP + tl.minimum(tl.maximum(passed, first), last)  # never an id that weighs nothing


# ── the two kernels ──────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def scan(
    logits, slots, params, counts, scratch, n, stride, GROUPS: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Stores the largest logit of each of S groups, and how much the ids of the group weigh beside that."""
    place = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + place).to(tl.int64)
    if slot < 0:
        return
    params += slot * PARAMS_SIZE
    row = _row_of(logits + place * stride, counts + slot * n, params)
    group = tl.program_id(0) * S + tl.arange(0, S)
    v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _read(row, v, v < n)
    largest = tl.max(x, 1)
    scratch += place * WIDTH
    tl.store(scratch + group, largest, group < GROUPS)
    temperature = _param(params, TEMPERATURE)
    if temperature >= GREEDY:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.sum(_weight(x, base[:, None], LOG2E / temperature), 1)
        tl.store(scratch + GROUPS + group, weights, group < GROUPS)


@triton.jit
def finish(
    logits, slots, params, counts, computed, scratch, out, n, stride,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Writes the id of a row, and whether the row fails. A row of `scratch`: of GROUPS groups the largest logits, the
    weights and a list of numbers, then MAX_KEPT logits. SHIFT: trailing bits of a float32 that logits lack."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + place).to(tl.int64)
    if slot < 0:
        return
    params += slot * PARAMS_SIZE
    row = _row_of(logits + place * stride, counts + slot * n, params)
    scratch += place * WIDTH
    g, v = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    maxima = tl.load(scratch + g, g < (n + GROUP - 1) // GROUP, float("-inf"))
    largest = tl.max(maxima, 0)
    fails = tl.abs(largest) == float("inf")
    temperature = _param(params, TEMPERATURE)
    if fails:
        best = tl.zeros([], tl.int32)
    elif temperature < GREEDY:
        group = tl.min(tl.where(maxima == largest, g, GROUPS), 0)
        x = _read(row, group * GROUP + v, group * GROUP + v < n)
        best = group * GROUP + tl.min(tl.where(x == largest, v, GROUP), 0)
    else:
        uniform = _uniform(params, tl.load(computed + slot))
        k, p, least = tl.load(params + TOP_K), _param(params, TOP_P), _param(params, MIN_P)
        shift = tl.where(row[3], 0, SHIFT)  # penalties have results with all bits
        best = _draw(row, temperature, k, p, least, uniform, scratch, maxima, largest, n, shift, GROUPS)
    tl.store(out + 2 * place, best)
    tl.store(out + 2 * place + 1, fails.to(tl.int32))
    if row[3]:
        tl.debug_barrier()  # counts have been read
        at = counts + slot * n + best
        tl.store(at, tl.load(at) + 1)
