"""The responses that clients may refer to, in shared memory: each server process finds those of all.

A store evicts what has not been used for longest when room or items run out, outlives the processes that write to it,
and has no file. A response is two values: the input, put before the answer begins, and the complete response.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from penstock import MemoryExhausted, Missing, Store, Timeout
from penstock.server.errors import ApiError
from penstock.server.responses.responses_request import ResponseItem

T = TypeVar("T")

MAX_CHAIN = 1024  # responses before a response
MAX_REFERRED = 64  # responses to the items of which a request refers
PREVIOUS = "previous_response_id"


class StoredInput(msgspec.Struct):
    expires: float  # seconds since the epoch
    items: list[ResponseItem]
    previous: str | None


class StoredResponse(msgspec.Struct):
    expires: float
    response: msgspec.Raw  # a JSON object


class ResponseOutput(msgspec.Struct):
    output: list[ResponseItem]


class StoredTurn(msgspec.Struct):
    """A response with its input."""

    input: StoredInput
    response: msgspec.Raw

    def output(self) -> list[ResponseItem]:
        return msgspec.json.decode(self.response, type=ResponseOutput).output


class ResponseStore:
    """The responses of one server's clients. A response is found only with the API key that has created it."""

    def __init__(self, store: Store | None, max_age: float) -> None:
        """`max_age`: seconds after which a response is gone."""
        self._store = store
        self._max_age = max_age
        self._input = msgspec.json.Decoder(StoredInput)
        self._response = msgspec.json.Decoder(StoredResponse)

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def put_input(self, owner: str, name: str, items: Sequence[ResponseItem], previous: str | None) -> bool:
        """Stores the input of a response, and returns whether there was room. `owner`: a hash of the API key."""
        return self._put(_key(owner, name, "input"), StoredInput(self._expires, list(items), previous))

    def put_response(self, owner: str, name: str, response: dict[str, Any]) -> bool:
        """Stores a complete response, and returns whether there was room."""
        raw = msgspec.Raw(msgspec.json.encode(response))
        return self._put(_key(owner, name, "response"), StoredResponse(self._expires, raw))

    @property
    def _expires(self) -> float:
        return time.time() + self._max_age

    def _put(self, key: bytes, value: msgspec.Struct) -> bool:
        if self._store is None:
            return False
        try:
            self._store.put(msgspec.json.encode(value), key=key, timeout=0.0).release()
        except (MemoryExhausted, Timeout):
            return False
        return True

    def get(self, owner: str, name: str, param: str | None = None) -> StoredTurn:
        """Returns a response with its input. Raises ApiError for a response that is unknown, expired or of another key.

        `param`: the field that names the response. Errors of PREVIOUS have OpenAI's status and code."""
        entry = self._value(_key(owner, name, "input"), self._input)
        response = self._value(_key(owner, name, "response"), self._response)
        if entry is None or response is None or min(entry.expires, response.expires) < time.time():
            way_out = "it has expired, or was never stored" if self.is_open else "--response-store-mb is 0"
            message = f"response with id {name!r:.200} not found: {way_out}"
            if param == PREVIOUS:
                raise ApiError(400, f"previous {message}", param=param, code="previous_response_not_found")
            raise ApiError(404, message, param=param)
        return StoredTurn(entry, response.response)

    def _value(self, key: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
        if self._store is None:
            return None
        try:
            with self._store.get(key) as lease:
                return decoder.decode(bytes(lease.value()))
        except Missing:
            return None

    def delete(self, owner: str, name: str) -> None:
        """Raises ApiError as `get` does."""
        self.get(owner, name)
        if self._store is not None:
            for part in ("input", "response"):
                self._store.remove(_key(owner, name, part))

    def conversation(self, owner: str, name: str | None) -> list[ResponseItem]:
        """Returns the items of a response and of all before it, the oldest first. Raises ApiError."""
        turns: list[list[ResponseItem]] = []
        while name is not None:
            turn = self.get(owner, name, PREVIOUS)
            turns.append([*turn.input.items, *turn.output()])
            name = turn.input.previous
            if len(turns) > MAX_CHAIN:
                message = f"expected at most {MAX_CHAIN} responses before a response at $.{PREVIOUS}, got more"
                raise ApiError(400, message, param=PREVIOUS)
        return [item for items in reversed(turns) for item in items]

    def resolve(self, owner: str, items: Iterable[ResponseItem]) -> list[ResponseItem]:
        """Returns items with the items that references mean. Raises ApiError."""
        outputs: dict[str, list[ResponseItem]] = {}  # each response is read once
        return [
            self._referred(owner, f"input[{number}].id", item.id or "", outputs)
            if item.type == "item_reference"
            else item
            for number, item in enumerate(items)
        ]

    def _referred(self, owner: str, where: str, item_id: str, outputs: dict[str, list[ResponseItem]]) -> ResponseItem:
        _, _, rest = item_id.partition("_")
        name = f"resp_{rest.partition('_')[0]}"
        if name not in outputs:
            if len(outputs) == MAX_REFERRED:
                message = f"expected references to items of at most {MAX_REFERRED} responses, got more"
                raise ApiError(400, message, param=where)
            outputs[name] = self.get(owner, name, where).output()
        for item in outputs[name]:
            if item.id == item_id:
                return item
        raise ApiError(404, f"item with id {item_id!r:.200} not found", param=where)


def create_response_id() -> str:
    """Returns a random id. The id of a request would not do: a client may send its own, and send it twice."""
    return f"resp_{secrets.token_hex(24)}"


def _key(owner: str, name: str, part: str) -> bytes:
    return hashlib.sha256(f"{owner} {part} {name}".encode(errors="replace")).digest()
