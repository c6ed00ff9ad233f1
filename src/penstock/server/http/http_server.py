"""Takes connections from a listening socket, and ends the connections at the end.

Leaves the bytes to `connection`, and the times of start and stop to `server_process`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl

from starlette.types import ASGIApp

from penstock.engine.cluster.logs import event
from penstock.server.http.connection import HttpConnection, ServerState

CANCEL_TIMEOUT = 2.0  # seconds for applications that are cancelled
MAX_ACCEPTED = 64  # connections in one pass of the event loop


class HttpServer:
    """In the running event loop."""

    def __init__(self, app: ASGIApp, max_connections: int, client_timeout: float) -> None:
        self._state = ServerState(app, max_connections, client_timeout)

    async def start(
        self, listener: socket.socket, backlog: int, processes: int = 1, tls: ssl.SSLContext | None = None
    ) -> None:
        """`backlog`: connections that wait in the kernel. `processes`: number of those that share the socket. `tls`:
        None where connections are not encrypted."""
        loop = asyncio.get_running_loop()
        # asyncio's backlog is also the number of connections taken at a time: 1 where processes share the socket.
        self._server = await loop.create_server(
            functools.partial(HttpConnection, self._state),
            sock=listener,
            backlog=MAX_ACCEPTED if processes == 1 else 1,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._state.client_timeout,
        )
        listener.listen(backlog)

    async def stop(self, timeout: float) -> None:
        """Closes the socket and idle connections, and answers open requests; cancels them after `timeout` seconds."""
        state = self._state
        state.is_stopping = True
        self._server.close()
        for connection in list(state.connections):
            connection.stop()
        try:
            await asyncio.wait_for(self._drain(), timeout)
        except asyncio.TimeoutError:
            tasks = list(state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                event("requests cancelled", logging.WARNING, open=len(tasks), shutdown_timeout=timeout)
                await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT)
            for connection in list(state.connections):
                connection.abort()

    async def _drain(self) -> None:
        state = self._state
        while state.connections or state.tasks:
            state.has_fewer.clear()
            await state.has_fewer.wait()
