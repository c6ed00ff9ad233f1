"""Grammars on devices: what each answer is, and that no order of steps changes an answer."""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from penstock import Missing
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from penstock.engine.text.grammar import build_grammar
from penstock.engine.text.grammar_fields import GrammarSource
from penstock.engine.worker import grammars
from penstock.engine.worker.grammars import MAX_COMPILED, GrammarCounts, Grammars
from penstock.engine.worker.simulated_device import SimulatedRunner, choose
from penstock.tensor import Handle
from tests.support.grammars import (
    END,
    VOCABULARY,
    Case,
    Outcome,
    answers,
    cases,
    grammar_handle,
    write_byte_tokenizer,
)

SIMULATED = SimulatedDevice(step_seconds=0.0, vocabulary=VOCABULARY, end_id=END, end_one_in=1000, blocks=64)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    BYTES.append(write_byte_tokenizer(path))
    FOLDERS.append(path)
    return path


FOLDERS: list[Path] = []
BYTES: list[bytes] = []


def simulated_runner(simulated: SimulatedDevice = SIMULATED, **options: Any) -> SimulatedRunner:
    return SimulatedRunner(simulated, 64, end_ids=(END,), **{"model": str(FOLDERS[0]), **options})


def must_follow(requests: Sequence[Case], outcome: Outcome) -> None:
    """Each sample that ended by the end id is of its grammar, and no other sample is cut short."""
    samples = [case for case in requests for _ in range(case.n)]
    ended = [
        case.fits(ids, BYTES[0])
        for case, ids, reason in zip(samples, outcome.ids, outcome.reasons, strict=True)
        if case.pattern is not None and reason == FinishReason.STOP
    ]
    assert len(ended) > len(samples) / 3 and all(ended)
    assert set(outcome.reasons) <= {FinishReason.STOP, FinishReason.LENGTH}


def test_simulated_answers_are_of_their_grammars_in_any_order_of_steps() -> None:
    requests = cases(48)
    expected = answers(simulated_runner(), requests)
    must_follow(requests, expected)
    for options in ({"depth": 1}, {"budget": 16}, {"slots": 3}):
        assert answers(simulated_runner(), requests, **options)[:2] == expected[:2], options
    small = answers(simulated_runner(SimulatedDevice(**{**_fields(SIMULATED), "blocks": 10})), requests)
    assert small.preemptions > 0 and small[:2] == expected[:2]


def _fields(simulated: SimulatedDevice) -> dict[str, Any]:
    return {name: getattr(simulated, name) for name in simulated.__struct_fields__}


def test_answers_go_on_as_they_were_when_all_state_is_lost() -> None:
    requests = cases(24, seed=2)
    expected = answers(simulated_runner(), requests, slots=64)
    for steps in (1, 4, 11):
        begun = answers(simulated_runner(), requests, slots=64, steps=steps)
        ids = iter(begun.ids)
        resumed = [[next(ids) for _ in range(case.n)] for case in requests]
        if any(reason is not None for reason in begun.reasons):  # those that have ended are not resumed
            is_open = [all(reason is None for reason in _of(case, begun.reasons, requests)) for case in requests]
            requests_left = list(itertools.compress(requests, is_open))
            resumed = list(itertools.compress(resumed, is_open))
        else:
            is_open, requests_left = [True] * len(requests), requests
        outcome = answers(_rule_of(requests, requests_left), requests_left, slots=64, resumed=resumed)
        expected_ids = [
            ids for case, here in zip(requests, is_open) if here for ids in _of(case, expected.ids, requests)
        ]
        assert outcome.ids == expected_ids, steps


def _of(case: Case, column: list[Any], requests: Sequence[Case]) -> list[Any]:
    at = sum(other.n for other in itertools.takewhile(lambda other: other is not case, requests))
    return column[at : at + case.n]


def _rule_of(requests: Sequence[Case], left: Sequence[Case]) -> SimulatedRunner:
    """A device: the rule depends on prompts alone, and the numbers of the requests do not matter."""
    assert set(map(id, left)) <= set(map(id, requests))
    return simulated_runner()


def test_model_answers_are_of_their_grammars_in_any_order_of_steps(family: Callable[..., Any]) -> None:
    from tests.support.models import device

    of = family("llama", vocab_size=VOCABULARY)
    write_byte_tokenizer(of.path)
    requests = cases(20)

    def runner(**options: Any) -> Any:
        return device(of, slots=8, blocks=64, block_size=16, end_ids=(END,), open_handle=Handle.open, **options)

    expected = answers(runner(), requests)
    must_follow(requests, expected)
    for options in ({"depth": 1}, {"budget": 16}):
        assert answers(runner(), requests, **options)[:2] == expected[:2], options


def test_no_grammar_imports_no_library(tmp_path: Path) -> None:
    runner = simulated_runner()
    answers(runner, [case._replace(pattern=None) for case in cases(4)])
    assert runner.grammars == GrammarCounts()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grammars")]


# ── samples that fail, alone ──
def reason_of(case: Case, **options: Any) -> FinishReason:
    """The end of the case. Another sample beside it is not concerned."""
    other = Case([9, 9], r"8{5}")
    resumed = options.pop("resumed", None)
    before = [] if resumed is None else [[resumed], [[]]]
    outcome = answers(simulated_runner(**options), [case, other], resumed=before)
    assert other.fits(outcome.ids[1], BYTES[0])
    return outcome.reasons[0]


def test_sample_ends_by_name_when_no_id_continues_its_grammar(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, without="x")
    assert reason_of(Case([9], "[12]x"), model=str(tmp_path)) == FinishReason.STUCK


