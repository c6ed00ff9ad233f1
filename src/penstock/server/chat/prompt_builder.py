"""Builds prompts from texts and messages with the model's chat template and tokenizer, in a server process.

Output processors detokenize the answers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.engine.cluster.logs import event
from penstock.engine.model_dir import load_tokenizer, read_config
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.text.detokenizer import Vocabulary, load_vocabulary
from penstock.server.chat.length_bound import length_bound
from penstock.server.chat.media_prompts import MediaPrompts, Prompt
from penstock.server.chat.request_schema import Conversation
from penstock.server.embeds.embeds_prompts import EmbedsPrompts
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.options import RESERVED

T = TypeVar("T")

LONG = 4096  # characters: about 1 ms of tokenising; a thread tokenizes longer texts, and the loop goes on
MANY = 128  # parts of messages: about 0.5 ms of a template
END = 64  # characters of a chat's prompt that tell whether its template has opened the reasoning
THREADS = 2  # of long texts and many parts. The tokenizer releases the interpreter
MARK = "as it is written"  # the content of a trial message
TRIAL_ID = "abcdefghi"  # of a call: some templates demand nine letters or digits


class Tokenizer(Protocol):
    """The tokenizer of a model or of a simulated device. Created once in a process."""

    vocab_size: int  # all ids are below
    tokenizer: Any  # a `tokenizers.Tokenizer`; None: the ids of a text are its bytes
    tool_template: str  # the chat template for conversations with tools; empty: there is none

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of the number of ids of a text, much faster than `encode`."""

    def chat(
        self, conversation: Conversation, is_answered: bool, options: dict[str, Any], is_continued: bool = False
    ) -> str:
        """Renders a conversation; `is_continued`: the last message stays open. Raises ApiError."""


def build_tokenizer(config: EngineConfig, chat_template: str = "") -> Tokenizer:
    """Loads the model's tokenizer. For a simulated device without one, the ids of a text are its bytes.

    `chat_template`: in place of the model's; "": the model's."""
    if config.simulated is not None and not (Path(config.model) / "tokenizer.json").exists():
        return NumberTokenizer(config.simulated.vocabulary)
    return ModelTokenizer(config, chat_template)


class NumberTokenizer:
    tokenizer = None
    tool_template = ""

    def __init__(self, vocabulary: int) -> None:
        self.vocab_size = vocabulary

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def min_tokens(self, text: str) -> int:
        return len(text)

    def chat(
        self, conversation: Conversation, is_answered: bool, options: dict[str, Any], is_continued: bool = False
    ) -> str:
        messages = conversation.messages
        text = "".join(f"{message['role']}: {join_texts(message['content'])}\n" for message in messages)
        if is_continued:
            return text[:-1]
        return f"{text}assistant:" if is_answered else text


class ModelTokenizer:
    def __init__(self, config: EngineConfig, chat_template: str = "") -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text is not cut among threads
        self.tokenizer = load_tokenizer(config)
        self._bound = length_bound(Path(config.model) / "tokenizer.json")
        self._template = ChatTemplate(Path(config.model), chat_template)
        self.tool_template = self._template.tool_source
        self.vocab_size = _most_ids(config)

    def encode(self, text: str, add_special: bool) -> list[int]:
        # A batch of one, as only the batch method releases the interpreter meanwhile.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return ids

    def min_tokens(self, text: str) -> int:
        return 0 if self._bound is None else self._bound.min_tokens(text)

    def chat(
        self, conversation: Conversation, is_answered: bool, options: dict[str, Any], is_continued: bool = False
    ) -> str:
        return self._template.prompt(conversation.messages, is_answered, options, conversation.tools, is_continued)


def _most_ids(config: EngineConfig) -> int:
    """Returns the model's `vocab_size`: a worker would fail at an id beyond it."""
    if config.simulated is not None:
        return 1 << 31
    whole, text = read_config(Path(config.model) / "config.json")
    vocab_size: int = (text or whole)["vocab_size"]
    return vocab_size


