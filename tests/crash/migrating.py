"""A server for tests of migration: one server process, and a client in this process beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.server.listening import listen
from penstock.server.options import ServerOptions
from penstock.server.server_launcher import ServerLauncher
from tests.e2e.test_server import KEY, Served
from tests.support.engine import START, simulated_device
from tests.support.serving import until_told

IN_PROCESS = 1  # index of the server that the test's own client replaces


class Migrating(Served):
    """A server with one server process, and a client in this process in the place of a second one."""

    engine_client: Client

    async def must_be_whole(self, within: float = START) -> None:
        """All groups serve, nothing is open, waits or is held, and all blocks are free."""
        await self.launcher.serving(within)
        assert self.engine_client.open_requests == 0
        await until_told(self, "penstock_open_requests", 0)
        for group in range(self.config.data_parallel_size):
            row = self.launcher.board.row(group)
            await self.until(lambda row=row: row[StatusBoard.OPEN] == 0)
            await self.until(lambda row=row: row[StatusBoard.FREE_BLOCKS] == row[StatusBoard.BLOCKS])
        store = self.launcher.cluster.store
        if store is not None:
            await self.until(lambda: not any(item.holders for item in store.stats().items))
            await self.until(lambda: store.stats().pool.blocks == len(store.stats().items))

    def serving(self, group: int) -> int:
        """Returns the incarnation that serves; 0: none does."""
        return self.number(StatusBoard.SERVING, group)


@contextlib.asynccontextmanager
async def migrating(
    server: dict[str, Any] | None = None,
    start: float = START,
    prepare: Callable[[ServerLauncher], None] | None = None,
    drain: float = 0.0,
    **options: Any,
) -> AsyncIterator[Migrating]:
    """`server`: options of the server; `prepare`: what is changed of the launcher before it starts; `drain`: seconds
    for open requests at the end."""
    usual = {"api_keys": (KEY,), "max_open_requests": 512, "client_timeout": 5.0}
    server_options = ServerOptions(port=0, **{**usual, **(server or {})})
    config = EngineConfig(**{"simulated": simulated_device(), "max_model_len": 2048, "api_server_count": 2, **options})
    with contextlib.closing(listen(server_options)) as listener:
        port = listener.getsockname()[1]
        launcher = ServerLauncher(config, server_options, listener)
        launcher._servers = launcher._servers[:IN_PROCESS]
        launcher.units = tuple(unit for unit in launcher.units if unit.is_group or unit in launcher._servers)
        if prepare is not None:
            prepare(launcher)
        try:
            launcher.start()
            await launcher.serving(start)
            served = Migrating(launcher, port)
            async with served.client, Client(launcher.cluster, IN_PROCESS) as served.engine_client:
                yield served
        finally:
            late = await launcher.stop(drain)
        assert not late, f"had to be killed: {late}"