def test_sample_ends_by_name_when_its_ids_are_not_of_its_grammar() -> None:
    resumed = [BYTES[0].index(byte) for byte in (b"1", b"1", b"2")]
    assert reason_of(Case([9], r"1{9}"), resumed=resumed) == FinishReason.GRAMMAR_MISFIT


def test_sample_ends_by_name_when_its_grammar_takes_too_long() -> None:
    nested = Case([9], "((a{1,500}){1,500}){60,500}", tokens=200)
    assert reason_of(nested) == FinishReason.GRAMMAR_LIMIT
    other = grammar_handle("(")
    assert reason_of(nested._replace(handle=other)) == FinishReason.GRAMMAR_LIMIT


def test_sample_ends_by_name_when_its_grammar_is_missing() -> None:
    def open_handle(handle: Handle) -> Any:
        if handle.key == missing.key:
            raise Missing("gone")
        return handle.open()

    missing = grammar_handle("1+")
    assert reason_of(Case([9], "1+"), open_handle=open_handle) == FinishReason.MISSING


def test_grammars_are_compiled_once_and_kept_up_to_a_number() -> None:
    opened: list[bytes | None] = []

    def open_handle(handle: Handle) -> Any:
        opened.append(handle.key)
        return handle.open()

    runner = simulated_runner(open_handle=open_handle)
    same = [Case([9, 10 + number], "6{3}") for number in range(20)]
    answers(runner, same)
    assert len(opened) == 1
    answers(runner, [Case([9, 10 + number % 200, number // 200 + 10], f"{number}") for number in range(300)])
    assert len(opened) == 301 and len(runner._grammars._compiled) == MAX_COMPILED


def test_grammars_are_kept_up_to_a_length_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bytes | None] = []

    def open_handle(handle: Handle) -> Any:
        opened.append(handle.key)
        return handle.open()

    patterns = [f"{number}{{3}}" for number in range(3)]
    chars = [len(build_grammar(GrammarSource("regex", pattern, "regex")).text) for pattern in patterns]
    monkeypatch.setattr(grammars, "MAX_COMPILED_CHARS", sum(chars) - 1)
    runner = simulated_runner(open_handle=open_handle)
    for pattern in (*patterns, *reversed(patterns)):  # the first is left out when the third comes
        answers(runner, [Case([9, 10], pattern)])
    assert len(opened) == 4


class GrammarSlot:
    """One slot, with a grammar."""

    def __init__(self, pattern: str) -> None:
        self.grammars = Grammars(FOLDERS[0], VOCABULARY, (END, 0), Handle.open)
        batch, builder = BatchState(1, 8), StepBuilder(BatchState(1, 8))
        builder.join(0, np.array([9], np.int32), SamplingParams(), [0], grammar=grammar_handle(pattern))
        step = builder.build(1, 1)
        batch.apply(step)
        self.grammars.follow(batch, step)

    def allowed(self) -> list[int]:
        masks = self.grammars.begin(np.array([0]))
        assert masks is not None
        rows, bits, failed = masks.result()
        assert not failed
        return [] if not rows.size else np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

    def sample(self, token_id: int) -> None:
        self.grammars.sampled(lambda: np.array([token_id], np.int32))


def test_end_ids_alone_may_follow_a_complete_grammar() -> None:
    slot, five = GrammarSlot("5"), BYTES[0].index(b"5")
    for expected, sampled in (([five], five), ([0, END], 0), ([], 11), ([], 12)):
        assert slot.allowed() == expected
        slot.sample(sampled)


def test_id_advances_a_sample_once_when_the_next_step_is_without_it() -> None:
    slot, five, six = GrammarSlot("556"), BYTES[0].index(b"5"), BYTES[0].index(b"6")
    for expected in ([five], [five], [six], [0, END]):
        assert slot.allowed() == expected
        slot.sample(expected[0])
        assert slot.grammars.begin(np.zeros(0, np.intp)) is None  # preempted
        assert slot.grammars.begin(np.zeros(0, np.intp)) is None


def test_sample_in_the_slot_of_a_grammar_that_was_cut_short_has_no_mask() -> None:
    plain = Case([9, 9, 9], None, tokens=12)
    (expected,), _, _ = answers(simulated_runner(), [plain])
    outcome = answers(simulated_runner(), [Case([9], "a{50}", tokens=5), plain], slots=1)
    assert outcome.ids == [[BYTES[0].index(b"a")] * 5, expected]


def test_choose_takes_the_id_of_a_number_among_those_that_are_allowed() -> None:
    chance = np.random.default_rng(3)
    is_allowed = chance.random((40, 320)) < np.linspace(0.01, 1, 40)[:, None]
    is_allowed[:, 0] = True
    bits = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    numbers = chance.integers(0, 1 << 31, 40).astype(np.int32)
    expected = [np.flatnonzero(row)[number % row.sum()] for row, number in zip(is_allowed, numbers.tolist())]
    assert choose(bits, numbers).tolist() == expected


def test_worker_without_a_grammar_has_no_library() -> None:
    """Nor has the thread that launches the first step with a grammar: steps of all streams wait for that thread."""
    import subprocess

    code = (
        "import sys, penstock.engine.worker.worker, penstock.engine.worker.model_runner, penstock.server.http.app;"
        "import penstock.engine.offline, penstock.engine.worker.grammars, penstock.engine.text.grammar;"
        "penstock.engine.worker.grammars.Grammars('model', 1000, [0], None);"
        "print('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
