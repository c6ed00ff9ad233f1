"""Sampling by two kernels, for all rows of a step: greedy and random rows, with and without cuts.

`scan` reads the logits once and leaves, for each group of GROUP ids, the largest logit and the sum of the weights.
`finish` has one program a row and reads only the groups that can hold the answer. The weight of an id is
`exp((logit - largest) / temperature)`. A cut is the least logit that `top_k` and `top_p` keep. The kernels search
the cut in the order-preserving integers of the logits (`_key`), from a bound that follows from the groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)  # ids
LISTED: tl.constexpr = tl.constexpr(16)  # groups that a program reads at a time
MAX_CANDIDATES: tl.constexpr = tl.constexpr(4096)  # logits that a program holds in registers to search a cut
DEVIATIONS: tl.constexpr = tl.constexpr(5.0)  # of a sample's estimate, in which the cut is looked for
PASS: tl.constexpr = tl.constexpr(2048)  # ids that a program reads at a time
GREEDY: tl.constexpr = tl.constexpr(1e-5)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # the key of -inf
SLACK: tl.constexpr = tl.constexpr(4e-6)  # of a row's sum of weights: more than rounding can add to a bound


# ── logits, their keys and their weights ─────────────────────────────────────────────────────────────────────────────
@triton.jit
def _read(at, is_there):
    """Reads logits as float32. NaN becomes infinity, which fails the row as well."""
    x = tl.load(at, is_there, float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Returns integers in the order of `x`. SHIFT: trailing bits of a float32 that the type of the logits lacks."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    key = key << SHIFT
    return (((key ^ ((key >> 31) & 0x7FFFFFFF)) >> SHIFT) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, scale):
    return tl.exp2((x - largest) * scale)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


# ── lower bounds of a cut, from the groups alone ─────────────────────────────────────────────────────────────────────
@triton.jit
def _bound_of_top_k(keys, k, low, high, SHIFT: tl.constexpr):
    """Returns a key with at least `k` groups above: so many ids are above, too."""
    while high.to(tl.int64) - low > (1023 >> SHIFT) + 1:
        middle = _middle(low, high)
        is_below = tl.sum((keys > middle).to(tl.int32), 0) >= k
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _bound_of_top_p(keys, sums, parts, rest, largest, scale, low, high, SHIFT: tl.constexpr):
    """Returns a key such that the ids up to it weigh less than `rest`. `parts`: the weights of the largest ids."""
    others = tl.maximum(sums - parts, 0.0)
    while high.to(tl.int64) - low > (1023 >> SHIFT) + 1:
        middle = _middle(low, high)
        weight = _weight(_value(middle, SHIFT), largest, scale)
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
def _listed_logits(logits, listed, at, size, n):
    """Returns the numbers and logits of LISTED groups of the list, from `at` on."""
    place = at + tl.arange(0, LISTED)
    group = tl.load(listed + place, place < size, 0.0).to(tl.int32)
    v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return group, _read(logits + v, (place < size)[:, None] & (v < n))


@triton.jit
def _weigh(logits, listed, sums, keys, largest, scale, low, least, n, GROUPS: tl.constexpr, SHIFT: tl.constexpr):
    """Stores the weight of each group's ids above `low` that weigh `least`. Returns the number and weight of all."""
    size = _list(listed, keys, low, GROUPS)
    count, whole, at = tl.zeros([], tl.int32), tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    group, x = _listed_logits(logits, listed, at, size, n)
    while at < size:
        next_group, next_x = _listed_logits(logits, listed, at + LISTED, size, n)
        weight = _weight(x, largest, scale)
        is_kept = (_key(x, SHIFT) > low) & (weight >= least)
        weight = tl.where(is_kept, weight, 0.0)
        part = tl.sum(weight, 1)
        tl.store(sums + group, part, at + tl.arange(0, LISTED) < size)
        count += tl.sum(tl.sum(is_kept.to(tl.int32), 1), 0)
        whole += tl.sum(part.to(tl.float64), 0)
        group, x = next_group, next_x
        at += LISTED
    tl.debug_barrier()
    return count, whole


