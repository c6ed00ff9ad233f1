"""Logs exceptions in the event loop that no task awaits: one line for each kind, and then a count every 10 s.

asyncio would log each of them, thousands in a second when descriptors run out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import traceback
from typing import Any, TypeAlias

from penstock.engine.cluster.logs import event

PERIOD = 10.0  # seconds between two lines about one kind
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

Kind: TypeAlias = tuple[object, ...]


class LoopErrors:
    """The exception handler of a loop."""

    def __init__(self) -> None:
        self._more: dict[Kind, int] = {}  # of each kind, since its last line

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error: BaseException | None = context.get("exception")
        if isinstance(error, ValueError) and "_start_serving" in context["message"]:
            return  # asyncio would accept again a second after it had no descriptor, and the listener is closed by now
        kind = _kind_of(context["message"], error)
        if kind in self._more:
            self._more[kind] += 1
            return
        fields = _described(context["message"], error)
        event(**fields, level=logging.ERROR)
        self._more[kind] = 0
        fields.pop("trace", None)
        loop.call_later(PERIOD, self._say_more, loop, kind, fields)

    def _say_more(self, loop: asyncio.AbstractEventLoop, kind: Kind, fields: dict[str, Any]) -> None:
        more = self._more.pop(kind)
        if more:
            event(**fields, level=logging.ERROR, times_more=more, within=PERIOD)
            self._more[kind] = 0
            loop.call_later(PERIOD, self._say_more, loop, kind, fields)


def _kind_of(message: str, error: BaseException | None) -> Kind:
    """Returns a key that is equal for the same error from the same line; the message may name a connection."""
    if error is None:
        return (message,)
    frames = traceback.extract_tb(error.__traceback__)
    where = (frames[-1].filename, frames[-1].lineno) if frames else (message,)
    return type(error), getattr(error, "errno", None), *where


def _described(message: str, error: BaseException | None) -> dict[str, Any]:
    if isinstance(error, OSError) and error.errno in EXHAUSTED and "accept" in message:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = "more descriptors (ulimit -n), or a smaller --max-open-requests"
        return {"name": "connections are not accepted", "error": str(error), "descriptors": limit, "remedy": remedy}
    described = {"name": "error in the event loop", "message": message}
    if error is not None:
        described["error"] = f"{type(error).__name__}: {error}"
        described["trace"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return described
