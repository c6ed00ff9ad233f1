"""Vectors that the store gives up before a server reads them: their prompts are submitted again, a few times."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import FinishReason, Floats
from penstock.server.chat.pooling_schema import PoolingFields
from penstock.server.http.pooling_routes import ATTEMPTS, PoolingRoutes
from penstock.server.options import ServerOptions
from penstock.server.status.counters import Served, ServerCounters
from penstock.tensor import Handle, Scope
from tests.support.loops import in_a_loop


class LossyClient:
    """Answers at once, and loses the vectors of the first `losses` reads."""

    def __init__(self, losses: int) -> None:
        self.submitted: list[list[int]] = []
        self._losses = losses

    async def submit(self, ids: list[int], *_: Any, **__: Any) -> OutputStream:
        self.submitted.append(ids)
        stream = OutputStream(len(self.submitted), 0, 1, len(ids), 1)
        handle = Scope().put(np.array(ids, np.float32))
        stream.add(OutputChunk(0, b"", [], FinishReason.STOP, vector_handle=handle))
        return stream

    def take_vector(self, handle: Handle) -> Floats | None:
        self._losses -= 1
        return None if self._losses >= 0 else np.array(handle.open().value(), np.float32)


async def vectors(client: Any, row: Any) -> list[list[float]]:
    nothing: Any = None
    config = EngineConfig(model="m", runner="pooling")
    options = ServerOptions()
    find: Any = lambda name: (name or "m", b"")  # noqa: E731
    routes = PoolingRoutes(config, options, client, nothing, nothing, row, find, None)
    state = SimpleNamespace(request_id="r", began=0.0)
    request: Any = SimpleNamespace(state=state, headers={}, client=None)
    return [vector.tolist() for vector in await routes._vectors(request, PoolingFields(), [[1], [2, 3]])]


@in_a_loop
async def test_prompt_of_a_lost_vector_is_submitted_again() -> None:
    row = ServerCounters(ServerCounters.create(1), 1, writable=True).rows[0]
    client = LossyClient(losses=1)
    assert await vectors(client, row) == [[1.0], [2.0, 3.0]]
    assert len(client.submitted) == 3
    assert row.engines[0][Served.PROMPT_TOKENS] == sum(map(len, client.submitted))


@in_a_loop
async def test_request_fails_when_vectors_are_lost_again_and_again() -> None:
    row = ServerCounters(ServerCounters.create(1), 1, writable=True).rows[0]
    client = LossyClient(losses=100)
    with pytest.raises(EngineError, match="the store had no room for a vector"):
        await vectors(client, row)
    assert len(client.submitted) == 2 * ATTEMPTS
