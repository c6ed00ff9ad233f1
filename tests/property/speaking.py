"""An engine whose samples say what a script says: what a core and its workers send to an output processor."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.output.detokenizer import Vocabulary
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import PREEMPTED, RUNNING
from penstock.engine.protocol.messages import Delta, FinishReason, Halt, Logprobs, SamplingParams, Step, StepDone

EOS = 3
MAX_MODEL_LEN = 64
PIECES = [b"a", b"b", "é".encode()[:1], b"", "é".encode()[1:], b"ab", "€".encode(), b' "b', b"<eos2>", b"ba\n"]
VOCABULARY = Vocabulary(PIECES, special=(8,))
STOPS = ("ab", "bab", "é", "a€", "b b", '"', "abab")
KEY = tuple[int, int, int]  # server, request, sample


@dataclass
class Sample:
    key: KEY
    params: SamplingParams
    prompt: int  # its length
    script: list[int]
    birth: int = 0
    sampled: int = 0  # by the workers, those of steps in flight included
    known: int = 0  # to the core
    is_over: bool = False  # as the core knows

    def plainly(self) -> tuple[list[int], str, tuple[FinishReason, int | str | None]]:
        """Its ids, text and end, as if everything were known at once."""
        params = self.params
        data, free = b"", 0
        limit = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - self.prompt)
        for count, one in enumerate(self.script, 1):
            may_stop = count > params.min_tokens
            end: tuple[FinishReason, int | str | None] | None = None
            if may_stop and one == EOS and not params.ignore_eos:
                end = FinishReason.STOP, None
            elif may_stop and one in params.stop_token_ids:
                end = FinishReason.STOP, one
            elif count >= limit:
                end = FinishReason.LENGTH, None
            shows = end is None or end[0] != FinishReason.STOP or params.include_stop_str_in_output
            if params.detokenize and shows and not (params.skip_special_tokens and one == 8):
                data += PIECES[one]
            text = data.decode(errors="replace") if end else self.certain(data)
            for at in range(free + 1, len(text) + 1):
                found = [stop for stop in params.stop if text[:at].endswith(stop)]
                if found and may_stop:
                    stop = max(found, key=len)
                    until = at if params.include_stop_str_in_output else at - len(stop)
                    return self.script[:count], text[:until], (FinishReason.STOP, stop)
            free = len(text)
            if end is not None:
                return self.script[:count], text, end
        raise AssertionError("the script is too short")

    @staticmethod
    def certain(data: bytes) -> str:
        whole = data.decode(errors="replace")
        is_cut = data.endswith("é".encode()[:1])
        return whole[:-1] if is_cut else whole


@dataclass
class Got:
    """What a server has received of a sample."""

    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    end: tuple[FinishReason, int | str | None] | None = None
    cached: int = 0
    logprobs: list[list[int]] = field(default_factory=list)


class Servers:
    def __init__(self) -> None:
        self.got: dict[KEY, Got] = {}

    def take(self, server: int, delta: Delta) -> list[Got]:
        counts = [1] * delta.rows if delta.counts is None else delta.counts.tolist()
        samples = [0] * delta.rows if delta.samples is None else delta.samples.tolist()
        ids, text, rows = delta.ids.tolist(), delta.text, []
        for request, sample, length, count in zip(
            delta.requests.tolist(), samples, delta.text_lengths.tolist(), counts, strict=True
        ):
            got = self.got.setdefault((server, request, sample), Got())
            assert got.end is None, f"{(server, request, sample)} goes on after its end"
            got.ids += ids[:count]
            got.text += text[:length]
            ids, text = ids[count:], text[length:]
            rows.append(got)
        assert not ids and not text
        if delta.logprobs is not None:
            assert delta.logprobs.counts is not None
            ends = np.cumsum(delta.logprobs.counts).tolist()
            with_ids = [got for got, count in zip(rows, counts, strict=True) if count]
            for got, end, many in zip(with_ids, ends, delta.logprobs.counts.tolist(), strict=True):
                if many:
                    got.logprobs.append(delta.logprobs.ids[end - many : end].tolist())
        if delta.finished is not None:
            size = delta.finished.rows.size
            stops = delta.finished.stops or [None] * size
            cached = [0] * size if delta.finished.cached is None else delta.finished.cached.tolist()
            for row, reason, stop, part in zip(
                delta.finished.rows.tolist(), delta.finished.reasons.tolist(), stops, cached, strict=True
            ):
                rows[row].end = FinishReason(reason), stop
                rows[row].cached = part
        return rows


class Speaking:
    """The core and its workers. `step` sends a step; `hear` takes the oldest result, and gives it to the output."""

    def __init__(self, slots: int = 8, depth: int = 1, state: OutputState | None = None) -> None:
        self.schedule = BatchState(slots, 1000, 4)
        self.state = state or OutputState(VOCABULARY, MAX_MODEL_LEN, (EOS,))
        self.state.begin(slots, 1000, 4)
        self.plan = StepBuilder(self.schedule)
        self.number = self.state_number = 0  # of the last step that was sent, and that the output has applied
        self.depth = depth
        self.steps: deque[Step] = deque()  # not yet seen by the output
        self.flight: deque[tuple[int, list[tuple[int, Sample]], StepDone]] = deque()
        self.samples: dict[int, Sample] = {}  # by slot
        self.servers = Servers()
        self.halts: list[Halt] = []
        self.born: dict[tuple[int, int], Sample] = {}  # by slot and birth
        self.fails: set[int] = set()  # slots of which the next step says so

    def join(self, sample: Sample, *, cached: int = 0, chunk: int | None = None, parent: int | None = None) -> int:
        server, request, which = sample.key
        slot = self.plan.join(
            request,
            np.arange(sample.prompt, dtype=np.int32),
            sample.params,
            range(40 * len(self.samples), 40 * len(self.samples) + 17),
            computed=cached,
            chunk=chunk or sample.prompt - cached,
            parent=parent,
            server=server,
            sample=which,
        )
        self.samples[slot] = sample
        sample.birth = self.number + 1
        self.born[slot, sample.birth] = sample
        return slot

    def leave(self, slot: int) -> None:
        self.plan.leave(slot)
        del self.samples[slot]

    def step(self) -> None:
        """Decides nothing but who leaves because it has ended."""
        for slot in [slot for slot, sample in self.samples.items() if sample.is_over]:
            self.leave(slot)
        self.send()

    def send(self) -> None:
        self.number += 1
        step = self.plan.build(1, self.number)
        self.schedule.apply(step)
        self.steps.append(step)
        said = []
        for slot in self.schedule.sampled.tolist():
            sample = self.samples[slot]
            said.append((slot, sample, sample.script[min(sample.sampled, len(sample.script) - 1)]))
            sample.sampled += 1
        ids = np.array([one for _, _, one in said], np.int32)
        counts = [sample.params.logprobs + 1 if sample.params.logprobs else 0 for _, sample, _ in said]
        likely = [one + n for (_, _, one), count in zip(said, counts, strict=True) for n in range(count)]
        logprobs = Logprobs(
            np.array(likely, np.int32),
            np.full(len(likely), -0.5, np.float32),
            np.ones(len(said), np.int32),
            np.array(counts, np.int32),
        )
        failed = np.array([slot for slot, _, _ in said if slot in self.fails], np.uint16)
        self.fails.clear()
        done = StepDone(
            1, self.number, ids, logprobs=logprobs if likely else None, failed=failed if failed.size else None
        )
        self.flight.append((self.number, [(slot, sample) for slot, sample, _ in said], done))

    def hear(self) -> None:
        number, said, done = self.flight.popleft()
        failed = [] if done.failed is None else done.failed.tolist()
        for slot, sample in said:
            if not sample.is_over:
                sample.known += 1
                sample.is_over = slot in failed or self.ends_by_id(sample)
        self.give(number, done)

    def give(self, number: int, done: StepDone) -> None:
        while self.state_number < number:
            step = self.steps.popleft()
            self.state.apply(step)
            self.state_number = step.number
        answers = self.state.done(done)
        assert len({server for server, _ in answers.deltas}) == len(answers.deltas)
        for server, delta in answers.deltas:
            self.servers.take(server, delta)
        if answers.halt is not None:
            self.halts.append(answers.halt)

    def halt(self) -> None:
        """The core hears of all who ended by their text."""
        for halt in self.halts:
            for slot, birth in zip(halt.slots.tolist(), halt.births.tolist(), strict=True):
                sample = self.born[slot, birth]
                assert isinstance(sample.plainly()[2][1], str), "halted, and no stop string has ended it"
                sample.is_over = True
        self.halts = []

    def ends_by_id(self, sample: Sample) -> bool:
        params, count = sample.params, sample.known
        one = sample.script[count - 1]
        if count >= min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - sample.prompt):
            return True
        is_end = (one == EOS and not params.ignore_eos) or one in params.stop_token_ids
        return is_end and count > params.min_tokens

    def finish(self) -> None:
        """Until all have ended."""
        while self.samples or self.flight:
            for slot in np.flatnonzero(self.schedule.status == PREEMPTED).tolist():
                if not self.samples[slot].is_over:
                    self.resume(slot)
            self.step()
            while len(self.flight) >= self.depth or (self.flight and not self.samples):
                self.hear()
                self.halt()

    def resume(self, slot: int, chunk: int | None = None) -> None:
        """All that it knew is computed again: its prompt, and what it has sampled."""
        self.plan.resume(slot, range(40 * slot, 40 * slot + 17), chunk=chunk or int(self.schedule.known[slot]))

    def is_running(self, slot: int) -> bool:
        return bool(self.schedule.status[slot] == RUNNING)


def random_sample(chance: random.Random, key: KEY, n: int) -> Sample:
    stop = tuple(chance.sample(STOPS, chance.choice([0, 0, 0, 1, 2])))
    params = SamplingParams(
        n=n,
        max_tokens=chance.choice([None, 1, 2, 10, 30]),
        min_tokens=chance.choice([0, 0, 0, 1]),
        stop=stop,
        stop_token_ids=tuple(chance.sample(range(10), chance.choice([0, 0, 0, 1]))),
        ignore_eos=chance.random() < 0.5,
        detokenize=bool(stop) or chance.random() < 0.9,
        skip_special_tokens=chance.random() < 0.5,
        include_stop_str_in_output=chance.random() < 0.3,
        logprobs=chance.choice([None, None, None, 2]),
    )
    return Sample(key, params, chance.randint(1, 12), [chance.randrange(10) for _ in range(MAX_MODEL_LEN)])
