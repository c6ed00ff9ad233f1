"""What answers look like: for the document that tells clients, which every answer is tested against.

Nothing else is made of these: answers are put together where they come from.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Wrong(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: Wrong


# ── what was generated ───────────────────────────────────────────────────────────────────────────────────────────────
class PromptTokensDetails(Shape):
    cached_tokens: Natural


class Usage(Shape):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: PromptTokensDetails


class Choice(Shape):
    index: Natural
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class Likely(Shape):
    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]


class Token(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(Shape):
    content: list[Token]


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Shape):
    text_offset: list[Natural]
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Answer(Shape):
    id: str
    created: Natural
    model: str
    usage: Usage


class ChatAnswer(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# ── what is being generated: an event each ───────────────────────────────────────────────────────────────────────────
class Chunk(Shape, kw_only=True):
    id: str
    created: Natural
    model: str
    usage: Usage | None = None


class Step(Shape, kw_only=True):
    index: Natural
    finish_reason: Literal["stop", "length"] | None


class Delta(Shape, kw_only=True):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatStep(Step, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatStep]


class CompletionStep(Step, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(Chunk, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionStep]


# ── what is known ────────────────────────────────────────────────────────────────────────────────────────────────────
class Tokens(Shape):
    count: Natural
    max_model_len: Natural
    tokens: list[Natural]


class Model(Shape):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Live(Shape):
    status: Literal["live"]
    server: Natural
    pid: Natural


class Readiness(Shape):
    status: Literal["ready", "draining", "starting"]


class Server(Shape):
    server: Natural
    pid: Natural
    serves: bool
    open: Natural
    failed_starts: Natural


class Group(Shape):
    group: Natural
    incarnation: Natural
    serves: bool
    open: Natural
    waiting: Natural
    free_blocks: Natural
    steps: Natural
    failed_starts: Natural


class Health(Readiness):
    servers: list[Server]
    groups: list[Group]


ALL = (
    *(Error, ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk, Tokens),
    *(Model, Models, Live, Readiness, Health),
)
