"""Steps as changes, with classes that have the fields of vLLM's: what arrives, what is kept, and what goes whole.

That vLLM's own steps arrive equal is tested with its scheduler: tests/vllm/test_steps.py.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OutOfStep
from penstock.integrations.vllm.plain_fields import PlainFields
from penstock.integrations.vllm.row_runs import apply_runs, find_runs
from penstock.integrations.vllm.runner_output_codec import RunnerOutputCodec
from penstock.integrations.vllm.scheduler_output_codec import SchedulerOutputCodec
from penstock.integrations.vllm.step_check import StepMismatch, find_difference
from penstock.integrations.vllm.steps import StepReader, StepWriter
from penstock.integrations.vllm.token_rows import pack_tokens, unpack_tokens

SUCCESS = object()


@dataclasses.dataclass
class NewRequest:
    req_id: str
    prompt_token_ids: list[int]
    num_computed_tokens: int = 0


@dataclasses.dataclass
class CachedRequests:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[Any]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclasses.dataclass
class Step:
    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    has_masks: bool = False
    later_field: Any = None


@dataclasses.dataclass
class Output:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: Any
    logprobs: Any = None
    pooler_output: Any = None


def step(ids: str, computed: int, *, counts: int = 1, **fields: Any) -> tuple[Any, ...]:
    """A call that schedules these requests, one of each letter, at this many computed tokens."""
    cached = CachedRequests(list(ids), set(), [None] * len(ids), [computed] * len(ids), [computed - 9] * len(ids))
    fields = {"scheduled_new_reqs": [], "num_scheduled_tokens": dict.fromkeys(ids, counts), **fields}
    return "execute_model", (Step(scheduled_cached_reqs=cached, **fields),), {}, 0


def reply(ids: str, tokens: Any, **fields: Any) -> tuple[Any, ...]:
    return SUCCESS, Output(list(ids), {request: index for index, request in enumerate(ids)}, tokens, **fields)


class Line:
    """A writer and a reader, and the records between them."""

    def __init__(self, *, is_checked: bool = False) -> None:
        self.codecs = SchedulerOutputCodec(Step, CachedRequests), RunnerOutputCodec(Output, SUCCESS)
        self.writer = StepWriter(self.pass_on, self.codecs, is_checked=is_checked)
        self.reader = StepReader(self.codecs)
        self.records: list[tuple[bytes, Any]] = []
        self.error: BaseException | None = None

    def pass_on(self, section: bytes, body: Any, timeout: float | None) -> None:
        if self.error is not None:
            raise self.error
        self.records.append((section, copied(body)))

    def fail(self, message: Any) -> None:
        self.error = TimeoutError()
        with pytest.raises(TimeoutError):
            self.writer.send(message)
        self.error = None

    def receive(self) -> Any:
        return self.reader.receive(*self.records.pop(0))

    def through(self, message: Any) -> Any:
        assert self.writer.send(message)
        return self.receive()


def copied(value: Any) -> Any:
    """What a pickle would make of it, but for the stand-in of the status."""
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value if value is SUCCESS else pickle.loads(pickle.dumps(value))


def require_arrival(line: Line, message: Any) -> None:
    expected = copied(message)
    assert find_difference(line.through(message), expected) is None


CASES = {
    "the same requests again": step("abcd", 11),
    "one has finished": step("abd", 11, finished_req_ids={"c"}),
    "the first and the last have gone": step("bc", 11),
    "another order": step("dbca", 11),
    "none": step("", 11),
    "all others": step("efgh", 50),
    "more tokens each": step("abcd", 11, counts=4),
    "one is new": step(
        "abcd", 11, scheduled_new_reqs=[NewRequest("e", [1, 2, 3])], num_scheduled_tokens=dict.fromkeys("abcde", 1)
    ),
    "one is new and stands between": step(
        "abcd", 11, scheduled_new_reqs=[NewRequest("e", [1, 2])], num_scheduled_tokens=dict.fromkeys("abecd", 2)
    ),
    "not what was expected": step("abcd", 99),
    "a flag": step("abcd", 11, has_masks=True),
    "a field that a later vLLM has": step("abcd", 11, later_field={"of": ["later"]}),
    "an empty container in place of None": step("abcd", 11, later_field=set()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_arrives_as_a_change_and_the_steps_after_it(case: str) -> None:
    line = Line()
    for message in (step("abcd", 10), CASES[case], step("abcd", 12), step("abcd", 13)):
        require_arrival(line, message)
    assert line.writer.num_whole == 1


def test_a_step_brings_its_new_blocks_as_a_change() -> None:
    line = Line()
    line.through(step("abcd", 10))
    message = step("abcd", 11)
    message[1][0].scheduled_cached_reqs.new_block_ids[1:3] = [([7, 8], []), ([70000],)]
    require_arrival(line, message)
    assert line.writer.num_whole == 1


@pytest.mark.parametrize(
    ("field", "row", "value"),
    [
        *(("new_block_ids", 0, blocks) for blocks in ((), [[1]], ((1, 2),), ([True],), ([1.0],))),
        *(("num_computed_tokens", 1, count) for count in (2.5, True, 1 << 70)),
    ],
)
def test_a_step_goes_whole_with_a_value_that_no_change_has(field: str, row: int, value: Any) -> None:
    line = Line()
    line.through(step("ab", 10))
    message = step("ab", 11)
    getattr(message[1][0].scheduled_cached_reqs, field)[row] = value
    require_arrival(line, message)
    assert line.writer.num_whole == 2


def test_a_step_goes_whole_with_an_attribute_that_is_no_field() -> None:
    line = Line()
    line.through(step("ab", 10))
    message = step("ab", 11)
    message[1][0].added = 5
    assert line.through(message)[1][0].added == 5
    assert line.writer.num_whole == 2


@pytest.mark.parametrize(
    "message",
    [
        ("execute_model", (), {}, 0),
        ("other", step("a", 1)[1], {}, 0),
        ("execute_model", step("a", 1)[1], {"timeout": 1}, 0),
        ("failure", Output([], {}, [])),
        (SUCCESS, None),
        None,
    ],
)
def test_a_message_without_a_step_is_left_to_the_queue(message: Any) -> None:
    line = Line()
    assert not line.writer.send(message)
    assert line.records == []


OUTPUTS = {
    "other tokens": reply("abc", [[70000], [0], [4]]),
    "several tokens, and none": reply("abc", [[1, 2, 3], [], [4]]),
    "another order": reply("cab", [[1], [2], [3]]),
    "fewer": reply("ac", [[1], [2]]),
    "more": reply("abcd", [[1], [2], [3], [4]]),
    "none": reply("", []),
    "a token that is negative": reply("abc", [[-1], [2], [3]]),
    "no tokens": reply("abc", None),
    "an index in another order": (SUCCESS, Output(list("abc"), {"c": 2, "a": 0, "b": 1}, [[1], [2], [3]])),
    "logprobs": reply("abc", [[1], [2], [3]], logprobs=[0.5]),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_arrives_as_a_change_and_the_outputs_after_it(case: str) -> None:
    line = Line()
    for message in (reply("abc", [[1], [2], [3]]), OUTPUTS[case], reply("abc", [[4], [5], [6]])):
        require_arrival(line, message)
    assert line.writer.num_whole == 1


def test_output_goes_whole_when_its_index_is_not_the_order_of_requests() -> None:
    line = Line()
    line.through(reply("ab", [[1], [2]]))
    require_arrival(line, (SUCCESS, Output(["a", "b"], {"a": 1, "b": 0}, [[1], [2]])))
    assert line.writer.num_whole == 2


@pytest.mark.parametrize("error", [TimeoutError("full"), RuntimeError("a reader died"), KeyboardInterrupt()])
def test_step_after_an_exception_is_sent_whole(error: BaseException) -> None:
    line = Line()
    line.through(step("ab", 10))
    line.error = error
    with pytest.raises(type(error)):
        line.writer.send(step("ab", 11))
    line.error = None
    require_arrival(line, step("ab", 11))
    assert line.writer.num_whole == 2
    require_arrival(line, step("ab", 12))
    assert line.writer.num_whole == 2


@pytest.mark.parametrize("lost", [0, 1], ids=["whole", "change"])
def test_reader_that_missed_a_step_raises_until_a_whole_step_comes(lost: int) -> None:
    line = Line()
    line.through(step("ab", 8))
    line.writer.send(step("ab", 9))
    line.fail(step("ab", 10))
    for computed in (10, 11, 12):
        line.writer.send(step("ab", computed))
    line.receive()
    del line.records[lost]
    if lost == 1:
        line.receive()
    for _ in range(len(line.records)):
        with pytest.raises(OutOfStep):
            line.receive()
    line.fail(step("ab", 13))
    require_arrival(line, step("ab", 13))
    require_arrival(line, step("ab", 14))


def test_a_reader_that_starts_late_raises_until_a_whole_step() -> None:
    line = Line()
    line.through(step("ab", 10))
    late = StepReader(line.codecs)
    line.writer.send(step("ab", 11))
    with pytest.raises(OutOfStep, match="the whole state"):
        late.receive(*line.records.pop())


def test_received_vllm_step_shares_no_list_with_the_kept_state() -> None:
    line = Line()
    for computed in range(10, 15):
        message = step("abcd", computed, later_field=[])
        expected = copied(message)
        received = line.through(message)
        assert find_difference(received, expected) is None
        for owner in (received, message):  # the reader's and the writer's
            scheduled = owner[1][0]
            scheduled.num_scheduled_tokens.clear()
            scheduled.finished_req_ids.add("x")
            scheduled.later_field.append("x")
            for values in vars(scheduled.scheduled_cached_reqs).values():
                values.clear()
    for token in range(3):
        message = reply("ab", [[token], [token]])
        expected = copied(message)
        received = line.through(message)
        assert find_difference(received, expected) is None
        for owner in (received, message):
            for values in vars(owner[1]).values():
                if values is not None:
                    values.clear()
    assert line.writer.num_whole == 2


def test_checked_change_raises_with_the_field_that_differs() -> None:
    line = Line(is_checked=True)
    for computed in (10, 11):
        require_arrival(line, step("ab", computed))
    line.writer.send(step("ab", 12))
    section, (extras, message) = line.records.pop()
    message[1][0].scheduled_cached_reqs.num_computed_tokens[1] = 13
    field = r"at \$\[1\]\[0\]\.scheduled_cached_reqs\.num_computed_tokens\[1\]: 12 in place of 13"
    with pytest.raises(StepMismatch, match=field):
        line.reader.receive(section, (extras, message))
    line.writer.send(step("ab", 13))
    with pytest.raises(OutOfStep):
        line.receive()


def test_a_steady_step_of_256_requests_takes_a_hundredth_of_its_pickle() -> None:
    line = Line()
    ids = [f"cmpl-{number:032x}" for number in range(256)]

    def message(computed: int) -> Any:
        cached = CachedRequests(ids, set(), [None] * 256, [computed] * 256, [computed - 9] * 256)
        return "execute_model", (Step([], cached, dict.fromkeys(ids, 1)),), {}, 0

    line.through(message(1000))
    line.writer.send(message(1001))
    section, body = line.records.pop()
    assert body is None
    assert len(section) < len(pickle.dumps(message(1001), 5)) / 100


# ── what changes are made of ──
IDS = st.lists(st.sampled_from([f"r{number}" for number in range(60)]), max_size=80, unique=True)


@given(IDS, IDS, st.integers(0, 40))
def test_runs_of_a_list_make_the_other(old: list[str], new: list[str], shared: int) -> None:
    new = [*old[:shared], *(request for request in new if request not in old[:shared])]
    runs = find_runs(old, new)
    assert apply_runs(old, runs) == new


def test_runs_are_few_where_one_row_leaves_or_fills_a_hole() -> None:
    old = [f"r{number}" for number in range(256)]
    assert find_runs(old, old) == [(0, 256)]
    assert find_runs(old, old[:99] + old[100:]) == [(0, 99), (100, 156)]
    assert find_runs(old, [*old[:9], old[255], *old[10:255]]) == [(0, 9), (255, 1), (10, 245)]
    assert find_runs(old, [*old, "new"]) == [(0, 256), "new"]


@given(st.lists(st.lists(st.integers(0, (1 << 32) - 1), max_size=5), max_size=20))
def test_tokens_come_out_of_their_packing(rows: list[list[int]]) -> None:
    packed = pack_tokens(rows)
    assert packed is not None
    assert unpack_tokens(msgspec.msgpack.decode(msgspec.msgpack.encode(packed))) == rows


@pytest.mark.parametrize("rows", [None, ((1,),), [(1,), (2,)], [[-1]], [[1 << 32]], [[1.5]], [[1] * 256], [[], [0.5]]])
def test_tokens_of_another_type_or_size_are_not_packed(rows: Any) -> None:
    assert pack_tokens(rows) is None


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=2), st.sampled_from(([], {}, set())))
INTS = st.sampled_from(([1], [1, 2], [2], [1] * 17, [True], [1.0], [1 << 63], ["1"]))
VALUES = st.tuples(*[st.one_of(PLAIN, INTS, st.just({"a": 1}), st.just((1,)))] * 3)


def test_a_short_list_of_ints_travels_when_it_differs() -> None:
    fields = PlainFields.begin(([0], None))
    for values, expected in (
        ([0], []),
        ([1, 2], [(0, [0, 1, 2])]),
        ([1, 2], []),
        ([], [(0, [0])]),
        ([3], [(0, [0, 3])]),
    ):
        changes, extras, fields = fields.encode((values, None))
        assert (changes, extras) == (expected, {})


def test_a_field_that_was_a_list_of_ints_asks_no_element_of_another_type() -> None:
    class Unequal:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    value = [Unequal()]
    assert PlainFields.begin(([0],)).encode((value,))[1] == {0: value}


@given(st.lists(VALUES, min_size=1, max_size=8))
def test_fields_come_out_with_their_types_after_any_others(steps: list[tuple[Any, ...]]) -> None:
    writer = reader = PlainFields.begin(steps[0])
    for values in steps[1:]:
        changes, extras, writer = writer.encode(values)
        decoded, reader = reader.decode(msgspec.msgpack.decode(msgspec.msgpack.encode(changes)), extras)
        assert find_difference(decoded, list(values)) is None
        assert writer == reader


@pytest.mark.parametrize(
    ("actual", "expected", "path"),
    [
        ([1, True], [1, 1], "$[1]: bool"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "$: keys"),
        (Output([], {}, []), Output([], {}, [[]]), "$.sampled_token_ids: 0 items in place of 1"),
        ([1], [1, 2], "$: 1 items in place of 2"),
    ],
)
def test_a_difference_names_the_place(actual: Any, expected: Any, path: str) -> None:
    difference = find_difference(actual, expected)
    assert difference is not None
    assert difference.startswith(path)
