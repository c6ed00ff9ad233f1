"""A replica of Ray Serve: one engine, and an ASGI application that passes requests on to it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, NoReturn

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.integrations.ray_serve.engine_options import EngineOptions
from penstock.integrations.ray_serve.engine_process import EngineProcess
from penstock.integrations.ray_serve.forwarder import Forwarder

LOGGER = logging.getLogger("ray.serve")  # Serve's logger, which writes the replica's log
LAST_ANSWERS = 1.0  # seconds until all requests have their last error, when the engine has ended …
PASSED_ON = 0.2  # … and for Serve to pass the error on: sent bytes are lost when the process exits before


@serve.ingress()
class Replica:
    """Starts an engine, and ends at once when the engine ends.

    Serve polls the health of a replica, and believes only the third refusal. Routers and HAProxy see the death of a
    replica's process at once, and Serve starts a new replica. Therefore a replica without an engine exits.
    """

    async def __init__(self, options: EngineOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = EngineProcess(options.arguments, options.shutdown_timeout)
        try:
            url = await self._engine.wait_until_serving()
        except BaseException:
            self._engine.close()
            raise
        self._forwarder = Forwarder(url)
        self._watch = asyncio.ensure_future(self._exit_with_engine())
        LOGGER.info("the engine serves at %s", url)

    async def _exit_with_engine(self) -> NoReturn:
        end = await asyncio.shield(self._engine.ended)
        reason = f"the engine of this replica has ended: {end.splitlines()[0]}"
        LOGGER.error("%s; the replica exits. The end of its log:\n%s", reason, end)
        self._forwarder.refuse(reason)
        await self._forwarder.drain(LAST_ANSWERS)
        await asyncio.sleep(PASSED_ON)
        os._exit(1)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            else:
                await self._forwarder(scope, receive, send)

        return app

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answers Serve's start and shutdown of the application; the second comes when no request is open."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._watch.cancel()
                await self._forwarder.close()
                await self._engine.stop()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    # ── called by Serve, as coroutines: an answer shows that the replica's loop runs ──
    async def check_health(self) -> None:
        if self._engine.ended.done():
            raise RuntimeError(f"the engine of this replica has ended: {self._engine.ended.result()}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Returns the replica's figures for `SessionRouter`. Serve sends each change to all routers, so figures that
        change with every request do not belong here."""
        return {"serving_groups": self._engine.load().serving_groups}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the replica's figures for `LoadPolicy`."""
        load = self._engine.load()
        return {"load": load.load, "running": load.running, "waiting": load.waiting, "open": load.open}
