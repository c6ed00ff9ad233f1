"""Fields of a whole answer about its prompts: `echo`, `prompt_logprobs`, `return_token_ids`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.engine.client.stream import OutputStream
from penstock.engine.protocol.messages import PromptLogprobs
from penstock.engine.text.detokenizer import Vocabulary
from penstock.server.chat.request_schema import CompletionRequest, Sampling
from penstock.server.chat.streaming import StreamedChoice, likely, token_text
from penstock.server.errors import ApiError


class TokenLogprobs(NamedTuple):
    """The log-probabilities at one position of a prompt."""

    rank: int  # of the token of the prompt
    pairs: list[tuple[int, float]]  # itself first, then the likeliest


def by_position(entries: Iterable[PromptLogprobs]) -> dict[int, TokenLogprobs]:
    rows: dict[int, TokenLogprobs] = {}
    for entry in entries:
        ranks = entry.logprobs.ranks.tolist()
        for offset, (rank, pairs) in enumerate(zip(ranks, likely(entry.logprobs), strict=True)):
            rows[entry.position + offset] = TokenLogprobs(rank, pairs)
    return rows


class PromptFields:
    """What a request wants of its prompts in its answer: `Sampling.shows_prompt`."""

    def __init__(self, request: Sampling, is_chat: bool) -> None:
        """Raises ApiError for what a stream does not have."""
        self._is_chat = is_chat
        self._has_ids = bool(request.return_token_ids)
        self._has_logprobs = request.prompt_logprobs is not None
        completion = request if isinstance(request, CompletionRequest) else None
        self.echoes = completion is not None and bool(completion.echo)
        self._has_echoed_logprobs = self.echoes and completion is not None and completion.logprobs is not None
        prompt = None if completion is None else completion.prompt
        texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
        self._texts = [text if isinstance(text, str) else None for text in texts]
        self._is_cut = request.truncate_prompt_tokens is not None
        self.is_prompt_alone = completion is not None and completion.max_tokens == 0
        if request.stream:
            for name, is_wanted in (
                ("prompt_logprobs", self._has_logprobs),
                ("logprobs", self._has_echoed_logprobs),
                ("max_tokens", self.is_prompt_alone),
            ):
                if is_wanted:
                    value = f"{name} 0" if name == "max_tokens" else f"{name} with echo" if name == "logprobs" else name
                    raise ApiError(400, f"{value} is not supported in a stream", param=name)

    @property
    def needs_vocabulary(self) -> bool:
        return self.echoes or self._has_logprobs

    def first_chunks(
        self, head: bytes, prompts: Sequence[list[int]], samples: int, vocabulary: Vocabulary | None
    ) -> bytes:
        """Returns a chunk for each choice of a stream, with its prompt. `vocabulary`: for `echo`."""
        chunks = []
        for number, ids in enumerate(prompts):
            own: dict[str, Any] = {"logprobs": None, "finish_reason": None}
            text = "" if vocabulary is None else self.echoed(number, ids, vocabulary)
            own |= {"delta": {"content": ""}} if self._is_chat else {"text": text}
            ids_of_prompt = {"prompt_token_ids": ids} if self._has_ids else {}
            for index in range(number * samples, (number + 1) * samples):
                choice = {"index": index, **own, **({} if self._is_chat else ids_of_prompt)}
                end = {"choices": [choice], **(ids_of_prompt if self._is_chat else {})}
                chunks.append(b"data: %b,%b\n\n" % (head, msgspec.json.encode(end)[1:]))
        return b"".join(chunks)

    def add_to(
        self,
        answer: dict[str, Any],
        choices: Sequence[StreamedChoice],
        prompts: Sequence[list[int]],
        streams: dict[int, OutputStream],
        vocabulary: Vocabulary | None,
    ) -> None:
        """`prompts`: the ids of each. `streams`: by the number of the prompt."""
        samples = len(choices) // len(prompts)
        for number, ids in enumerate(prompts):
            rows = by_position(streams[number].prompt_logprobs)
            own = answer["choices"][number * samples : (number + 1) * samples]
            holders = [answer] if self._is_chat else own
            for choice, streamed in zip(own, choices[number * samples :], strict=False):
                if self._has_ids:
                    choice["token_ids"] = [] if self.is_prompt_alone else streamed.ids
                if self.is_prompt_alone:
                    choice |= {"text": "", "finish_reason": "length", "stop_reason": None}
                    choice["logprobs"] = choice["logprobs"] and {key: [] for key in choice["logprobs"]}
                if self.echoes and vocabulary is not None:
                    self._echo(choice, ids, self.echoed(number, ids, vocabulary), rows, vocabulary)
            for holder in holders:
                if self._has_ids:
                    holder["prompt_token_ids"] = ids
                if self._has_logprobs and vocabulary is not None:
                    holder["prompt_logprobs"] = _described(ids, rows, vocabulary)
        if self.is_prompt_alone:
            usage = answer["usage"]
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]

    def echoed(self, number: int, ids: list[int], vocabulary: Vocabulary) -> str:
        """Returns the text of a prompt: as the client has sent it, or of its ids."""
        text = None if self._is_cut or number >= len(self._texts) else self._texts[number]
        return b"".join(map(vocabulary.token_bytes, ids)).decode(errors="replace") if text is None else text

    def _echo(
        self,
        choice: dict[str, Any],
        ids: list[int],
        shown: str,
        rows: dict[int, TokenLogprobs],
        vocabulary: Vocabulary,
    ) -> None:
        choice["text"] = shown + choice["text"]
        if not self._has_echoed_logprobs:
            return
        after = choice["logprobs"]
        pairs = [rows[position].pairs if position in rows else [] for position in range(len(ids))]
        choice["logprobs"] = {
            "text_offset": [
                *_offsets(ids, shown, vocabulary),
                *(len(shown) + offset for offset in after["text_offset"]),
            ],
            "tokens": [*(token_text(vocabulary, token_id) for token_id in ids), *after["tokens"]],
            "token_logprobs": [*(row[0][1] if row else None for row in pairs), *after["token_logprobs"]],
            "top_logprobs": [
                *({token_text(vocabulary, key): value for key, value in row} if row else None for row in pairs),
                *after["top_logprobs"],
            ],
        }


def _described(
    ids: list[int], rows: dict[int, TokenLogprobs], vocabulary: Vocabulary
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns what is likely at each position, by id, as vLLM has it. None: the first token follows nothing."""
    described: list[dict[str, dict[str, Any]] | None] = []
    for position in range(len(ids)):
        row = rows.get(position)
        if row is None:
            described.append(None)
            continue
        ranks = [row.rank, *range(1, len(row.pairs))]
        described.append(
            {
                str(token_id): {"logprob": value, "rank": rank, "decoded_token": token_text(vocabulary, token_id)}
                for rank, (token_id, value) in reversed(list(zip(ranks, row.pairs, strict=True)))
            }
        )
    return described


def _offsets(ids: list[int], text: str, vocabulary: Vocabulary) -> list[int]:
    """Returns where each token begins in the text. A token that the text does not have, as a first one that the
    tokenizer adds, takes no place."""
    utf8, at, characters = text.encode(), 0, 0
    offsets = []
    for token_id in ids:
        offsets.append(characters)
        token = vocabulary.token_bytes(token_id)
        if not utf8.startswith(token, at) and token.startswith(b" "):
            token = token[1:]  # some tokenizers put a space before a text
        if utf8.startswith(token, at):
            at += len(token)
            characters += sum(byte & 0xC0 != 0x80 for byte in token)
    return offsets