def join_texts(content: str | list[dict[str, str]]) -> str:
    """Returns the text of a message: its content, or the texts of its parts, one per line."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


class ChatTemplate:
    """Renders conversations by the chat template of a model's directory, which may have none.

    Calls the function that transformers' tokenizers call, and not the tokenizer classes, which would import torch into
    each server process.
    """

    def __init__(self, directory: Path, template: str = "") -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render: Any = render_jinja_template  # its annotation of the result is wrong
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        templates = {"default": template} if template else _read_templates(directory, tokenizer_config)
        self._template = templates.get("default")
        self.tool_source = templates.get("tool_use", self._template or "")  # for conversations with tools
        self._special = {
            name: _text(token) for name, token in tokenizer_config.items() if name.endswith("_token") and token
        }
        # Some templates take a message's content as text, some as parts, and do not say which: so both are tried.
        self._takes_text = self._shows(MARK)
        self._takes_parts = self._shows([{"type": "text", "text": MARK}])
        # Most templates take the arguments of a call as an object, some as text.
        takes_text = self._shows_call(f'{{"{MARK}": 1}}')
        self._takes_objects = self._shows_call({MARK: 1}) or not takes_text
        shown = {"tools": self._shows_tools(), "calls": takes_text or self._shows_call({MARK: 1})}
        self._unseen = [name for name, is_shown in shown.items() if not is_shown]  # until the log has said so

    def prompt(
        self,
        messages: list[dict[str, Any]],
        is_answered: bool,
        options: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        is_continued: bool = False,
    ) -> str:
        """Renders a conversation. Raises ApiError."""
        if self._template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions", param="messages")
        reserved = RESERVED & options.keys()
        if reserved:
            message = f"{sorted(reserved)[0]} is set by the server: expected another name"
            raise ApiError(400, message, param=f"chat_template_kwargs.{sorted(reserved)[0]}")
        if self._unseen and (tools or any("tool_calls" in message for message in messages)):
            unseen, self._unseen = self._unseen, []
            event("tools not in prompts", logging.WARNING, reason=f"the chat template shows no {' and '.join(unseen)}")
        formatted = self._to_template_format(messages)
        try:
            return self._rendered(formatted, is_answered, options, tools, is_continued)
        except Exception as error:  # whatever a template does with what a client has sent
            raise ApiError(400, f"the model's chat template: {error}", param="messages") from None

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        is_answered: bool,
        options: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        is_continued: bool = False,
    ) -> str:
        rendered, _ = self._render(
            [messages],
            tools=tools or None,
            chat_template=self.tool_source if tools else self._template,
            add_generation_prompt=is_answered,
            continue_final_message=is_continued,
            **{**self._special, **options},
        )
        prompt: str = rendered[0]
        return prompt

    def _shows_call(self, arguments: str | dict[str, Any]) -> bool:
        """Returns whether the template renders a call's arguments as JSON, neither escaped nor as a Python repr."""
        user = {"role": "user", "content": self._content("hi")}
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": TRIAL_ID, "type": "function", "function": function}]
        call = {"role": "assistant", "content": self._content(""), "tool_calls": calls}
        try:
            prompt = self._rendered([user, call], False, {})
        except Exception:  # the template expects the other form
            return False
        return MARK in prompt and f"'{MARK}'" not in prompt and f'\\"{MARK}' not in prompt

    def _shows_tools(self) -> bool:
        function = {"name": MARK, "description": MARK, "parameters": {"type": "object", "properties": {}}}
        user = {"role": "user", "content": self._content("hi")}
        try:
            return MARK in self._rendered([user], True, {}, [{"type": "function", "function": function}])
        except Exception:  # the template expects another tool
            return True

    def _shows(self, content: Any) -> bool:
        """Returns whether the template renders a content as text, and not as a Python repr."""
        try:
            prompt = self._rendered([{"role": "user", "content": content}], True, {})
        except Exception:  # the template expects the other form
            return False
        return MARK in prompt and "'text'" not in prompt and '"text"' not in prompt

    def _to_template_format(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages with contents in the form that the template takes: texts, parts, or both."""
        formatted = []
        for place, message in enumerate(messages):
            fields = {**message, "content": self._content(message["content"])}
            if "tool_calls" in message:
                fields["tool_calls"] = [
                    self._call(call, f"messages[{place}].tool_calls[{number}]")
                    for number, call in enumerate(message["tool_calls"])
                ]
            formatted.append(fields)
        return formatted

    def _call(self, call: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns a call with arguments in the form that the template takes. Raises ApiError."""
        arguments = call["function"]["arguments"]
        if not self._takes_objects:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                path = f"{where}.function.arguments"
                raise ApiError(400, f"expected a JSON object at $.{path}: {error}", param=path) from None
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _content(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content if self._takes_text or not self._takes_parts else [{"type": "text", "text": content}]
        return content if self._takes_parts else join_texts(content)


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _read_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Reads the templates by name, from a file or from tokenizer_config.json. A template without a name is "default";
    one for conversations with tools may be "tool_use"."""
    alone = directory / "chat_template.jinja"
    if alone.exists():
        return {"default": alone.read_text()}
    template = _read_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


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
        is_continued: bool = False,
    ) -> Prompt:
        """Returns the prompt, which the caller releases unless it submits it. `client`: takes turns with others in the
        use of memory. Raises ApiError."""
        if conversation.media and self._media is None:
            where, _, kind = conversation.media[0]
            message = f"expected text, got {kind.described} at $.{where}: this model takes none"
            raise ApiError(400, message, param=where)
        work = functools.partial(self.tokenizer.chat, conversation, is_answered, options, is_continued)
        text = work() if conversation.parts <= MANY else await self.in_a_thread(work)
        end = join_texts(conversation.messages[-1]["content"]) if is_continued else text[-END:]
        if not conversation.media or self._media is None:
            return Prompt(await self.ids(text, add_special, limit), text_end=end)
        ids = await self.ids(self._media.prepare(text), add_special, limit)
        return (await self._media.prompt(ids, conversation.media, client))._replace(text_end=end)

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

    async def ids(
        self, prompt: str | list[int], add_special: bool = True, limit: Limit | None = None, *, param: str = "prompt"
    ) -> list[int]:
        """Returns the ids of a text, or a list of ids as it is. Raises ApiError for unknown ids, and for a
        text with more than `limit`. `param` is the field of a prompt without a limit."""
        if not isinstance(prompt, str):
            # Ids beyond the limit need no check: the prompt is refused for its length.
            looked_at = prompt if limit is None else prompt[: limit.tokens + 1]
            if looked_at and max(looked_at) >= self.tokenizer.vocab_size:
                param = param if limit is None else limit.param
                message = f"expected ids below {self.tokenizer.vocab_size}, got {max(looked_at)} at $.{param}"
                raise ApiError(400, message, param=param)
            return prompt
        if len(prompt) <= LONG:
            return self.tokenizer.encode(prompt, add_special)
        if limit is not None:
            tokens = await self.in_a_thread(lambda: self.tokenizer.min_tokens(prompt))
            if tokens > limit.tokens:
                raise context_length_exceeded(self._config.max_model_len, tokens, limit, at_least=True)
        return await self.in_a_thread(lambda: self.tokenizer.encode(prompt, add_special))

    async def bad_words_ids(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the ids of words, each as it is and behind a space, without special tokens."""
        texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
        sequences = [tuple(await self.ids(text, add_special=False)) for text in texts]
        return tuple(dict.fromkeys(filter(None, sequences)))

    async def text(self, ids: list[int]) -> str:
        """Returns the text of ids, with special tokens."""
        tokenizer = self.tokenizer.tokenizer
        if tokenizer is None:  # the ids of a text are its bytes
            return bytes(token_id % 256 for token_id in ids).decode(errors="replace")
        return await self.in_a_thread(lambda: str(tokenizer.decode(ids, skip_special_tokens=False)))

    async def vocabulary(self) -> Vocabulary:
        """Returns the texts of all ids, loaded at the first request with log-probabilities."""
        if self._vocabulary is None:
            make = functools.partial(load_vocabulary, self._config, self.tokenizer.tokenizer)
            self._vocabulary = asyncio.ensure_future(self.in_a_thread(make))
        return await asyncio.shield(self._vocabulary)

    async def in_a_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
