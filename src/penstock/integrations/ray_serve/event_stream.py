"""How the errors of a replica that ends reach a client: its mark, and whether a stream can end with an error event."""

from __future__ import annotations

from starlette.types import Message, Send

from penstock.server.errors import ApiError

ENDED = (b"x-penstock-replica", b"ended")  # a header of a replica's last errors: another replica may answer
EVENT_STREAM, END_OF_EVENT = b"text/event-stream", b"\n\n"


class EventStream:
    """What is known of an answer from its start and the last bytes that were sent."""

    def __init__(self, start: Message) -> None:
        headers = {name.lower(): value for name, value in start["headers"]}
        self._is_event_stream = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
        self._last = END_OF_EVENT

    @property
    def can_end(self) -> bool:
        """Returns whether an event may follow: no event is cut."""
        return self._is_event_stream and self._last == END_OF_EVENT

    def add(self, chunk: bytes) -> None:
        self._last = (self._last + chunk)[-len(END_OF_EVENT) :]

    async def fail(self, reason: str, send: Send) -> None:
        """Ends the stream with an event that has the error."""
        event = b"data: %b\n\n" % ApiError(503, reason).body
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
