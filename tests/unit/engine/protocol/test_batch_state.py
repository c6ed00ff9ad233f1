"""The engine's schedule: what a step may say, what is refused and where, what it costs on the wire."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from penstock import Buffer, DecodeError, Handle
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.codec.sequence import SequenceCheck
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import FREE, PREEMPTED
from penstock.engine.protocol.messages import (
    STEPS,
    Advances,
    Appended,
    Begin,
    Inputs,
    Joined,
    Resumed,
    SamplingParams,
    Step,
)
from penstock.lowlevel import Ref
from penstock.tensor import Scope
from tests.support.columns import ints, slots

PARAMS = SamplingParams(temperature=0.8, top_p=0.95)


def running(count: int, blocks_each: int = 4, preempted: tuple[int, ...] = ()) -> BatchState:
    """So many requests, each with a prompt of 20 that is computed, block size 16; there are 8 slots and 100 blocks."""
    schedule = BatchState(8, 100, 16, max_blocks_per_request=6)
    plan = StepBuilder(schedule)
    for n in range(count):
        plan.join(n, np.arange(20, dtype=np.int32), PARAMS, range(n * blocks_each, (n + 1) * blocks_each), chunk=20)
    schedule.apply(plan.build(1, 1))
    for slot in preempted:
        plan.preempt(slot)
    if preempted:
        schedule.apply(plan.build(1, 2))
    return schedule


def state_of(schedule: BatchState) -> list[object]:
    return [
        schedule.status.tolist(),
        schedule.computed.tolist(),
        schedule.known.tolist(),
        [schedule.blocks_of(slot).tolist() for slot in range(schedule.slots)],
        [prompt.tolist() for prompt in schedule.prompts],
        schedule.rows.tolist(),
        schedule.counts.tolist(),
    ]


def one_joins(**changes: object) -> Joined:
    columns: dict[str, object] = {
        "slots": slots(7),
        "requests": ints(9),
        "params": (PARAMS,),
        "lengths": ints(3),
        "ids": ints(5, 6, 7),
        "block_counts": ints(1),
        "blocks": ints(50),
    }
    return Joined(**{**columns, **changes})  # type: ignore[arg-type]


def one_input(**changes: object) -> Inputs:
    columns: dict[str, object] = {
        "counts": ints(1),
        "items": (Handle(b"k" * 32, Ref(1, 2, 3, 0, 4096)),),
        "positions": ints(0),
        "lengths": ints(2),
    }
    return Inputs(**{**columns, **changes})  # type: ignore[arg-type]


def test_a_step_for_which_the_blocks_do_not_suffice_is_refused_in_time() -> None:
    schedule = running(2)
    for number in range(44):  # 20 + 44 = 4 blocks of 16
        schedule.apply(Step(1, number))
    with pytest.raises(DecodeError, match=r"expected room for 65 tokens in slot 0, got 4 blocks of 16 at \$"):
        schedule.apply(Step(1, 9))
    assert schedule.short_of_blocks().tolist() == [0, 1]
    with pytest.raises(DecodeError, match="slot 1"):
        schedule.apply(Step(1, 9, appended=Appended(slots(0), ints(9))))
    schedule.apply(Step(1, 9, appended=Appended(slots(0, 1), ints(9, 9))))
    assert schedule.computed[:2].tolist() == [65, 65] and schedule.short_of_blocks().tolist() == []
    with pytest.raises(DecodeError, match=r"at \$\.advances\.counts\[0\]"):
        schedule.apply(Step(1, 9, advances=Advances(slots(1), ints(16))))


def test_left_row_drops_prompt_and_parameters() -> None:
    schedule = running(2)
    prompt = weakref.ref(schedule.prompts[1])
    schedule.apply(Step(1, 2, left=slots(1)))
    gc.collect()
    assert prompt() is None and schedule.params[1] is None
    assert schedule.status[1] == FREE and schedule.computed[1] == 0 and schedule.rows.tolist() == [0]


def test_samples_of_one_prompt_share_it() -> None:
    schedule = running(1)
    plan = StepBuilder(schedule)
    for _ in range(3):
        plan.join(0, schedule.prompts[0], PARAMS, [0, 1], computed=19, parent=0)
    step = plan.build(1, 2)
    assert step.joined is not None and step.joined.ids.size == 0
    schedule.apply(step)
    assert all(schedule.prompts[slot] is schedule.prompts[0] for slot in range(4)) and schedule.computed[3] == 20


def test_an_image_is_sent_once_for_all_samples_of_its_prompt() -> None:
    image = Handle(b"k" * 32, b"", Buffer(np.zeros(50_000)))
    schedule = BatchState(8, 100, 16, max_blocks_per_request=6)
    plan = StepBuilder(schedule)
    for sample in range(4):
        plan.join(0, ints(5, 6, 7), PARAMS, [0], parent=0 if sample else None, inputs=((image, 1, 2),))
    step = plan.build(1, 2)
    schedule.apply(step)
    assert step.joined is not None and step.joined.inputs is not None and len(step.joined.inputs.items) == 1
    assert [schedule.inputs[slot] for slot in range(4)] == [((image, 1, 2),)] * 4


def test_batch_state_copies_prompts_of_a_received_step() -> None:
    ids = ints(5, 6, 7)
    schedule = running(1)
    schedule.apply(Step(1, 2, joined=one_joins(ids=ids)))
    ids[:] = 0
    assert schedule.prompts[7].tolist() == [5, 6, 7] and not schedule.prompts[7].flags.writeable


def test_rows_and_counts_read_before_a_step_do_not_change() -> None:
    schedule = running(3)
    rows, counts = schedule.rows, schedule.counts
    original = rows.tolist(), counts.tolist()
    schedule.apply(Step(1, 2, left=slots(0), advances=Advances(slots(1), ints(0))))
    schedule.apply(Step(1, 3))
    assert (rows.tolist(), counts.tolist()) == original


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (Step(1, 9, left=slots(8)), r"expected less than 8, got 8 at \$\.left\[0\]"),
        (Step(1, 9, left=slots(0, 0)), r"expected each slot once, got 0 twice at \$\.left"),
        (Step(1, 9, left=slots(1, 5)), r"running or preempted, got 5, free, at \$\.left\[1\]"),
        (Step(1, 9, left=slots(1).reshape(1, 1)), r"expected 1 numbers, got a shape of \(1, 1\) at \$\.left"),
        (Step(1, 9, preempted=slots(3)), r"expected a slot that is running, got 3, preempted, at \$\.preempted\[0\]"),
        (Step(1, 9, left=slots(1), preempted=slots(1)), r"got 1, free, at \$\.preempted\[0\]"),
        (Step(1, 9, joined=one_joins(slots=slots(2))), r"that is free, got 2, running, at \$\.joined\.slots\[0\]"),
        (Step(1, 9, joined=one_joins(requests=ints())), r"expected 1 numbers, got .* at \$\.joined\.requests"),
        (Step(1, 9, joined=one_joins(lengths=ints(4))), r"expected 4 numbers, got .* at \$\.joined\.ids"),
        (Step(1, 9, joined=one_joins(lengths=ints(-3))), r"expected 0 or more, got -3 at \$\.joined\.lengths\[0\]"),
        (Step(1, 9, joined=one_joins(ids=ints(1, -2, 3))), r"got -2 at \$\.joined\.ids\[1\]"),
        (Step(1, 9, joined=one_joins(params=())), r"expected 1, got 0 at \$\.joined\.params"),
        (Step(1, 9, joined=one_joins(params_of=slots(1))), r"less than 1, got 1 at \$\.joined\.params_of"),
        (Step(1, 9, joined=one_joins(grammars_of=slots(1))), r"less than 1, got 1 at \$\.joined\.grammars_of"),
        (Step(1, 9, joined=one_joins(block_counts=ints(2))), r"expected 2 numbers, .* at \$\.joined\.blocks"),
        (Step(1, 9, joined=one_joins(blocks=ints(100))), r"less than 100, got 100 at \$\.joined\.blocks\[0\]"),
        (Step(1, 9, joined=one_joins(blocks=ints(-1))), r"0 or more, got -1 at \$\.joined\.blocks\[0\]"),
        (Step(1, 9, joined=one_joins(computed=ints(1 << 30))), r"at \$\.joined\.computed\[0\]"),
        (
            Step(1, 9, joined=one_joins(computed=ints(3))),
            r"less than the 3 tokens .*, got 3 at \$\.joined\.computed\[0\]",
        ),
        (
            Step(1, 9, joined=one_joins(seeds=np.zeros(2, np.uint64))),
            r"expected 1 numbers, got a shape of \(2,\) at \$\.joined\.seeds",
        ),
        (
            Step(1, 9, joined=one_joins(generated=ints(5))),
            r"expected counts and ids, or none of them, at \$\.joined\.generated",
        ),
        (
            Step(1, 9, joined=one_joins(generated_counts=ints(2), generated=ints(5))),
            r"expected 2 numbers, got .* at \$\.joined\.generated",
        ),
        (
            Step(1, 9, joined=one_joins(generated_counts=ints(-1), generated=ints())),
            r"got -1 at \$\.joined\.generated_counts\[0\]",
        ),
        (
            Step(1, 9, joined=one_joins(computed=ints(5), generated_counts=ints(2), generated=ints(5, 6))),
            r"less than the 5 tokens .*, got 5 at \$\.joined\.computed\[0\]",
        ),
        (Step(1, 9, joined=one_joins(samples=slots(1, 2))), r"expected 1 numbers, got .* at \$\.joined\.samples"),
        (
            Step(1, 9, joined=one_joins(lengths=ints(20), ids=np.arange(20, dtype=np.int32), computed=ints(16))),
            r"room for 17 tokens in slot 7, got 1 blocks",
        ),
        (
            Step(1, 9, joined=one_joins(parents=slots(0))),
            r"0 for a row with the prompt of its parent, got 3 at \$\.joined\.lengths",
        ),
        (
            Step(1, 9, joined=one_joins(parents=slots(6), lengths=ints(0), ids=ints())),
            r"expected a slot with a prompt, got 6 at \$\.joined\.parents\[0\]",
        ),
        (
            Step(1, 9, joined=one_joins(parents=slots(0), lengths=ints(0), ids=ints(), inputs=one_input())),
            r"0 for a row with the prompt of its parent, got 1 at \$\.joined\.inputs\.counts\[0\]",
        ),
        (Step(1, 9, joined=one_joins(inputs=one_input(items=()))), r"1 items, got 0 at \$\.joined\.inputs\.items"),
        (Step(1, 9, joined=one_joins(inputs=one_input(positions=ints(-1)))), r"at \$\.joined\.inputs\.positions\[0\]"),
        (
            Step(1, 9, left=slots(0), joined=one_joins(parents=slots(0), lengths=ints(0), ids=ints())),
            r"expected a slot with a prompt, got 0 at \$\.joined\.parents\[0\]",
        ),
        (Step(1, 9, resumed=Resumed(slots(0), ints(0), ints())), r"preempted, got 0, running, at \$\.resumed\.slots"),
        (Step(1, 9, resumed=Resumed(slots(3), ints(0), ints())), r"room for 1 tokens in slot 3, got 0 blocks"),
        (
            Step(1, 9, resumed=Resumed(slots(3), ints(2), ints(90, 91), ints(21))),
            r"less than the 21 .* got 21 at \$\.resumed\.computed\[0\]",
        ),
        (Step(1, 9, appended=Appended(slots(0), ints())), r"expected 1 numbers, got .* at \$\.appended\.blocks"),
        (Step(1, 9, appended=Appended(slots(3), ints(1))), r"running, got 3, preempted, at \$\.appended\.slots\[0\]"),
        (Step(1, 9, appended=Appended(slots(0), ints(1), ints(2))), r"at \$\.appended\.blocks"),
        (
            Step(1, 9, appended=Appended(slots(0), ints(1, 2, 3), ints(3))),
            r"expected at most 6 blocks in all, got 7 at \$\.appended\.slots\[0\]",
        ),
        (Step(1, 9, advances=Advances(slots(6), ints(1))), r"running, got 6, free, at \$\.advances\.slots\[0\]"),
        (Step(1, 9, advances=Advances(slots(0), ints(-1))), r"0 or more, got -1 at \$\.advances\.counts\[0\]"),
        (Step(1, 9, advances=Advances(slots(0), ints(2**31 - 1))), r"at \$\.advances\.counts\[0\]"),
        (Step(1, 9, advances=Advances(slots(0), ints(2))), r"tokens that are known of slot 0, got 23 at .*counts\[0\]"),
    ],
    ids=lambda value: "" if isinstance(value, Step) else value,
)
def test_a_malformed_step_is_refused_with_its_place_and_changes_nothing(step: Step, where: str) -> None:
    schedule = running(4, preempted=(3,))
    before = state_of(schedule)
    with pytest.raises(DecodeError, match=where):
        schedule.apply(step)
    assert state_of(schedule) == before


def test_tables_grow_as_far_as_one_request_may_have_blocks() -> None:
    schedule = BatchState(4, 10_000, 16)
    plan = StepBuilder(schedule)
    plan.join(1, ints(1), PARAMS, [5])
    schedule.apply(plan.build(1, 1))
    for number in range(2, 12):
        plan.append(0, range(900))
        schedule.apply(plan.build(1, number))
    assert schedule.blocks_of(0).tolist() == [5, *(list(range(900)) * 10)]
    assert schedule.table.shape[1] <= 10_000


# ── a plan ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_plan_takes_back_decisions_for_rows_preempted_or_leaving() -> None:
    schedule = running(3, preempted=(2,))
    plan = StepBuilder(schedule)
    plan.append(0, [7])
    plan.advance(0, 5)
    plan.preempt(0)
    plan.append(1, [8])
    plan.leave(1)
    plan.resume(2, [9], chunk=3)
    plan.preempt(2)
    joined = plan.join(1, ints(1), PARAMS, [5])
    assert joined == 1
    plan.leave(joined)
    step = plan.build(1, 2)
    assert step.appended is step.advances is step.resumed is step.joined is None
    schedule.apply(step)
    assert schedule.status.tolist() == [PREEMPTED, FREE, PREEMPTED] + [FREE] * 5
    assert plan.free_slots == 6


def test_a_plan_without_a_free_slot_says_so() -> None:
    plan = StepBuilder(running(8))
    with pytest.raises(ValueError, match="no slot is free"):
        plan.join(1, ints(1), PARAMS, [5])


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────────────────────────
CATALOGUE = Catalogue.of(STEPS)
LEADER = 0xFFFFFFFF


class Pair:
    """A core and a worker, and the bytes of each frame between them."""

    def __init__(self, requests: int) -> None:
        self.schedule = BatchState(1024, 1 << 20)
        self.plan = StepBuilder(self.schedule)
        self.number = 1 << 31  # it has run for a month
        self.worker, self.sequence = BatchState(1024, 1 << 20), SequenceCheck()
        self.sequence.begin(Begin(LEADER, self.number, 1024, 1 << 20, 16))
        self.encoder, self.decoder = FrameEncoder(CATALOGUE), FrameDecoder(CATALOGUE)
        for n in range(requests):
            prompt = np.arange(32 + n % 16, dtype=np.int32)
            self.plan.join(n, prompt, PARAMS, range(4), chunk=prompt.size)
        self.step()

    def send(self) -> int:
        """The step that is planned. Returns the length of its frame."""
        step = self.plan.build(LEADER, self.number + 1)
        self.number += 1
        frame = self.encoder.encode(step)
        pieces = frame if isinstance(frame, list) else [frame]
        whole = b"".join(memoryview(piece).cast("B") for piece in pieces)
        self.schedule.apply(step)
        received = self.decoder.decode(whole)
        self.sequence.check(received)
        self.worker.apply(received)
        return len(whole)

    def step(self) -> int:
        short = self.schedule.short_of_blocks()
        self.plan.append_one_each(short, short.astype(np.int32))
        return self.send()


@pytest.mark.parametrize(("requests", "average"), [(4, 40), (32, 60), (256, 300), (1024, 1000)])
def test_a_decode_step_takes_a_few_bytes_whatever_the_number_of_requests(requests: int, average: int) -> None:
    pair = Pair(requests)
    sizes = [pair.step() for _ in range(64)]
    steady = Step(LEADER, pair.number + 1)
    assert len(pair.encoder.encode(steady)) <= 24
    assert sum(sizes) / len(sizes) <= average


def test_equal_parameters_are_sent_once_per_step() -> None:
    pair = Pair(4)

    def joining(*params: SamplingParams) -> int:
        for number, params_of_row in enumerate(params):
            pair.plan.join(number, ints(1), params_of_row, [1])
        return pair.send()

    empty, first = pair.send(), joining(PARAMS)
    assert first - empty <= 80 + 70
    assert joining(PARAMS, PARAMS) - first < 40 < joining(PARAMS, SamplingParams(seed=7)) - first <= 40 + 80


@pytest.mark.parametrize("kind", ["grammar", "adapter"])
def test_grammars_and_adapters_are_sent_once_and_kept_until_samples_leave(kind: str) -> None:
    batch = BatchState(8, 64)
    builder = StepBuilder(batch)
    keys = [b"a" * 32, b"b" * 32]
    first, second = keys if kind == "adapter" else [Scope().put("a", key=key) for key in keys]
    for number, value in enumerate((first, b"" if kind == "adapter" else None, second, first)):
        options: dict[str, Any] = {kind: value}
        builder.join(number, np.arange(3, dtype=np.int32), SamplingParams(), [number], chunk=3, **options)
    step = builder.build(1, 1)
    assert getattr(step.joined, f"{kind}s") == (first, second)
    assert getattr(step.joined, f"{kind}s_of").tolist() == [1, 0, 2, 1]
    batch.apply(step)
    assert getattr(batch, f"{kind}s") == {0: first, 2: second, 3: first}
    builder.preempt(3)
    builder.leave(0)
    builder.leave(1)
    batch.apply(builder.build(1, 2))
    assert getattr(batch, f"{kind}s") == {2: second, 3: first}
