"""What tests of the whole engine share: an engine on a simulated device, and what its rule says of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.process import ChildProcess
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.launcher.launcher import Run as RunServer
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from penstock.engine.worker.simulated_device import TokenRule

START = 60.0  # seconds; until an engine serves on a busy machine
PATIENCE = 30.0  # seconds; for anything else
SHAPE = {"tensor_parallel_size": 2, "output_processors": 1}  # of a group that has every kind of process

_beginnings = itertools.count()


class Running:
    """A engine that serves."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.config = launcher.cluster.config
        self.rule = TokenRule(self.config.simulated or simulated_device())

    def child(self, kind: str, index: int = 0) -> ChildProcess:
        matches = [child for child in self.children() if (child.member.kind, child.member.index) == (kind, index)]
        assert len(matches) == 1, f"{kind} {index}: {matches}"
        return matches[0]

    def children(self) -> list[ChildProcess]:
        return [child for unit in self.launcher.units for child in unit.children.values()]

    def number(self, word: int, group: int = 0) -> int:
        return self.launcher.board.row(group)[word]

    async def until(self, condition: Any, within: float = PATIENCE) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while not condition():
            assert loop.time() < deadline, "it did not come to this"
            await asyncio.sleep(0.005)

    async def serving_again(self, client: Client) -> None:
        """After a death that `client` was told of, which the launcher may see later."""
        await self.until(lambda: len(client.serving_groups) == len(self.launcher.cluster.inboxes), START)
        await self.launcher.serving(START)

    async def must_be_empty(self, group: int = 0) -> None:
        """No request is open, and all blocks are free."""
        blocks = self.config.simulated.blocks if self.config.simulated else self.config.num_gpu_blocks_override
        await self.until(lambda: self.number(StatusBoard.OPEN, group) == 0)
        await self.until(lambda: self.number(StatusBoard.FREE_BLOCKS, group) == blocks)


def simulated_device(**options: Any) -> SimulatedDevice:
    return SimulatedDevice(**{"step_seconds": 0.002, "vocabulary": 1000, "blocks": 4096, **options})


@contextlib.asynccontextmanager
async def launched(
    config: EngineConfig, serve: RunServer | None = None, within: float = START
) -> AsyncIterator[Running]:
    launcher = Launcher(config, serve)
    try:
        launcher.start()
        await launcher.serving(within)
        yield Running(launcher)
    finally:
        late = await launcher.stop()
    assert not late, f"had to be killed: {late}"


def running(serve: RunServer | None = None, **options: Any) -> contextlib.AbstractAsyncContextManager[Running]:
    return launched(EngineConfig(**{"simulated": simulated_device(), "max_model_len": 4096, **options}), serve)


def prompt(length: int = 12) -> npt.NDArray[np.int32]:
    """Another one each time."""
    return np.arange(length, dtype=np.int32) + 1000 * next(_beginnings)


async def answered(client: Client, ids: npt.NDArray[np.int32], **params: Any) -> list[tuple[list[int], FinishReason]]:
    """Ids and reason of each sample."""
    sampling = SamplingParams(**params)
    actual: list[list[int]] = [[] for _ in range(sampling.n)]
    reasons: dict[int, FinishReason] = {}
    async with await client.submit(ids, sampling, timeout=PATIENCE) as stream:
        async for piece in stream:
            assert piece.sample not in reasons, "more came after the end"
            actual[piece.sample] += piece.ids
            if piece.reason is not None:
                reasons[piece.sample] = piece.reason
    assert stream.completion_tokens == sum(map(len, actual))
    return [(ids, reasons[sample]) for sample, ids in enumerate(actual)]


async def fate(client: Client, ids: npt.NDArray[np.int32], tokens: int) -> tuple[float, EngineError | None]:
    """When the request ended, and how: None if it was answered."""
    error = None
    try:
        await answered(client, ids, max_tokens=tokens, ignore_eos=True)
    except EngineError as failure:
        error = failure
    return asyncio.get_running_loop().time(), error
