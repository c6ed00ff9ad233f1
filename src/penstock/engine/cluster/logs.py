"""Logs to standard error: one line per event, with name and pid of the process; as text, or as JSON for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TextIO

from penstock import standard_streams
from penstock.tensor import Handle

LOGGER = logging.getLogger("penstock.engine")


def event(name: str, level: int = logging.INFO, **fields: object) -> None:
    """Logs an event. `fields` follow it as `name=value`; of an exception, its text: handlers may keep the record, and
    an exception holds the frames that it passed, with the channels' ends in them."""
    if not LOGGER.isEnabledFor(level):
        return
    texts = {field: str(value) if isinstance(value, BaseException) else value for field, value in fields.items()}
    LOGGER.log(level, name, extra={"fields": texts})


def tensor_event(name: str, item: Handle) -> None:
    """Logs at level debug that the tensors of a request were sent, or received, and how they travel."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        how = "inline" if item.is_inline else "store"
        event(name, logging.DEBUG, how=how, nbytes=item.nbytes, key=None if item.key is None else item.key.hex()[:16])


def configure(process: str, log_format: str, level: str = "info") -> None:
    """Sends the events of this process, of this level and above, to its standard error. Further handlers get those of
    level info, too."""
    lines = LogHandler(sys.stderr)
    lines.setLevel(level.upper())
    lines.setFormatter((JsonFormatter if log_format == "json" else TextFormatter)(process))
    LOGGER.handlers[:] = [lines]
    LOGGER.propagate = False
    LOGGER.setLevel(min(lines.level, logging.INFO))


class LogHandler(logging.StreamHandler[TextIO]):
    """Logs after a line how many lines before it were lost, because the stream took none."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if lost := standard_streams.take_lost(self.stream):
            event("log lines were lost", logging.WARNING, lines=lost)


class _Lines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return {
            "time": f"{at}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }


class JsonFormatter(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self._fields(record), default=str)


class TextFormatter(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_quoted(value)}" for name, value in self._fields(record).items())


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if text and is_plain else json.dumps(text)
