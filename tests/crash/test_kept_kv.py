"""Processes of an engine that computes are killed, and the next life adopts the KV cache: little is computed again.

`test_migration` has the same kills in campaigns, and `native/engine/tests/block_ledger` kills between any two writes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine._native import ledger_nbytes
from penstock.engine.cluster.kept_memory import CONTENT_AT
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.crash.migrating import Migrating, migrating
from tests.crash.request_mix import Mix
from tests.crash.strikes import compare, shuffled_kinds
from tests.crash.test_migration import BYTES, MODEL, MODEL_START, shape
from tests.support import tiny_models
from tests.support.loops import in_a_loop

BLOCK_SIZE = 16
TOKENS, KILL_AT, MAX_CUT = 80, 37, 64
REQUESTS = 30  # of a round
PROMPT = np.random.default_rng(7).integers(10, 250, 300).tolist()
Got = list[tuple[int, float]]  # ids with their log-probabilities


def options_of(models: Path, **more: Any) -> dict[str, Any]:
    return {**MODEL, "model": str(models / tiny_models.LLAMA), **more}


async def answer(
    engine: Migrating, salt: str, victim: tuple[str, int] | None = None, number: int = 9, at: int = KILL_AT
) -> Got:
    """Returns an answer. `victim`: a process that gets the signal after `at` ids."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, temperature=0.8, seed=3)
    got: Got = []
    async with await engine.engine_client.submit(PROMPT, params, salt=salt.encode()) as stream:
        async for part in stream:
            assert part.logprobs is not None
            got += zip(part.ids, part.logprobs.values.tolist(), strict=True)
            if victim is not None and len(got) >= at:
                os.kill(engine.child(*victim).pid, number)
                victim = None
    return got


def ids_of(got: Got) -> list[int]:
    return [token for token, _ in got]


def resumed(engine: Migrating) -> dict[str, int]:
    """Returns tokens of resumed requests, found and computed again."""
    return {way: engine.number(word) for way, word in StatusBoard.RESUMED_TOKENS.at.items()}


def kv_files(pid: int) -> list[str]:
    """Returns the names of the files of KV caches that a process has open."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted({link.partition("penstock kv ")[2].removesuffix(" (deleted)") for link in links} - {""})


def discards(engine: Migrating) -> list[str]:
    return [reason for reason, word in StatusBoard.KV_DISCARDS.at.items() if engine.number(word)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "dtype"),
    # The test below kills the core and the worker of one rank in bfloat16.
    [(("worker", 0), "float32"), (("worker", 1), "bfloat16"), *tiers.only_in_all((("core", 0), "bfloat16"))],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} {value[1]}",
)
@in_a_loop
async def test_resumed_answer_is_the_undisturbed_one_in_bfloat16_bitwise(
    victim: tuple[str, int],
    dtype: str,
    models: Path,
) -> None:
    ranks = 1 + victim[1]
    async with migrating({}, MODEL_START, **options_of(models, dtype=dtype, tensor_parallel_size=ranks)) as engine:
        undisturbed = await answer(engine, "undisturbed")
        disturbed = await answer(engine, "disturbed", victim)
        assert ids_of(disturbed) == ids_of(undisturbed)
        # In float32 the last block is one chunk: other sums, in the last bits.
        tolerance = 1e-4 if dtype == "float32" else 0.0
        assert (
            max(abs(actual - expected) for (_, actual), (_, expected) in zip(disturbed, undisturbed, strict=True))
            <= tolerance
        )
        tokens = resumed(engine)
        assert tokens["computed"] <= BLOCK_SIZE + 1
        assert sum(tokens.values()) >= len(PROMPT) + KILL_AT
        assert engine.number(StatusBoard.KV_ADOPTED) >= 2 * (len(PROMPT) // BLOCK_SIZE)
        assert not discards(engine)


@pytest.mark.timeout(tiers.limit(900.0, 900.0))
@in_a_loop
async def test_answer_that_is_cut_anywhere_is_the_undisturbed_one_bitwise(models: Path) -> None:
    async with migrating({}, MODEL_START, **options_of(models, dtype="bfloat16")) as engine:
        undisturbed = await answer(engine, "undisturbed")
        for at in np.linspace(1, MAX_CUT, tiers.KEPT_KV_CUTS).astype(int).tolist():
            victim = ("worker", 0) if at % 2 else ("core", 0)
            assert await answer(engine, f"cut {at}", victim, at=at) == undisturbed, (at, victim)
            # The id of the last step; another id where a block had just begun, and the tail of a prompt likewise.
            assert resumed(engine)["computed"] <= (2 if at > 2 else BLOCK_SIZE + 1), at
            await engine.must_be_whole(MODEL_START)


@pytest.mark.timeout(300)
@in_a_loop
async def test_kv_cache_is_discarded_with_a_reason_and_kept_when_planned(models: Path) -> None:
    async with migrating({}, MODEL_START, **options_of(models)) as engine:
        undisturbed = ids_of(await answer(engine, "undisturbed"))
        assert ids_of(await answer(engine, "signal", ("worker", 0), signal.SIGSEGV)) == undisturbed
        assert discards(engine) == ["failed"] and engine.number(StatusBoard.KV_ADOPTED) == 0
        assert resumed(engine)["found"] == 0

        assert kv_files(engine.child("output", 0).pid) == []
        assert kv_files(engine.child("core", 0).pid) == ["ledger: 0", "pages: 0.0"]
        files = engine.launcher.cluster.kv_files_of(0)
        assert files is not None
        _, _, blocks = files.ledger.read_header()
        with files.ledger.map() as ledger:
            ledger[CONTENT_AT + ledger_nbytes(blocks - 1)] = 7  # the state of the last block, which no request has
        assert ids_of(await answer(engine, "damage", ("worker", 0))) == undisturbed
        assert discards(engine) == ["damaged"] and engine.number(StatusBoard.KV_ADOPTED) == 0

        reading = asyncio.ensure_future(answer(engine, "planned"))
        await engine.until(lambda: engine.number(StatusBoard.SAMPLED) > TOKENS)  # those of the resumed one, and more
        before = engine.serving(0)
        engine.launcher.migrate()
        assert ids_of(await reading) == undisturbed
        await engine.until(lambda: engine.serving(0) > before, MODEL_START)
        assert not discards(engine) and engine.number(StatusBoard.KV_ADOPTED) > len(PROMPT) // BLOCK_SIZE


@pytest.mark.timeout(tiers.limit(900.0, 20_000.0))
@pytest.mark.parametrize("keeps", [True, *tiers.only_in_all(False)], ids=["kept", "not kept"])
@in_a_loop
async def test_answers_are_the_undisturbed_ones_under_random_kills(
    keeps: bool,
    seed: int,
    models: Path,
) -> None:
    kinds = shuffled_kinds(seed, ("worker", "core"))
    # A draw at the border of two ids may differ by the company of its row. The mix of 1 has shown none.
    mix = Mix(shape(tiny_models.LLAMA, BYTES, tokens=(40, 120), has_logprobs=True), tiers.choose(1, seed, seed))
    async with migrating({}, MODEL_START, **options_of(models, tensor_parallel_size=2, keep_kv_cache=keeps)) as engine:
        for number in range(tiers.KEPT_KV_ROUNDS):
            requests = await mix.requests(engine, REQUESTS)
            await compare(engine, requests, list(itertools.islice(kinds, 2)), seed + number)
            await engine.must_be_whole(MODEL_START)
            adopted = engine.number(StatusBoard.KV_ADOPTED)
            assert (adopted > 0) == keeps and not discards(engine)
