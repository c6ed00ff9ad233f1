"""A client without an engine: the test is the core and the output processor of each of its groups."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock import WouldBlock
from penstock.engine.client.client import Client
from penstock.engine.client.stream import OutputStream
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster
from penstock.engine.cluster.verdict_board import Cause, VerdictBoard, request_words
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import Delta, Finished, FinishReason, Submit

PATIENCE = 10.0
SILENCE = 0.15  # seconds in which nothing may come; a group that serves no more is seen within 0.1


class Group:
    """The other ends of a client's channels: of the group's core, and of its output processor."""

    def __init__(self, cluster: Cluster, group: int) -> None:
        self.inbox = cluster.groups[group].inbox.open_receiver(name=f"core {group}.0 #1")
        self.core = cluster.servers[0].open_sender(cluster.delta_lane(group), name=f"core {group}.0 #1")
        self.output = cluster.servers[0].open_sender(cluster.delta_lane(group, 0), name=f"output {group}.0 #1")
        self._board = StatusBoard(cluster.board, writable=True)
        self._verdicts = VerdictBoard(cluster.verdicts, writable=True)
        self._group = group
        self._tag = 0
        self.incarnation = 0
        self.serve()

    def serve(self, model: int = 0) -> None:
        self.incarnation += 1
        self._board.row(self._group)[StatusBoard.MODEL] = model
        self._board.row(self._group)[StatusBoard.SERVING] = self.incarnation

    def stop_serving(self) -> None:
        self._board.cluster[StatusBoard.SERVED] = 1
        self._board.row(self._group)[StatusBoard.SERVING] = 0

    def judge(self, cause: Cause, in_flight: Sequence[tuple[int, int]] = (), *, is_trial: bool = False) -> None:
        self._tag += 1
        words = request_words([server for server, _ in in_flight], [request for _, request in in_flight])
        self._verdicts.write_requests(self._group, self.incarnation, self._tag, [words], is_trial)
        self._verdicts.write_cause(self._group, self.incarnation, cause)

    def lose(self, cause: Cause = Cause.OUTSIDE, *streams: OutputStream, is_trial: bool = False) -> None:
        """`streams`: the streams with requests in the steps in flight."""
        self.judge(cause, [(0, stream.request) for stream in streams], is_trial=is_trial)
        self.stop_serving()

    async def receive(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.inbox.receive, PATIENCE)

    async def submitted(self) -> Submit:
        message = await self.receive()
        assert isinstance(message, Submit)
        return message

    async def require_silence(self) -> None:
        await asyncio.sleep(SILENCE)
        with pytest.raises(WouldBlock):
            self.inbox.receive_nowait()

    def answer(self, request: int, ids: Sequence[int], reason: FinishReason | None = None, sample: int = 0) -> None:
        text = bytes(ids)
        ends = None if reason is None else Finished(np.zeros(1, np.uint16), np.array([reason], np.uint8))
        self.output.send(
            Delta(
                1,
                np.array([request, len(text), *ids], np.int32),
                text,
                counts=np.array([len(ids)], np.uint16),
                samples=np.array([sample], np.uint16),
                finished=ends,
            ),
            PATIENCE,
        )

    def close(self) -> None:
        for end in (self.inbox, self.core, self.output, self._board, self._verdicts):
            end.close()


@contextlib.asynccontextmanager
async def engine(groups: int = 1, **options: Any) -> AsyncIterator[tuple[list[Group], Client]]:
    """The groups, all of which serve, and a client of them."""
    config = EngineConfig(simulated=SimulatedDevice(), data_parallel_size=groups, **options)
    cluster = Cluster.open(config)
    others = [Group(cluster, group) for group in range(groups)]
    try:
        async with Client(cluster, 0) as client:
            yield others, client
    finally:
        for other in others:
            other.close()
        if cluster.store is not None:
            assert not [item for item in cluster.store.stats().items if item.holders], (
                "an image is held after its request"
            )
            cluster.store.close()
        cluster.close()
