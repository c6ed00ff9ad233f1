"""Builds prompts from texts and messages with the model's tokenizer, in a server process.

Output processors detokenize the answers.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.engine.model_dir import load_tokenizer, read_config
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.text.detokenizer import Vocabulary, load_vocabulary
from penstock.server.chat.chat_template import ChatTemplate, join_texts
from penstock.server.chat.length_bound import length_bound
from penstock.server.chat.media_prompts import MediaPrompts, Prompt
from penstock.server.chat.request_schema import Conversation
from penstock.server.embeds.embeds_prompts import EmbedsPrompts
from penstock.server.errors import ApiError, Limit, context_length_exceeded

T = TypeVar("T")

LONG = 4096  # characters: about 1 ms of tokenising; longer ones are done by a thread, and the loop goes on
MANY = 128  # parts of messages: about 0.5 ms of a template
THREADS = 2  # for both. The tokenizer lets the interpreter go


class Tokenizer(Protocol):
    """The tokenizer of a model or of a simulated device. Created once in a process."""

    vocab_size: int  # all ids are below
    tokenizer: Any  # a `tokenizers.Tokenizer`; None: the ids of a text are its bytes

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of the number of ids of a text, much faster than `encode`."""

    def chat(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        """Renders a conversation. Raises ApiError."""


def build_tokenizer(config: EngineConfig) -> Tokenizer:
    """Loads the model's tokenizer. For a simulated device without one, the ids of a text are its bytes."""
    if config.simulated is not None and not (Path(config.model) / "tokenizer.json").exists():
        return NumberTokenizer(config.simulated.vocabulary)
    return ModelTokenizer(config)


class NumberTokenizer:
    tokenizer = None

    def __init__(self, vocabulary: int) -> None:
        self.vocab_size = vocabulary

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def min_tokens(self, text: str) -> int:
        return len(text)

    def chat(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        text = "".join(f"{message['role']}: {join_texts(message['content'])}\n" for message in messages)
        return f"{text}assistant:" if is_answered else text


class ModelTokenizer:
    def __init__(self, config: EngineConfig) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text is not cut among threads
        self.tokenizer = load_tokenizer(config)
        self._bound = length_bound(Path(config.model) / "tokenizer.json")
        self._template = ChatTemplate(Path(config.model))
        self.vocab_size = _most_ids(config)

    def encode(self, text: str, add_special: bool) -> list[int]:
        # A batch of one, as only the batch method releases the interpreter meanwhile.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return ids

    def min_tokens(self, text: str) -> int:
        return 0 if self._bound is None else self._bound.min_tokens(text)

    def chat(self, messages: list[dict[str, Any]], is_answered: bool, options: dict[str, Any]) -> str:
        return self._template.prompt(messages, is_answered, options)


def _most_ids(config: EngineConfig) -> int:
    """Returns the model's `vocab_size`: a worker would fail at an id beyond it."""
    if config.simulated is not None:
        return 1 << 31
    whole, text = read_config(Path(config.model) / "config.json")
    vocab_size: int = (text or whole)["vocab_size"]
    return vocab_size


class PromptBuilder:
    """Builds prompts without blocking the event loop."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        media: MediaPrompts | None = None,
        embeds: EmbedsPrompts | None = None,
    ) -> None:
        """`media`: None where the model takes text alone; `embeds`: None where prompts may not be embeddings."""
        self._config = config
        self.tokenizer = tokenizer
        self._media = media
        self._embeds = embeds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")
        self._vocabulary: asyncio.Future[Vocabulary] | None = None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for more in (self._media, self._embeds):
            if more is not None:
                more.close()

    async def conversation(
        self,
        conversation: Conversation,
        is_answered: bool,
        options: dict[str, Any],
        add_special: bool = False,
        limit: Limit | None = None,
        client: str = "",
    ) -> Prompt:
        """Returns the prompt, which the caller releases unless it submits it. `client`: takes turns with others in the
        use of memory. Raises ApiError."""
        if conversation.media and self._media is None:
            where, _, kind = conversation.media[0]
            message = f"expected text, got {kind.described} at $.{where}: this model takes none"
            raise ApiError(400, message, param=where)
        work = functools.partial(self.tokenizer.chat, conversation.messages, is_answered, options)
        text = work() if conversation.parts <= MANY else await self.in_a_thread(work)
        if not conversation.media or self._media is None:
            return Prompt(await self.ids(text, add_special, limit))
        ids = await self.ids(self._media.prepare(text), add_special, limit)
        return await self._media.prompt(ids, conversation.media, client)

    async def embeds(self, texts: list[str], limit: Limit) -> list[Prompt]:
        """Returns prompts that are embeddings, which the caller releases unless it submits them. Raises ApiError."""
        prompts: list[Prompt] = []
        try:
            for number, text in enumerate(texts):
                if self._embeds is None:
                    message = f"{limit.param} is not enabled on this server: --enable-prompt-embeds"
                    raise ApiError(400, message, param=limit.param)
                where = f"{limit.param}[{number}]" if len(texts) > 1 else limit.param
                prompts.append(await self._embeds.prompt(text, where, limit))
        except BaseException:
            for prompt in prompts:
                prompt.release()
            raise
        return prompts

    async def ids(self, prompt: str | list[int], add_special: bool = True, limit: Limit | None = None) -> list[int]:
        """Returns the ids of a text, or a list of ids as it is. Raises ApiError for unknown ids, and for a
        text with more than `limit`."""
        if not isinstance(prompt, str):
            # Ids beyond the limit need no check: the prompt is refused for its length.
            looked_at = prompt if limit is None else prompt[: limit.tokens + 1]
            if looked_at and max(looked_at) >= self.tokenizer.vocab_size:
                message = f"expected ids below {self.tokenizer.vocab_size}, got {max(looked_at)} at $.prompt"
                raise ApiError(400, message, param="prompt")
            return prompt
        if len(prompt) <= LONG:
            return self.tokenizer.encode(prompt, add_special)
        if limit is not None:
            tokens = await self.in_a_thread(lambda: self.tokenizer.min_tokens(prompt))
            if tokens > limit.tokens:
                raise context_length_exceeded(self._config.max_model_len, tokens, limit, at_least=True)
        return await self.in_a_thread(lambda: self.tokenizer.encode(prompt, add_special))

    async def vocabulary(self) -> Vocabulary:
        """Returns the texts of all ids, loaded at the first request with log-probabilities."""
        if self._vocabulary is None:
            make = functools.partial(load_vocabulary, self._config, self.tokenizer.tokenizer)
            self._vocabulary = asyncio.ensure_future(self.in_a_thread(make))
        return await asyncio.shield(self._vocabulary)

    async def in_a_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
