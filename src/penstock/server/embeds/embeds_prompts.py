"""Prompts that are embeddings: decoded, checked against the model, and put into the store as an image is.

What is meant are the rows that the model's `get_input_embeddings()` returns in transformers, with the scale that some
families apply there. `vision_encoder` puts them in the places of embedded ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from penstock import Missing
from penstock.engine.cluster.logs import tensor_event
from penstock.engine.media.base64_text import decode_base64, decoded_nbytes
from penstock.engine.media.fair_thread_pool import FairThreadPool
from penstock.engine.model_dir import hidden_size_of
from penstock.engine.protocol.columns import EMBEDS
from penstock.engine.protocol.config import EngineConfig
from penstock.server.chat.media_prompts import Prompt
from penstock.server.embeds.embeds_file import MAX_HEADER, parse_embeds
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.tensor import Handle, Scope, ScopeStats, Store, content_key

THREADS = 2  # each may hold a body, the file in it, and a copy inline
SALT = b"prompt embeddings"  # of keys: the same bytes may be an image
MAX_ITEMSIZE = 4  # bytes of a number: float32


class EmbedsPrompts:
    """Builds prompts of embeddings, in one server process."""

    def __init__(
        self, config: EngineConfig, store: Store | None, placeholder: int, count: Callable[[ScopeStats], None]
    ) -> None:
        """`placeholder`: the id in a prompt for each row. The model does not see the id, penalties do not count the id,
        and the detokenizer writes the answer as its continuation. `count` gets, for each prompt, how the embeddings
        travel. Raises ValueError for an invalid config.json."""
        self._placeholder = placeholder
        self._store = store
        self._count = count
        self._max_model_len = config.max_model_len
        self._must_store = config.tensor_transport == "store"
        self._hidden_size = hidden_size_of(config)
        self._threads = FairThreadPool(THREADS, "embeds")

    def close(self) -> None:
        self._threads.close()

    async def prompt(self, text: str, where: str, limit: Limit) -> Prompt:
        """Returns the prompt, which the caller submits or releases. `text`: base64 of a file; `where`: the field in the
        body. Raises ApiError."""
        self._require_length(decoded_nbytes(text), limit)
        scope = Scope(self._store, inline_nbytes=0)
        try:
            load = functools.partial(self._load, text, where, limit, scope)
            item, tokens = await self._threads.run(scope, load)
        except BaseException:
            scope.release()
            raise
        finally:
            self._count(scope.stats())
        tensor_event("tensors sent", item)
        return Prompt([self._placeholder] * tokens, ((item, 0, tokens),), scope)

    def _require_length(self, nbytes: int, limit: Limit) -> None:
        """Raises ApiError if a file of so many bytes has more tokens than the limit, without decoding it."""
        if self._hidden_size is not None:
            tokens = (nbytes - MAX_HEADER) // (MAX_ITEMSIZE * self._hidden_size)
            if tokens > limit.tokens:
                raise context_length_exceeded(self._max_model_len, tokens, limit, at_least=True)

    def _load(self, text: str, where: str, limit: Limit, scope: Scope) -> tuple[Handle, int]:
        """Returns the item of the embeddings, and their number of tokens."""
        try:
            raw = decode_base64(text)
            key = content_key(raw, salt=SALT)
            prompt = self._find(key, scope)
            if prompt is not None:  # it has been checked before it was put there
                return prompt
            embeds = parse_embeds(raw)
        except ValueError as error:
            message = f"expected prompt embeddings as base64 of safetensors or npy: {error} at $.{where}"
            raise ApiError(400, message, param=where) from None
        tokens, hidden_size = embeds.shape
        if self._hidden_size not in (None, hidden_size):
            message = f"expected embeddings of the model's hidden size {self._hidden_size}, got {list(embeds.shape)}"
            raise ApiError(400, f"{message} at $.{where}", param=where)
        if tokens > limit.tokens:
            raise context_length_exceeded(self._max_model_len, tokens, limit)
        item = scope.put({EMBEDS: embeds}, key=key)
        if item.is_inline and self._must_store:
            raise self._no_room(item, where)
        return item, tokens

    def _find(self, key: bytes, scope: Scope) -> tuple[Handle, int] | None:
        try:
            if self._store is not None:
                with self._store.get(key) as lease:
                    return scope.add(lease, key=key), lease.value()[EMBEDS].shape[0]
        except Missing:
            pass
        return None

    def _no_room(self, item: Handle, where: str) -> ApiError:
        room = 0 if self._store is None else self._store.nbytes
        if item.nbytes > room:
            return ApiError(413, f"the store has {room} bytes, these embeddings have {item.nbytes}", param=where)
        return ApiError(503, f"the store has no room for {item.nbytes} bytes now: open requests fill it", param=where)
