"""Requests with grammars on a device of a test, with the core's own scheduler: answers, and how samples end.

The tokenizer has a token for each byte, behind the special tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import FinishReason, Progress, SamplingParams, Submit
from penstock.engine.text.detokenizer import build_vocabulary
from penstock.engine.text.grammar import build_grammar
from penstock.engine.text.grammar_fields import GrammarSource
from penstock.engine.worker.worker import build_result
from penstock.tensor import Handle, Scope
from tests.support.engine import simulated_device
from tests.support.tiny_models import CHAT, END_OF_TURN, SPECIAL

END = SPECIAL.index(END_OF_TURN)  # the end id
VOCABULARY = len(SPECIAL) + 256
PATTERNS = (r"[1-9][0-9]{2,9}", r"7(-[0-9]{2}){3,10}=(5|6|77)", r"[ab]{1,40}(cd[0-9])?", r"(x|yy|é){6}")


def write_byte_tokenizer(folder: Path, without: str = "") -> bytes:
    """Writes tokenizer.json, without the tokens of some ASCII characters. Returns the byte of each id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = [f"unused {character}" if character in without else character for character in alphabet]
    vocabulary = {token: token_id for token_id, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = build_vocabulary(tokenizer).texts
    return b"".join(text if len(text) == 1 else b"?" for text in texts[:VOCABULARY])


def simulated_chats(folder: Path) -> dict[str, Any]:
    """Options of a simulated engine that answers chats and follows grammars, without torch."""
    write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    device = simulated_device(vocabulary=VOCABULARY, end_id=END, end_one_in=100_000)
    return {"simulated": device, "model": str(folder), "end_ids": (END,), "api_server_count": 1}


def grammar_handle(pattern: str) -> Handle:
    grammar = build_grammar(GrammarSource("regex", pattern, "regex"))
    return Scope().put(grammar.text, key=grammar.key)


class Case(NamedTuple):
    """A request; `pattern` None: without a grammar."""

    prompt: list[int]
    pattern: str | None
    tokens: int = 40
    temperature: float = 1.0
    n: int = 1
    handle: Handle | None = None  # of another grammar than that of the pattern

    def fits(self, ids: Sequence[int], byte_of: bytes) -> bool:
        """Returns whether an answer that ended by the end id is of the grammar."""
        text = bytes(byte_of[token] for token in ids[:-1]).decode()
        return ids[-1] == END and self.pattern is not None and re.fullmatch(self.pattern, text) is not None


class Outcome(NamedTuple):
    ids: list[list[int]]  # of each sample, in the order of the requests
    reasons: list[FinishReason]
    preemptions: int


def cases(count: int, seed: int = 1) -> list[Case]:
    """Every fourth request has no grammar, and every third is greedy."""
    chance = np.random.default_rng(seed)
    built = []
    for number in range(count):
        prompt = chance.integers(8, VOCABULARY, chance.integers(1, 40)).tolist()
        pattern = None if number % 4 == 3 else PATTERNS[number % len(PATTERNS)]
        built.append(Case(prompt, pattern, temperature=0.0 if number % 3 == 0 else 1.0, n=2 if number % 5 == 4 else 1))
    return built


def answers(
    device: Any,
    requests: Sequence[Case],
    *,
    slots: int = 8,
    budget: int = 512,
    depth: int = 2,
    resumed: Sequence[list[list[int]]] = (),
    steps: int | None = None,
) -> Outcome:
    """Runs requests to their end, or for so many `steps`. `resumed`: ids of each request's samples, before."""
    batch = BatchState(slots, device.blocks, 16)
    length = min(400, device.blocks * 16)
    config = SchedulerConfig(max_model_len=length, max_num_batched_tokens=budget, has_overlap=depth > 1, eos_ids=(END,))
    scheduler, builder = Scheduler(batch, config), StepBuilder(batch)
    ids: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], FinishReason] = {}
    for number, case in enumerate(requests):
        before = resumed[number] if resumed else [[] for _ in range(case.n)]
        ids |= {(number, sample): list(generated) for sample, generated in enumerate(before)}
        scheduler.submit(_submit(number, case, before))
    flights: deque[Any] = deque()
    owner: dict[int, tuple[int, int]] = {}  # by slot
    numbers = itertools.count(1)
    while (scheduler.open_requests or flights) and steps != 0:
        steps = None if steps is None else steps - 1
        while len(flights) < depth and scheduler.schedule(builder):
            step = builder.build(1, next(numbers))
            batch.apply(step)
            if step.joined is not None:
                owner |= {slot: (int(batch.requests[slot]), int(batch.samples[slot])) for slot in step.joined.slots}
            scheduler.on_sent(step)
            flights.append((step, device.launch(batch, step), batch.sampled, dict(owner)))
        if flights:
            step, flight, rows, owners = flights.popleft()
            done = build_result(step, flight.result())
            for slot, token in zip(rows.tolist(), done.ids.tolist(), strict=True):
                if owners[slot] not in reasons:
                    ids[owners[slot]].append(token)
            for _, tokens in scheduler.on_result(done):
                for end in tokens.ended:
                    reasons.setdefault(owners[end.slot], end.reason)
    keys = sorted(ids)
    return Outcome([ids[key] for key in keys], [reasons.get(key) for key in keys], scheduler.preemptions)  # type: ignore[misc]


def _submit(number: int, case: Case, before: list[list[int]]) -> Submit:
    params = SamplingParams(n=case.n, temperature=case.temperature, max_tokens=case.tokens)
    handle = case.handle or (None if case.pattern is None else grammar_handle(case.pattern))
    progress = None
    if any(before):
        counts = np.array([len(ids) for ids in before], np.int32)
        progress = Progress(counts, np.array(list(itertools.chain(*before)), np.int32))
    prompt = np.array(case.prompt, np.int32)
    return Submit(0, number, prompt, params, seed=1000 + number, progress=progress, grammar=handle)
