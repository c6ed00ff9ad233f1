"""Parses the server-sent events of an answer: texts, ends, token counts, errors."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT = 1 << 20  # bytes
SHOWN = 160  # characters of an answer in an error


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChoiceDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: ChoiceDelta | None = None
    finish_reason: str | None = None

    @property
    def brings_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta is not None and (delta.content or delta.reasoning or delta.reasoning_content)))


class Event(msgspec.Struct):
    """An event of a chat or of a completion; other fields are ignored."""

    object: str | None = None
    choices: list[Choice] | None = None
    usage: CompletionUsage | None = None
    error: Any = None
    message: Any = None


class SseParser:
    """Splits a stream into the data of its events, however its bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._nbytes = 0  # of these

    def feed(self, more: bytes) -> list[bytes]:
        """Returns the data of the events that are complete now, without events that have none.

        Raises ValueError if an event is too long.
        """
        *lines, self._rest = (self._rest + more).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
                self._nbytes += len(line)
            elif not line and self._lines:
                events.append(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
                self._lines.clear()
                self._nbytes = 0
        if self._nbytes + len(self._rest) > MAX_EVENT:
            raise ValueError(f"an event is longer than {MAX_EVENT} bytes: {shown(self._rest[:SHOWN])}")
        return events


_EVENT = msgspec.json.Decoder(Event)


def event_of(data: bytes) -> Event:
    """Decodes an event. Raises ValueError, also for invalid UTF-8 and for nesting that is too deep."""
    try:
        return _EVENT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error}: {shown(data)}") from None


def error_of(event: Event) -> str | None:
    """Returns the message of an error event, or None for another event."""
    if event.error is not None:
        message = event.error.get("message") if isinstance(event.error, dict) else None
        return str(event.error if message is None else message)
    return str(event.message) if event.object == "error" else None


def shown(data: bytes) -> str:
    """Returns the text in one line, truncated."""
    text = " ".join(data.decode(errors="replace").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
