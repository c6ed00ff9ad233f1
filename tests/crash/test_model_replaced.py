"""The weights of a model are replaced while it is served: no answer is continued by another fine-tune."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.support.engine import PATIENCE, START, launched
from tests.support.fine_tunes import replace_weights, write_fine_tune
from tests.support.loops import in_a_loop

TOKENS = 2_000  # of an answer: many steps are left when the blow falls, on a machine with other work, too
SHORT = 24
SLOTS = 3
pytestmark = pytest.mark.timeout(300)


class Engine:
    def __init__(self, launcher: Launcher, client: Client, model: Path) -> None:
        self.launcher, self.client, self.model = launcher, client, model

    async def submit(self, number: int, tokens: int = TOKENS) -> OutputStream:
        prompt = np.arange(20 + number, 40 + number, dtype=np.int32)
        return await self.client.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0))

    async def answer(self, number: int, tokens: int = SHORT) -> list[int]:
        return await ids_of(await self.submit(number, tokens))

    def lose(self, how: str, group: int = 0) -> None:
        """Makes a group start again: it is killed, or a planned migration begins, which restarts the first group."""
        if how == "migrate":
            return self.launcher.migrate()
        children = [child for unit in self.launcher.units for child in unit.children.values()]
        (worker,) = [child for child in children if (child.member.kind, child.member.group) == ("worker", group)]
        os.kill(worker.pid, signal.SIGKILL)
        return None

    async def until_serving(self, group: int, incarnation: int) -> None:
        while self.launcher.board.row(group)[StatusBoard.SERVING] != incarnation:
            await asyncio.sleep(0.01)

    def models(self) -> list[int]:
        return [row[StatusBoard.MODEL] for row in self.launcher.board.rows]


async def ids_of(stream: OutputStream) -> list[int]:
    ids: list[int] = []
    async for chunk in stream:
        ids += chunk.ids
    return ids


async def must_have_changed(reading: asyncio.Task[list[int]]) -> None:
    with pytest.raises(EngineError, match="the model's files have been replaced since the answer began") as caught:
        await asyncio.wait_for(reading, START + PATIENCE)
    assert caught.value.status == 503


@contextlib.asynccontextmanager
async def serving(path: Path, groups: int = 1) -> AsyncIterator[Engine]:
    model = write_fine_tune(path / "model", 0)
    config = EngineConfig(
        model=str(model), dtype="float32", max_num_seqs=SLOTS, data_parallel_size=groups, max_model_len=2_560, threads=1
    )
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        yield Engine(engine.launcher, client, model)


@pytest.mark.parametrize("how", ["kill", *tiers.only_in_all("migrate")])
@in_a_loop
async def test_begun_answers_end_and_others_are_the_new_model_s(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path) as engine:
        former = await engine.answer(0)
        streams = [await engine.submit(number) for number in range(SLOTS)]
        while not all(stream.completion_tokens for stream in streams):
            await asyncio.sleep(0.002)
        waiting = await engine.submit(0, SHORT)  # no slot is free: the answer does not begin
        before = engine.models()
        replace_weights(engine.model, 1)
        engine.lose(how)
        reading = [asyncio.ensure_future(ids_of(stream)) for stream in streams]
        new = await asyncio.wait_for(ids_of(waiting), START + PATIENCE)
        for task in reading:
            await must_have_changed(task)
        assert engine.models() != before
        assert new == await engine.answer(0) != former


@tiers.needs_all  # in push: test_begun_answer_goes_on_in_the_group_of_its_model_alone, of the client
@pytest.mark.parametrize("how", ["kill", "migrate"])
@in_a_loop
async def test_answers_go_on_in_the_group_of_the_former_model_only(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path, groups=2) as engine:
        expected = [await engine.answer(number, TOKENS) for number in range(2 * SLOTS)]
        streams = [await engine.submit(number) for number in range(2 * SLOTS)]
        while not all(stream.completion_tokens for stream in streams):
            await asyncio.sleep(0.002)
        groups = [stream.group for stream in streams]
        assert set(groups) == {0, 1}
        replace_weights(engine.model, 1)
        engine.lose(how)
        reading = [asyncio.ensure_future(ids_of(stream)) for stream in streams]
        await asyncio.wait_for(engine.until_serving(0, 2), START)
        if how == "kill":  # the other group still has the former model, and all requests
            assert len(set(engine.models())) == 2
            engine.lose(how, 1)
        await asyncio.wait_for(engine.until_serving(1, 2), START)
        assert len(set(engine.models())) == 1
        results = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), PATIENCE)
        for number, result in enumerate(results):
            if isinstance(result, EngineError):
                assert "the model's files have been replaced" in result.reason
            else:
                assert result == expected[number]
        assert await engine.answer(0) != expected[0][:SHORT]


@tiers.needs_all  # in push: test_preflight has the text, and test_engine_starts a group that fails until it serves
@in_a_loop
async def test_broken_file_is_named_and_the_group_serves_once_it_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as engine:
        former = await engine.answer(0)
        path = engine.model / "model.safetensors"
        path.rename(engine.model / "former")
        path.write_bytes((engine.model / "former").read_bytes()[:-1])
        engine.lose("kill")
        error = ""
        while f"{path} is cut off" not in error:
            error += capfd.readouterr().err
            await asyncio.sleep(0.05)
        (engine.model / "former").rename(path)
        assert await engine.answer(0) == former
