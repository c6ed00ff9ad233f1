"""A scheduler and its output processors, and a device that samples the ids of a script."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import (
    Abort,
    ChunkFormat,
    Delta,
    FinishReason,
    Logprobs,
    SamplingParams,
    Step,
    StepDone,
    Submit,
    Tokens,
)
from penstock.engine.text.detokenizer import Vocabulary

EOS = 3
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
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

    def plainly(self) -> tuple[list[int], str, tuple[FinishReason, int | str | None]]:
        """Its ids, text and end, as if everything were known at once."""
        params = self.params
        data, free = b"", 0
        limit = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - self.prompt)
        for count, token in enumerate(self.script, 1):
            may_stop = count > params.min_tokens
            end: tuple[FinishReason, int | str | None] | None = None
            if may_stop and token == EOS and not params.ignore_eos:
                end = FinishReason.STOP, None
            elif may_stop and token in params.stop_token_ids:
                end = FinishReason.STOP, token
            elif count >= limit:
                end = FinishReason.LENGTH, None
            shows = end is None or end[0] != FinishReason.STOP or params.include_stop_str_in_output
            if params.detokenize and shows and not (params.skip_special_tokens and token == 8):
                data += PIECES[token]
            text = data.decode(errors="replace") if end else self.certain(data)
            for at in range(free + 1, len(text) + 1):
                stops = [stop for stop in params.stop if text[:at].endswith(stop)]
                if stops and may_stop:
                    stop = max(stops, key=len)
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
            token_id = self.got.setdefault((server, request, sample), Got())
            assert token_id.end is None, f"{(server, request, sample)} goes on after its end"
            token_id.ids += ids[:count]
            token_id.text += text[:length]
            ids, text = ids[count:], text[length:]
            rows.append(token_id)
        assert not ids and not text
        if delta.logprobs is not None:
            assert delta.logprobs.counts is not None
            ends = np.cumsum(delta.logprobs.counts).tolist()
            each_id = [actual for actual, count in zip(rows, counts, strict=True) for _ in range(count)]
            for token_id, end, many in zip(each_id, ends, delta.logprobs.counts.tolist(), strict=True):
                if many:
                    token_id.logprobs.append(delta.logprobs.ids[end - many : end].tolist())
        if delta.finished is not None:
            size = delta.finished.rows.size
            stops = delta.finished.stops or [None] * size
            for row, reason, stop in zip(
                delta.finished.rows.tolist(), delta.finished.reasons.tolist(), stops, strict=True
            ):
                rows[row].end = FinishReason(reason), stop
        if delta.began is not None:
            for row, part in zip(delta.began.rows.tolist(), delta.began.cached.tolist(), strict=True):
                assert len(rows[row].ids) == 1, "it has begun before"
                rows[row].cached = part
        return rows


class Speaking:
    """`step` sends a step; `hear` takes the oldest result, and gives the outputs what it means to them."""

    def __init__(self, slots: int = 8, depth: int = 1, blocks: int = 1000, outputs: int = 1, interval: int = 1) -> None:
        self.schedule = BatchState(slots, blocks, BLOCK_SIZE, MAX_MODEL_LEN // BLOCK_SIZE)
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=2 * slots,
            eos_ids=(EOS,),
            has_overlap=depth == 2,
            output_processors=outputs,
        )
        self.scheduler = Scheduler(self.schedule, config)
        self.plan = StepBuilder(self.schedule)
        self.states = [OutputState(VOCABULARY, slots, interval) for _ in range(outputs)]
        self.outputs = [Told() for _ in range(outputs)]
        self.number = 0
        self.flight: deque[StepDone] = deque()
        self.samples: dict[KEY, Sample] = {}
        self.cached: dict[KEY, int] = {}  # of each prompt: a sample that shares another one's says the same
        self.servers = Servers()
        self.aborts: list[Abort] = []  # of outputs, which the core has not heard
        self.fails: dict[KEY, FinishReason] = {}  # samples that fail in the next step
        self.preempted = 0

    def ask(self, *samples: Sample, chunk_format: ChunkFormat | None = None, begins: int = 0) -> None:
        """All samples of one request. Prompts that begin with the same number are alike."""
        first = samples[0]
        server, request, _ = first.key
        prompt = np.full(first.prompt, begins, np.int32)
        self.samples.update({sample.key: sample for sample in samples})
        self.scheduler.submit(Submit(server, request, prompt, first.params, chunk_format=chunk_format))

    def step(self) -> bool:
        if not self.scheduler.schedule(self.plan):
            return False
        self.number += 1
        step = self.plan.build(1, self.number)
        self.schedule.apply(step)
        self._tell(self.scheduler.on_sent(step))
        self._note_cached(step)
        self.preempted += 0 if step.preempted is None else step.preempted.size
        self.flight.append(self._sampled(step))
        return True

    def _note_cached(self, step: Step) -> None:
        if step.joined is None:
            return
        slots = step.joined.slots.tolist()
        computed = [0] * len(slots) if step.joined.computed is None else step.joined.computed.tolist()
        parents = slots if step.joined.parents is None else step.joined.parents.tolist()
        for slot, count, parent in zip(slots, computed, parents, strict=True):
            key = self._key(slot)
            self.cached[key] = count if slot == parent else self.cached[self._key(parent)]

    def _key(self, slot: int) -> KEY:
        schedule = self.schedule
        return int(schedule.servers[slot]), int(schedule.requests[slot]), int(schedule.samples[slot])

    def _sampled(self, step: Step) -> StepDone:
        """As the device gives it."""
        schedule, sampled, failed = self.schedule, [], {}
        for slot in schedule.sampled.tolist():
            key = self._key(slot)
            sample = self.samples[key]
            at = int(schedule.known[slot]) - sample.prompt - 1
            sampled.append((sample, sample.script[min(at, len(sample.script) - 1)]))
            if key in self.fails:
                failed[slot] = self.fails.pop(key)
        counts = [sample.params.logprobs + 1 if sample.params.logprobs else 0 for sample, _ in sampled]
        likely = [token + n for (_, token), count in zip(sampled, counts, strict=True) for n in range(count)]
        logprobs = Logprobs(
            np.array(likely, np.int32),
            np.full(len(likely), -0.5, np.float32),
            np.ones(len(sampled), np.int32),
            np.array(counts, np.int32),
        )
        return StepDone(
            1,
            self.number,
            np.array([token for _, token in sampled], np.int32),
            logprobs=logprobs if likely else None,
            failed=np.array(list(failed), np.uint16) if failed else None,
            reasons=np.array(list(failed.values()), np.uint8) if failed else None,
        )

    def hear(self) -> None:
        self._tell(self.scheduler.on_result(self.flight.popleft()))

    def _tell(self, messages: list[tuple[int, Tokens]]) -> None:
        for output, tokens in messages:
            self.outputs[output].check(tokens)
            answers = self.states[output].process(tokens)
            assert len({server for server, _ in answers.deltas}) == len(answers.deltas)
            for server, delta in answers.deltas:
                self._deliver(server, delta)
            self.aborts += answers.aborts

    def _deliver(self, server: int, delta: Delta) -> None:
        self.servers.take(server, delta)

    def abort(self) -> None:
        """The core hears of all samples that have ended by their text."""
        for abort in self.aborts:
            assert abort.samples is not None
            for request, sample in zip(abort.requests.tolist(), abort.samples.tolist(), strict=True):
                stop = self.samples[abort.server, request, sample].plainly()[2][1]
                assert isinstance(stop, str), "aborted, and no stop string has ended it"
                self.scheduler.abort(abort.server, request, sample)
        self.aborts = []

    def finish(self) -> None:
        """Until all have ended."""
        while self.scheduler.open_requests or self.flight:
            if not self.step() or not self.scheduler.open_requests:
                self.hear()
                self.abort()
        while self.step() or self.flight:  # the slots of the last ones
            self.hear()


class Told:
    """What an output knows: nothing of a sample comes before its start, or after its end."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.slots: list[int] = []

    def check(self, tokens: Tokens) -> None:
        aborted, started, ended = (
            tokens.aborted,
            [sample.slot for sample in tokens.started],
            [sample.slot for sample in tokens.ended],
        )
        if tokens.slots is not None:
            assert tokens.slots.tolist() != self.slots, "the same slots are sent again"
            self.slots = tokens.slots.tolist()
        assert self.open.issuperset(aborted)
        self.open.difference_update(aborted)
        assert self.open.isdisjoint(started)
        self.open.update(started)
        assert not tokens.ids.size or (self.open.issuperset(self.slots) and len(self.slots) == tokens.ids.size)
        assert self.open.issuperset(ended)
        self.open.difference_update(ended)


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
