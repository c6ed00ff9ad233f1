"""Processes are killed under answers with grammars: each answer is, byte for byte, that of a run without a death.

Plain streams beside them are those of a run without grammars.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from penstock.engine.client.client import Client
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from penstock.engine.text.grammar import build_grammar
from penstock.engine.text.grammar_fields import Grammar, GrammarSource
from tests import tiers
from tests.crash.test_engine_migration import kill
from tests.support.engine import PATIENCE, SHAPE, START, Running, launched, simulated_device
from tests.support.grammars import END, VOCABULARY, write_byte_tokenizer
from tests.support.loops import in_a_loop

SOURCES = (
    GrammarSource("regex", r"[1-9][0-9]{90,120}x", "regex"),
    GrammarSource("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 40}, "json"),
    GrammarSource("regex", r"([ab]{3}-){30}(é|zz)", "regex"),
)
REQUESTS = 16
MEMBERS = (("worker", 0), ("output", 0), ("core", 0))

Answers = list[list[tuple[str, FinishReason | None]]]


async def answer(client: Client, number: int, grammar: Grammar | None) -> list[tuple[str, FinishReason | None]]:
    """Text and reason of each sample."""
    params = SamplingParams(n=1 + number % 2, max_tokens=150, temperature=1.0 if number % 3 else 0.0)
    texts, reasons = [""] * params.n, [None] * params.n
    prompt = [VOCABULARY - 1 - number, *range(10, 40)]
    params = SamplingParams(n=params.n, max_tokens=150, temperature=params.temperature, seed=number)
    async with await client.submit(prompt, params, grammar=grammar, timeout=START + PATIENCE) as stream:
        async for chunk in stream:
            texts[chunk.sample] += chunk.text
            if chunk.reason is not None:
                reasons[chunk.sample] = chunk.reason  # type: ignore[call-overload]
    return list(zip(texts, reasons))


async def run(config: EngineConfig, strike: Callable[[Running], Any] | None, *, has_grammars: bool = True) -> Answers:
    """Every fourth request has no grammar. `strike` comes while all are open."""
    grammars = [build_grammar(source) for source in SOURCES]
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        numbers = [number for number in range(REQUESTS) if has_grammars or number % 4 == 3]
        tasks = [
            asyncio.ensure_future(answer(client, number, None if number % 4 == 3 else grammars[number % 3]))
            for number in numbers
        ]
        if strike is not None:
            await asyncio.sleep(0.4)
            assert not any(task.done() for task in tasks)
            strike(engine)
        return list(await asyncio.wait_for(asyncio.gather(*tasks), START + PATIENCE))


def simulated_config(folder: Path, **options: Any) -> EngineConfig:
    write_byte_tokenizer(folder)
    device = simulated_device(step_seconds=0.01, vocabulary=VOCABULARY, end_id=END, end_one_in=100_000)
    return EngineConfig(simulated=device, model=str(folder), end_ids=(END,), max_model_len=4096, **SHAPE, **options)


def must_be_structured(answers: Answers) -> None:
    ended = [text for number, samples in enumerate(answers) if number % 4 != 3 for text, _ in samples]
    assert all(text and set(text) <= set("0123456789,- []xabzé") for text in ended), ended
    assert sum(reason == FinishReason.STOP for samples in answers for _, reason in samples) >= 6


@pytest.mark.timeout(300)
@in_a_loop
async def test_structured_answers_are_the_same_when_a_process_is_killed(tmp_path: Path) -> None:
    config = simulated_config(tmp_path)
    expected = await run(config, None)
    must_be_structured(expected)
    plain = await run(config, None, has_grammars=False)
    assert plain == [samples for number, samples in enumerate(expected) if number % 4 == 3]
    for kind, index in MEMBERS:
        assert await run(config, lambda engine: kill(engine, kind, index)) == expected, (kind, index)  # noqa: B023


@tiers.needs_all
@pytest.mark.timeout(300)
@in_a_loop
async def test_model_on_two_ranks_answers_the_same_when_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import transformers

    from tests.support.tiny_models import write_llama

    transformers.logging.disable_progress_bar()
    model = write_llama(tmp_path)
    options = {"model": str(model), "end_ids": (END,), "max_model_len": 1024, "max_num_seqs": 32, "threads": 1}
    alone = EngineConfig(**options, dtype="float32")
    expected = await run(alone, None)
    must_be_structured(expected)
    ranks = EngineConfig(**options, dtype="float32", tensor_parallel_size=2, output_processors=1)
    assert await run(ranks, lambda engine: kill(engine, "worker", 0)) == expected