@triton.jit
def _gather(logits, listed, size, candidates, low, high, n, SHIFT: tl.constexpr):
    """Stores logits above `low`, up to `high`, of `size` groups. Returns their number; stops above MAX_CANDIDATES."""
    count, at = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    _, x = _listed_logits(logits, listed, at, size, n)
    while (at < size) & (count <= MAX_CANDIDATES):
        _, next_x = _listed_logits(logits, listed, at + LISTED, size, n)
        key = _key(x, SHIFT)
        is_kept = ((key > low) & (key <= high)).to(tl.int32)
        counts = tl.sum(is_kept, 1)
        first = count + tl.cumsum(counts, 0) - counts
        place = first[:, None] + tl.cumsum(is_kept, 1) - 1
        tl.store(candidates + place, x, (is_kept != 0) & (place < MAX_CANDIDATES))
        count += tl.sum(counts, 0)
        x = next_x
        at += LISTED
    tl.debug_barrier()
    return count


# ── the search of a cut ──────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _level(key, measure, part, low, high):
    """Returns the largest key from `low` to `high` up to which the sample measures at most `part`."""
    while _middle(low, high) > low:
        middle = _middle(low, high)
        is_below = tl.sum(tl.sum(tl.where(key <= middle, measure, 0.0), 1), 0) <= part
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _estimate(logits, listed, size, largest, scale, low, high, rest, n, MASS: tl.constexpr, SHIFT: tl.constexpr):
    """Returns two keys that probably enclose the cut, by a sample of the listed groups. `rest`: what they measure up to
    the cut."""
    group = tl.load(listed + tl.arange(0, LISTED) * size // LISTED).to(tl.int32)
    v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _read(logits + v, v < n)
    key = _key(x, SHIFT)
    measure = _weight(x, largest, scale) if MASS else tl.full([LISTED, GROUP], 1.0, tl.float32)
    part = tl.maximum(rest, 0.0) * LISTED / size
    unit = tl.full([], 1.0, tl.float32)
    if MASS:
        unit = _weight(_value(_level(key, measure, part, low, high), SHIFT), largest, scale)
    error = DEVIATIONS * (tl.sqrt(part * unit) + unit)
    return _level(key, measure, part - error, low, high), _level(key, measure, part + error, low, high) + 1


@triton.jit
def _closer(bound, total, low, high, above, limit):
    is_less = total < limit
    above = tl.where(is_less & (bound < high), total, above)
    return tl.where(is_less, low, tl.maximum(low, bound)), tl.where(is_less, tl.minimum(high, bound), high), above


@triton.jit
def _narrow(
    logits, largest, scale, low, high, above, limit, first, last, n, MASS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Tries keys from `first` to `last` in a pass over the row. Returns closer `low`, `high` and `above`."""
    lowest, highest = tl.maximum(_value(first, SHIFT), -3e38), _value(last, SHIFT)
    bound0 = tl.minimum(tl.maximum(first, low + 1), high)
    bound1 = tl.minimum(tl.maximum(_key(lowest + (highest - lowest) * 0.33, SHIFT), bound0), high)
    bound2 = tl.minimum(tl.maximum(_key(lowest + (highest - lowest) * 0.5, SHIFT), bound0), high)
    bound3 = tl.minimum(tl.maximum(_key(lowest + (highest - lowest) * 0.67, SHIFT), bound0), high)
    bound4 = tl.minimum(tl.maximum(last, bound0), high)
    v = tl.arange(0, PASS)
    total0, total1, total2 = tl.zeros([PASS], tl.float32), tl.zeros([PASS], tl.float32), tl.zeros([PASS], tl.float32)
    total3, total4 = tl.zeros([PASS], tl.float32), tl.zeros([PASS], tl.float32)
    x = _read(logits + v, v < n)
    for at in range(0, n, PASS):
        next_x = _read(logits + at + PASS + v, at + PASS + v < n)
        key = _key(x, SHIFT)
        measure = _weight(x, largest, scale) if MASS else tl.full([PASS], 1.0, tl.float32)
        total0 += tl.where(key > bound0, measure, 0.0)
        total1 += tl.where(key > bound1, measure, 0.0)
        total2 += tl.where(key > bound2, measure, 0.0)
        total3 += tl.where(key > bound3, measure, 0.0)
        total4 += tl.where(key > bound4, measure, 0.0)
        x = next_x
    low, high, above = _closer(bound0, tl.sum(total0, 0), low, high, above, limit)
    low, high, above = _closer(bound1, tl.sum(total1, 0), low, high, above, limit)
    low, high, above = _closer(bound2, tl.sum(total2, 0), low, high, above, limit)
    low, high, above = _closer(bound3, tl.sum(total3, 0), low, high, above, limit)
    return _closer(bound4, tl.sum(total4, 0), low, high, above, limit)


@triton.jit
def _cut(
    logits, listed, candidates, keys, weights, largest, scale, low, high, limit, n,
    MASS: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Returns the least key above `low` that has less than `limit` above: ids, or (MASS) weight."""
    above, passes = tl.zeros([], tl.float32), tl.zeros([], tl.int32)  # `above`: what is above `high`
    size, count = tl.zeros([], tl.int32), tl.full([], MAX_CANDIDATES + 1, tl.int32)
    while (count > MAX_CANDIDATES) & (_middle(low, high) > low):
        if passes > 0:
            first = (low + (high.to(tl.int64) - low) // 3).to(tl.int32)
            last = (high - (high.to(tl.int64) - low) // 3).to(tl.int32)
            if passes % 2 == 1:
                rest = (tl.sum(tl.where(keys > low, weights, 0.0), 0) if MASS else 1.0 * size * GROUP) - limit
                first, last = _estimate(logits, listed, size, largest, scale, low, high, rest, n, MASS, SHIFT)
            low, high, above = _narrow(logits, largest, scale, low, high, above, limit, first, last, n, MASS, SHIFT)
        size = _list(listed, keys, low, GROUPS)
        count = _gather(logits, listed, size, candidates, low, high, n, SHIFT)
        passes += 1
    place = tl.arange(0, MAX_CANDIDATES)
    x = tl.load(candidates + place, place < count, float("-inf"))
    key = _key(x, SHIFT)
    measure = _weight(x, largest, scale) if MASS else tl.full([MAX_CANDIDATES], 1.0, tl.float32)
    while _middle(low, high) > low:
        middle = _middle(low, high)
        is_less = above + tl.sum(tl.where(key > middle, measure, 0.0), 0) < limit
        high = tl.where(is_less, middle, high)
        low = tl.where(is_less, low, middle)
    return high


# ── a row's draw ─────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _uniform(seed, count):
    """Returns the number that the sampler's `_uniforms` returns: 23 bits of splitmix64."""
    mixed = seed.to(tl.uint64, bitcast=True) + (count.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed >> 41).to(tl.int64).to(tl.float32) * (1.0 / 8388608.0)


@triton.jit
def _lowest_kept(
    logits, listed, candidates, sums, keys, weights, largest, scale, k, p, least, n,
    GROUPS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Returns a key: the ids above are candidates, by `top_k` and `top_p`, and (nearly) by `min_p`."""
    high = tl.max(keys, 0)
    low = tl.full([], LOWEST >> SHIFT, tl.int32)
    if least > 0:
        low = tl.maximum(low, _key(largest + (tl.log2(least) - 0.01) / scale, SHIFT) - 1)
    cut = low
    whole = tl.sum(weights.to(tl.float64), 0)
    if k < n:
        bound = _bound_of_top_k(keys, k, tl.full([], LOWEST >> SHIFT, tl.int32), high, SHIFT)
        limit = k.to(tl.float32)
        last = _cut(
            logits, listed, candidates, keys, weights, largest, scale, bound, high, limit, n, False, GROUPS, SHIFT
        )
        cut = tl.maximum(cut, last - 1)
        if p < 1:
            count, above = _weigh(logits, listed, sums, keys, largest, scale, last, 0.0, n, GROUPS, SHIFT)
            whole = above + (_weight(_value(last, SHIFT), largest, scale) * (k - count)).to(tl.float64)
    if p < 1:
        all_weigh = tl.sum(weights, 0)
        rest = (1.0 - p - SLACK) * all_weigh
        bound = tl.full([], LOWEST >> SHIFT, tl.int32)
        if rest > 0:
            bound = tl.maximum(bound, _key(largest + (tl.log2(rest / n) - 0.01) / scale, SHIFT))
            parts = _weight(tl.where(keys > bound, _value(keys, SHIFT), float("-inf")), largest, scale)
            bound = _bound_of_top_p(keys, weights, parts, rest, largest, scale, bound, high, SHIFT)
        bound = tl.maximum(bound, cut)
        if bound < high:
            limit = p * whole.to(tl.float32)
            last = _cut(
                logits, listed, candidates, keys, weights, largest, scale, bound, high, limit, n, True, GROUPS, SHIFT
            )
            cut = tl.maximum(cut, last - 1)
    return cut


@triton.jit
def _draw(
    logits, temperature, k, p, least, uniform, scratch, maxima, largest, n,
    GROUPS: tl.constexpr, SHIFT: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    scale = LOG2E / temperature
    g, v = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    sums = scratch + GROUPS
    weights = tl.load(sums + g, maxima > float("-inf"), 0.0) * _weight(maxima, largest, scale)
    low = tl.full([], LOWEST >> SHIFT, tl.int32)
    if CUT:
        if (k < n) | (p < 1) | (least > 0):
            keys = _key(maxima, SHIFT)
            listed, candidates = sums + GROUPS, sums + 2 * GROUPS
            low = _lowest_kept(
                logits, listed, candidates, sums, keys, weights, largest, scale, k, p, least, n, GROUPS, SHIFT
            )
            _weigh(logits, listed, sums, keys, largest, scale, low, least, n, GROUPS, SHIFT)
            weights = tl.load(sums + g, keys > low, 0.0)
    exact = weights.to(tl.float64)
    target = uniform * tl.sum(exact, 0).to(tl.float32)
    group = tl.sum((tl.cumsum(exact, 0).to(tl.float32) <= target).to(tl.int32), 0)
    group = tl.minimum(group, tl.max(tl.where(weights > 0, g, 0), 0))
    before = tl.sum(tl.where(g < group, exact, 0.0), 0)
    x = _read(logits + group * GROUP + v, group * GROUP + v < n)
    weight = _weight(x, largest, scale)
    if CUT:
        weight = tl.where((_key(x, SHIFT) > low) & (weight >= least), weight, 0.0)
    passed = tl.sum(((before + tl.cumsum(weight.to(tl.float64), 0)).to(tl.float32) <= target).to(tl.int32), 0)
    first, last = tl.min(tl.where(weight > 0, v, GROUP), 0), tl.max(tl.where(weight > 0, v, 0), 0)
    return group * GROUP + tl.minimum(tl.maximum(passed, first), last)  # never an id that weighs nothing


# ── the two kernels ──────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def scan(logits, row_params, scratch, n, stride, GROUPS: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
         RANDOM: tl.constexpr):  # fmt: skip
    """Stores the largest logit of each of S groups, and how much the ids of the group weigh beside that."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * S + tl.arange(0, S)
    v = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _read(logits + row * stride + v, v < n)
    largest = tl.max(x, 1)
    scratch += row * WIDTH
    tl.store(scratch + group, largest, group < GROUPS)
    if RANDOM:
        temperature = tl.load(row_params + row)
        if temperature >= GREEDY:
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.sum(_weight(x, base[:, None], LOG2E / temperature), 1)
            tl.store(scratch + GROUPS + group, weights, group < GROUPS)


@triton.jit(do_not_specialize=["params_stride"])  # the number of rows
def finish(
    logits, row_params, draws, counts, scratch, ids, is_failed, n, stride, params_stride,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, RANDOM: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Chooses the id of a row. A row of `scratch`: of GROUPS groups the largest logits, the weights and a list of
    numbers, then MAX_CANDIDATES logits. With `counts`, `draws` are seeds."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scratch += row * WIDTH
    g, v = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    maxima = tl.load(scratch + g, g < (n + GROUP - 1) // GROUP, float("-inf"))
    largest = tl.max(maxima, 0)
    fails = tl.abs(largest) == float("inf")
    is_greedy = True
    if RANDOM:
        temperature = tl.load(row_params + row)
        is_greedy = temperature < GREEDY
    if fails:
        best = tl.zeros([], tl.int32)
    elif is_greedy:
        group = tl.min(tl.where(maxima == largest, g, GROUPS), 0)
        x = _read(logits + group * GROUP + v, group * GROUP + v < n)
        best = group * GROUP + tl.min(tl.where(x == largest, v, GROUP), 0)
    else:
        best = tl.zeros([], tl.int32)
        if RANDOM:
            uniform = tl.load(draws + row) if counts is None else _uniform(tl.load(draws + row), tl.load(counts + row))
            k, p, least = n, 1.0, 0.0
            if CUT:
                param = row_params + row + params_stride
                k = tl.load(param).to(tl.int32)
                p, least = tl.load(param + params_stride), tl.load(param + 2 * params_stride)
            best = _draw(logits, temperature, k, p, least, uniform, scratch, maxima, largest, n, GROUPS, SHIFT, CUT)
    tl.store(ids + row, best)
    tl.store(is_failed + row, fails)
