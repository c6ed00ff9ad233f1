"""The types of answers, for /openapi.json only; tests validate every answer against them.

The code that answers builds its JSON without these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]


class ResponseModel(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


# ── whole answers ────────────────────────────────────────────────────────────────────────────────────────────────────
class PromptTokensDetails(ResponseModel):
    cached_tokens: Natural


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: Natural


class Usage(ResponseModel):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET  # not in chunks amid a stream
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class FinishedChoice(ResponseModel):
    index: Natural
    stop_reason: int | str | None


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]


class Token(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    content: list[Token]


class ResponseFunction(ResponseModel):
    name: str
    arguments: str  # JSON, unless the model wrote something else


class ResponseToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: ResponseFunction


class AnswerMessage(ResponseModel, kw_only=True):
    role: Literal["assistant"]
    content: str | None  # null where calls or reasoning are all of the answer
    tool_calls: list[ResponseToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(FinishedChoice, kw_only=True):
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    token_ids: Ids | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(ResponseModel):
    text_offset: list[Natural]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ResponseModel):
    logprob: float
    rank: Natural
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Ids = list[Natural]


class CompletionChoice(FinishedChoice, kw_only=True):
    finish_reason: Literal["stop", "length"]
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: Ids | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Ids | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionBase(ResponseModel):
    id: str
    created: Natural
    model: str
    usage: Usage


class ChatCompletion(CompletionBase, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: Ids | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(CompletionBase):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# ── chunks of a stream, one in each event ────────────────────────────────────────────────────────────────────────────
class ChunkBase(ResponseModel, kw_only=True):
    id: str
    created: Natural
    model: str
    usage: Usage | None = None


class ChoiceBase(ResponseModel, kw_only=True):
    index: Natural
    token_ids: Ids | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(ResponseModel, kw_only=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(ResponseModel, kw_only=True):
    index: Natural
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(ResponseModel, kw_only=True):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatStep(ChoiceBase, kw_only=True):
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(ChunkBase, kw_only=True):
    prompt_token_ids: Ids | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion.chunk"]
    choices: list[ChatStep]


class CompletionStep(ChoiceBase, kw_only=True):
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: Ids | msgspec.UnsetType = msgspec.UNSET
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(ChunkBase, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionStep]


# ── vectors and scores ───────────────────────────────────────────────────────────────────────────────────────────────
class PoolingUsage(ResponseModel):
    prompt_tokens: Natural
    total_tokens: Natural


class PoolingAnswer(ResponseModel):
    id: str
    created: Natural
    model: str
    usage: PoolingUsage


class EmbeddingData(ResponseModel):
    object: Literal["embedding"]
    index: Natural
    embedding: list[float] | str  # or in base64


class EmbeddingResponse(PoolingAnswer):
    object: Literal["list"]
    data: list[EmbeddingData]


class ScoreData(ResponseModel):
    object: Literal["score"]
    index: Natural
    score: float


class ScoreResponse(PoolingAnswer):
    object: Literal["list"]
    data: list[ScoreData]


class RankedDocument(ResponseModel):
    text: str


class RerankResult(ResponseModel):
    index: Natural
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(PoolingAnswer):
    results: list[RerankResult]


# ── /v1/responses and /v1/messages: clients' own types say what their objects hold ──
JsonObject = dict[str, Any]


class ResponseUsage(ResponseModel):
    input_tokens: Natural
    input_tokens_details: dict[str, Natural]
    output_tokens: Natural
    output_tokens_details: dict[str, Natural]
    total_tokens: Natural


class ResponseObject(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: Natural
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[JsonObject]
    usage: ResponseUsage | None
    error: JsonObject | None
    previous_response_id: str | None
    store: bool


class ResponseEvent(msgspec.Struct):
    type: str
    sequence_number: Natural


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItemList(ResponseModel):
    object: Literal["list"]
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(ResponseModel):
    input_tokens: Natural
    cache_creation_input_tokens: Natural
    cache_read_input_tokens: Natural
    output_tokens: Natural


class MessageObject(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonObject]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    type: str


class TokenCount(ResponseModel):
    input_tokens: Natural


class ResponseTokenCount(TokenCount):
    object: str


class MessageErrorDetail(ResponseModel):
    type: str
    message: str


class MessageError(ResponseModel):
    type: Literal["error"]
    error: MessageErrorDetail


# ── other routes ─────────────────────────────────────────────────────────────────────────────────────────────────────
class TokenizeResponse(ResponseModel):
    count: Natural
    max_model_len: Natural
    tokens: list[Natural]


class DetokenizeResponse(ResponseModel):
    prompt: str


class ServerVersion(ResponseModel):
    version: str


class ServerLoad(ResponseModel):
    server_load: Natural


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    root: str
    parent: None
    max_model_len: Natural


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Live(ResponseModel):
    status: Literal["live"]
    server: Natural
    pid: Natural


class Readiness(ResponseModel):
    status: Literal["ready", "draining", "starting"]


class ServerHealth(ResponseModel):
    server: Natural
    pid: Natural
    serves: bool
    open: Natural
    waiting: Natural
    failed_starts: Natural


class EngineHealth(ResponseModel):
    group: Natural
    node: Natural
    incarnation: Natural
    serves: bool
    open: Natural
    running: Natural
    waiting: Natural
    free_blocks: Natural
    steps: Natural
    waiting_to_resume: Natural
    failed_starts: Natural


class HealthResponse(Readiness):
    servers: list[ServerHealth]
    groups: list[EngineHealth]


ALL = (
    *(ErrorResponse, ChatCompletion, ChatChunk, TextCompletion, CompletionChunk, TokenizeResponse),
    *(EmbeddingResponse, ScoreResponse, RerankResponse, DetokenizeResponse, ServerVersion, ServerLoad),
    *(ResponseObject, ResponseEvent, DeletedResponse, ResponseItemList, ResponseTokenCount),
    *(MessageObject, MessageEvent, TokenCount, MessageError),
    *(ModelCard, ModelList, Live, Readiness, HealthResponse),
)
