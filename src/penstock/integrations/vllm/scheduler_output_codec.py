"""A SchedulerOutput as a change of the expected next step.

The expectation repeats the requests of the last step in order, each with as many scheduled tokens: computed tokens grow
by the scheduled tokens, and output tokens by one. A change has all differences from the expectation; a step that has no
such change is sent whole. Writer and reader compute the next expectation from each step, so no expectation is sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from penstock.codec.sequence import Sequenced
from penstock.integrations.vllm.plain_fields import Extras, PlainChanges, PlainFields
from penstock.integrations.vllm.row_runs import Runs, apply_runs, find_runs

Sums = np.ndarray[Any, Any]

EXECUTE_MODEL = "execute_model"
STEP_ROWS = ("scheduled_cached_reqs", "num_scheduled_tokens")
CACHED_ROWS = ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
NEW_REQUESTS = "scheduled_new_reqs"
USUAL_COUNT = 1  # tokens scheduled for a request that decodes
UNKNOWN = np.zeros((2, 1), np.int64)  # sums of a request that was not in the last step


class SchedulerChange(Sequenced, tag=1, frozen=True, eq=False):
    """How a SchedulerOutput differs from what was expected."""

    output_rank: int | None
    rows: Runs | None  # the cached requests as runs of the expected requests
    order: Runs | None  # of num_scheduled_tokens, as runs of the cached and then the new requests
    counts: list[int]  # scheduled tokens that differ: row, count, row, count …
    sums: list[int]  # row, difference of computed tokens, of output tokens …
    blocks: list[tuple[int, tuple[list[int], ...]]]
    plain: PlainChanges


class ExpectedStep(NamedTuple):
    """The expected next step. The lists are never handed out."""

    ids: list[str]
    counts: list[int]
    counts_by_id: dict[str, int]
    sums: Sums  # (2, rows): computed tokens, output tokens
    growth: Sums  # of the sums in each further step
    plain: PlainFields


class SchedulerOutputCodec:
    """Makes changes of steps and steps of changes; keeps no state."""

    def __init__(self, step_class: type, cached_class: type) -> None:
        self._step_class = step_class
        self._cached_class = cached_class
        step_fields = [field.name for field in dataclasses.fields(step_class)]
        cached_fields = [field.name for field in dataclasses.fields(cached_class)]
        self._num_step_fields, self._num_cached_fields = len(step_fields), len(cached_fields)
        step_plain = [name for name in step_fields if name not in STEP_ROWS]
        cached_plain = [name for name in cached_fields if name not in CACHED_ROWS]
        self._plain_of = operator.attrgetter(*step_plain, *(f"{STEP_ROWS[0]}.{name}" for name in cached_plain))
        self._new_requests = step_plain.index(NEW_REQUESTS)
        # Where each argument of the constructors lies among [*plain values, *row values].
        places = {name: index for index, name in enumerate(step_plain)}
        rows_at = len(step_plain) + len(cached_plain)
        self._cached_at = operator.itemgetter(
            *(
                rows_at + CACHED_ROWS.index(name) if name in CACHED_ROWS else len(step_plain) + cached_plain.index(name)
                for name in cached_fields
            )
        )
        self._step_at = operator.itemgetter(
            *(rows_at + STEP_ROWS.index(name) if name in STEP_ROWS else places[name] for name in step_fields)
        )
        self._rows_at = rows_at

    def find_output(self, message: Any) -> Any | None:
        """Returns the SchedulerOutput of a call of `execute_model`, None of any other message."""
        if type(message) is not tuple or len(message) != 4:
            return None
        method, args, kwargs, output_rank = message
        is_step = (
            method == EXECUTE_MODEL
            and type(args) is tuple
            and len(args) == 1
            and type(args[0]) is self._step_class
            and type(kwargs) is dict
            and not kwargs
            and (output_rank is None or type(output_rank) is int)
        )
        return args[0] if is_step else None

    # ── writing ──
    def begin(self, message: Any) -> ExpectedStep | None:
        """Returns the expectation after a whole step; None for a step with unknown fields."""
        step = message[1][0]
        cached = step.scheduled_cached_reqs
        if not self._is_known(step):
            return None
        sums = _sums_of(cached)
        counts = step.num_scheduled_tokens
        new = step.scheduled_new_reqs
        ids = [*cached.req_ids, *(request.req_id for request in new)]
        if sums is None or len(counts) != len(ids) or not counts.keys() >= set(ids) or not _are_ints(counts.values()):
            return None
        return self._expect(list(cached.req_ids), new, dict(counts), sums, PlainFields.begin(self._plain_of(step)))

    def encode(
        self, state: ExpectedStep, message: Any, leader: int, number: int
    ) -> tuple[SchedulerChange, Extras, ExpectedStep] | None:
        """Returns the change, the fields to pickle, and the next expectation; None: the step must be sent whole."""
        step = message[1][0]
        if not self._is_known(step):
            return None
        cached, by_id = step.scheduled_cached_reqs, step.num_scheduled_tokens
        blocks = _encode_blocks(cached.new_block_ids)
        ids, expected = cached.req_ids, state
        runs = order = None
        if ids != state.ids:
            runs = find_runs(state.ids, ids)
            expected = _select(state, runs)
        changes, extras, plain = state.plain.encode(self._plain_of(step))
        new = step.scheduled_new_reqs
        keys, expected_keys, expected_counts = list(by_id), expected.ids, expected.counts
        if new:
            expected_keys = [*expected_keys, *(request.req_id for request in new)]
            expected_counts = [*expected_counts, *([USUAL_COUNT] * len(new))]
        if keys != expected_keys:
            order = find_runs(expected_keys, keys)
            if len(keys) != len(expected_keys) or any(isinstance(run, str) for run in order):
                return None
            expected_counts = apply_runs(expected_counts, order)
        counts = list(by_id.values())
        count_changes: list[int] = []
        if counts != expected_counts:
            if not _are_ints(counts):
                return None
            for index, (count, usual) in enumerate(zip(counts, expected_counts, strict=True)):
                if count != usual:
                    count_changes += index, count
        sums, sum_changes = expected.sums, []
        if _packed(cached) != sums.tobytes():
            actual = _sums_of(cached)
            if actual is None:
                return None
            difference = actual - sums
            rows = np.flatnonzero(difference.any(axis=0))
            sum_changes = np.vstack((rows, difference[:, rows])).T.ravel().tolist()
            sums = actual
        if blocks is None or len(cached.new_block_ids) != len(ids):
            return None
        if runs is None and order is None and not (new or count_changes or sum_changes):
            following = state._replace(sums=sums + state.growth, plain=plain)
        else:
            following = self._expect(list(ids), new, dict(by_id), sums, plain, state)
        change = SchedulerChange(leader, number, message[3], runs, order, count_changes, sum_changes, blocks, changes)
        return change, extras, following

    def _is_known(self, step: Any) -> bool:
        """Returns whether step and cached requests have exactly the fields of the classes."""
        cached = step.scheduled_cached_reqs
        return (
            type(cached) is self._cached_class
            and len(vars(step)) == self._num_step_fields
            and len(vars(cached)) == self._num_cached_fields
        )

    # ── reading ──
    def decode(self, state: ExpectedStep, change: SchedulerChange, extras: Extras) -> tuple[Any, ExpectedStep]:
        """Returns the message, sharing nothing with the state, and what is expected then."""
        values, plain = state.plain.decode(change.plain, extras)
        expected = state if change.rows is None else _select(state, change.rows)
        ids, sums = expected.ids, expected.sums
        new = values[self._new_requests]
        is_usual = expected is state and not (new or change.order or change.counts)
        if is_usual:
            by_id = state.counts_by_id.copy()
        else:
            keys, counts = [*ids, *(request.req_id for request in new)], [*expected.counts, *([USUAL_COUNT] * len(new))]
            if change.order is not None:
                keys, counts = apply_runs(keys, change.order), apply_runs(counts, change.order)
            for index, count in zip(change.counts[::2], change.counts[1::2], strict=True):
                counts[index] = count
            by_id = dict(zip(keys, counts, strict=True))
        if change.sums:
            rows, *differences = np.array(change.sums, np.int64).reshape(-1, 3).T
            sums = sums.copy()
            sums[:, rows] += differences
        computed, outputs = sums.tolist()
        blocks: list[Any] = [None] * len(ids)
        for index, block_ids in change.blocks:
            blocks[index] = block_ids
        if is_usual and not change.sums:
            following = state._replace(sums=sums + state.growth, plain=plain)
        else:
            following = self._expect(ids, new, by_id.copy(), sums, plain, state)
        values += ids.copy(), blocks, computed, outputs
        cached = self._cached_class(*self._cached_at(values))
        values[self._rows_at :] = cached, by_id
        step = self._step_class(*self._step_at(values))
        return (EXECUTE_MODEL, (step,), {}, change.output_rank), following

    def _expect(
        self,
        ids: list[str],
        new: list[Any],
        counts: dict[str, int],
        sums: Sums,
        plain: PlainFields,
        last: ExpectedStep | None = None,
    ) -> ExpectedStep:
        """Returns the expectation after a step with `cached` and new requests. Takes over the lists."""
        if not counts and last is not None:
            return last._replace(plain=plain)  # a step without requests
        cached_counts = [counts[request_id] for request_id in ids]
        computed, outputs, next_counts = [], [], []
        for request in new:
            count = counts[request.req_id]
            end = request.num_computed_tokens + count
            is_decoding = end >= _num_prompt_tokens(request)
            computed.append(end)
            outputs.append(int(is_decoding))
            next_counts.append(USUAL_COUNT if is_decoding else count)
        grown = sums + _growth(cached_counts, sums)
        sums = np.concatenate((grown, np.array((computed, outputs), np.int64)), axis=1)
        keys, next_counts = list(counts), [*cached_counts, *next_counts]
        ids = [*ids, *(request.req_id for request in new)]
        if keys != ids:
            index = dict(zip(ids, range(len(ids)), strict=True))
            order = [index[request_id] for request_id in keys]
            sums, next_counts = sums[:, order], [next_counts[row] for row in order]
        return ExpectedStep(
            keys, next_counts, dict(zip(keys, next_counts, strict=True)), sums, _growth(next_counts, sums), plain
        )


def _growth(counts: list[int], sums: Sums) -> Sums:
    return np.array((counts, sums[1] > 0), np.int64)


def _num_prompt_tokens(request: Any) -> int:
    """Returns the tokens to compute before a new request decodes. A wrong guess costs bytes."""
    tokens = getattr(request, "prefill_token_ids", None) or request.prompt_token_ids or ()
    return len(tokens)


def _select(state: ExpectedStep, runs: Runs) -> ExpectedStep:
    """Returns the expectation of these rows; of a new row nothing is known."""
    columns = [UNKNOWN if isinstance(run, str) else state.sums[:, run[0] : run[0] + run[1]] for run in runs]
    return state._replace(
        ids=apply_runs(state.ids, runs),
        counts=apply_runs(state.counts, runs, USUAL_COUNT),
        sums=np.concatenate((UNKNOWN[:, :0], *columns), axis=1),
    )


def _sums_of(cached: Any) -> Sums | None:
    """Returns computed and output tokens of the cached requests; None unless each is an int."""
    columns = cached.num_computed_tokens, cached.num_output_tokens
    if any(len(column) != len(cached.req_ids) or not _are_ints(column) for column in columns):
        return None
    try:
        return np.array(columns, np.int64)
    except OverflowError:
        return None


def _packed(cached: Any) -> bytes:
    """Returns computed and output tokens as the bytes of an array of int64; b"" for values of a different kind."""
    computed, outputs = cached.num_computed_tokens, cached.num_output_tokens
    if len(computed) != len(outputs):
        return b""
    try:
        return struct.pack(f"={len(computed) + len(outputs)}q", *computed, *outputs)
    except struct.error:
        return b""


def _are_ints(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {int}


def _encode_blocks(blocks: list[Any]) -> list[tuple[int, tuple[list[int], ...]]] | None:
    """Returns the requests with new blocks, and the blocks; None if a value is not a tuple of lists of ints."""
    num_absent = blocks.count(None)
    if num_absent == len(blocks):
        return []
    present = [(index, blocks[index]) for index in itertools.compress(range(len(blocks)), blocks)]
    if len(present) + num_absent != len(blocks):  # an empty value is neither
        return None
    block_ids: list[Any] = []
    for _, groups in present:
        if type(groups) is not tuple:
            return None
        for group in groups:
            if type(group) is not list:
                return None
            block_ids += group
    if not _are_ints(block_ids):
        return None
    return present
