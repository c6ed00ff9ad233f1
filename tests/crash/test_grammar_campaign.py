"""Many deaths under structured streams and streamed tool calls: each answer is that of a run without a death."""

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from msgspec.structs import replace

from penstock.engine.client.client import Client
from penstock.engine.text.grammar import build_grammar
from tests import tiers
from tests.crash.test_engine_calls import REQUESTS as CALLS
from tests.crash.test_engine_calls import Answers as StreamedCalls
from tests.crash.test_engine_grammars import REQUESTS, SOURCES, answer, simulated_config
from tests.crash.test_engine_migration import kill
from tests.support.engine import PATIENCE, START, launched
from tests.support.loops import in_a_loop

STEP_S = 0.003
VICTIMS = ("worker", "output", "core")


async def all_answers(client: Client) -> tuple[object, ...]:
    """Texts and reasons of answers, each fourth one without a grammar, and the events of tool calls."""
    grammars = [build_grammar(source) for source in SOURCES]
    calls = StreamedCalls()
    texts = [answer(client, number, None if number % 4 == 3 else grammars[number % 3]) for number in range(REQUESTS)]
    answers = await asyncio.gather(*texts, *(calls.read(client, number) for number in range(CALLS)))
    return answers[:REQUESTS], calls.lines, calls.reasoning


@tiers.needs_all
@pytest.mark.timeout(tiers.limit(1500, soak=36_000))
@in_a_loop
async def test_structured_streams_are_the_same_under_many_deaths(
    seed: int, tmp_path: Path, quick_restarts: None
) -> None:
    chance, config = random.Random(seed), simulated_config(tmp_path)
    assert config.simulated is not None
    config = replace(config, simulated=replace(config.simulated, step_seconds=STEP_S), max_num_seqs=64)
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        expected = await all_answers(client)
        for death in range(tiers.STRUCTURED_DEATHS):
            answers = asyncio.ensure_future(all_answers(client))
            await asyncio.sleep(chance.uniform(0.02, 0.5))  # anywhere between the first token and the last
            victim = chance.choice(VICTIMS)
            kill(engine, victim)
            assert await asyncio.wait_for(answers, START + PATIENCE) == expected, (death, victim)
            await engine.serving_again(client)
        await engine.must_be_empty()
