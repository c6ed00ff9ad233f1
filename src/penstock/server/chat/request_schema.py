"""The bodies of requests: the fields that are honoured, with their types.

A field that is null counts as missing. `request_fields` handles all other fields, and `SamplingParams` checks
combinations of values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import msgspec.inspect

from penstock.engine.media.media_kind import IMAGE, VIDEO, MediaRef
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.grammar_fields import GrammarError, GrammarFields, GrammarSource, Tool, require_fit
from penstock.server.chat.data_urls import LONG, extract_data_urls
from penstock.server.chat.json_limits import MAX_NBYTES, check_json_size
from penstock.server.chat.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.server.chat.prompt_list import MAX_PARTS, Id, PromptList, separate_prompts
from penstock.server.chat.request_fields import NEUTRAL_ONLY, require_neutral, strict, unknown_fields
from penstock.server.chat.tool_fields import CallFields, CallResults, ToolChoice, Tools, check_tools, tools_for_template
from penstock.server.errors import ApiError, body_error
from penstock.server.options import MAX_LOGPROBS

T = TypeVar("T", bound=msgspec.Struct)

MAX_SAMPLES = 128  # of one prompt
MAX_MESSAGES = 1 << 14  # more are no prompt of any model, and are not looked at
MAX_PROMPTS = 128
MAX_STOPS = 64
MAX_CHARACTERS = 1024  # of one of them, and of what a client is called
MAX_IDS = 1024  # with a bias, or that stop
TOKENS_OF_A_COMPLETION = 16  # by default; a chat may continue up to the model's maximum length

# What a header, a line of a log and JSON hold as it is.
REQUEST_ID_PATTERN = "^[!-~]{1,128}$"

Defaults: TypeAlias = Mapping[str, Any]  # of sampling parameters, by name: `SamplingDefaults.explicit`
NO_DEFAULTS: Defaults = MappingProxyType({})
Short = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
Word = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARACTERS)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]  # as a key; a pattern would be a call of `re` for each
NUMBERS = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARACTERS)]
RequestId = Annotated[str, msgspec.Meta(pattern=REQUEST_ID_PATTERN)]
# In a message, where a value would change the prompt.
Unsupported = Annotated[Any, msgspec.Meta(extra_json_schema={"enum": [None, False, 0, "", [], {}]})]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(GrammarFields, kw_only=True):
    """The fields that chats and completions share; those from `top_k` on are vLLM's and not OpenAI's."""

    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Word | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    bad_words: Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[Number, Bias], msgspec.Meta(max_length=MAX_IDS, extra_json_schema=NUMBERS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Short | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | None = None
    min_tokens: Id | None = None
    stop_token_ids: Annotated[list[Id], msgspec.Meta(max_length=MAX_IDS)] | None = None
    allowed_token_ids: Annotated[list[Id], msgspec.Meta(min_length=1, max_length=MAX_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Id | None = None
    request_id: RequestId | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Returns whether each chunk has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def shows_prompt(self) -> bool:
        """Returns whether the answer has ids, log-probabilities or the text of its prompts."""
        return bool(self.return_token_ids) or self.prompt_logprobs is not None

    def params(self, max_tokens: int | None, logprobs: int | None, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters. Raises ApiError for values that are invalid or not supported."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported: use n", param="best_of")
        options = self.stream_options
        if not self.stream and options is not None and options != type(options)():
            raise ApiError(400, "expected stream: true with stream_options", param="stream_options")
        kwargs = {name: value for name in _PASSED_THROUGH if (value := getattr(self, name)) is not None}
        kwargs = {**defaults, **kwargs, "max_tokens": max_tokens, "logprobs": logprobs}
        if kwargs.get("top_k") == -1:  # as others say it
            kwargs["top_k"] = 0
        ids = ("stop_token_ids", "allowed_token_ids")
        kwargs.update((name, tuple(kwargs[name])) for name in ids if name in kwargs)
        if self.stop is not None:
            kwargs["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            kwargs["logit_bias"] = tuple(self.logit_bias.items())
        try:
            return SamplingParams(**kwargs)
        except ValueError as error:
            words = str(error).split(" ")
            known = [word for word in (words[1], "stop") if word in SamplingParams.__struct_fields__]
            raise ApiError(400, str(error), param=known[0]) from None

    def answer_grammar(self, params: SamplingParams) -> GrammarSource | None:
        """Returns the grammar that the answer is to follow; None: it has none. Raises ApiError."""
        if all(getattr(self, name) is None for name in GrammarFields.__struct_fields__):
            return None
        try:
            source = self.grammar_source()
            if source is not None:
                require_fit(params.min_tokens, params.ignore_eos, params.allowed_token_ids, source)
        except GrammarError as error:
            raise ApiError(400, str(error), param=error.param) from None
        return source


_PASSED_THROUGH = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p"),
    *("repetition_penalty", "min_tokens", "prompt_logprobs", "stop_token_ids", "allowed_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────
class CompletionRequest(Sampling, kw_only=True):
    prompt: PromptList | None = None
    prompt_embeds: str | Annotated[list[str], msgspec.Meta(max_length=MAX_PROMPTS)] | None = None  # in base64
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo or self.return_token_ids) or self.prompt_logprobs is not None

    def sampling(self, defaults: Defaults = NO_DEFAULTS) -> SamplingParams:
        """Returns the sampling parameters: for the prompt alone (`max_tokens` 0), of one token, which is dropped."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ApiError(400, "expected max_tokens of 1 or more without echo and prompt_logprobs", param="max_tokens")
        if self.echo and self.prompt_embeds:
            raise ApiError(400, "echo is not supported with prompt_embeds", param="echo")
        max_tokens = TOKENS_OF_A_COMPLETION if self.max_tokens is None else max(1, self.max_tokens)
        params = self.params(max_tokens, self.logprobs, defaults)
        if self.echo and params.prompt_logprobs is None and self.logprobs is not None:
            return msgspec.structs.replace(params, prompt_logprobs=self.logprobs)
        return params

    def take_embeds(self) -> list[str]:
        """Returns the prompts that are embeddings, and keeps none: they are long, and it may take long to answer."""
        embeds, self.prompt_embeds = self.prompt_embeds or [], None
        return [embeds] if isinstance(embeds, str) else embeds

    def prompts(self, embeds: int = 0) -> list[str | list[int]]:
        """Returns the prompts, each a text or a list of ids. `embeds`: how many others there are, so that none is
        needed. Raises ApiError if they are of several kinds, or none."""
        if embeds and not self.prompt:
            return []
        if self.prompt is None:
            raise ApiError(400, "object missing required field prompt at $.prompt", param="prompt")
        return separate_prompts(self.prompt, "prompt", MAX_PROMPTS, embeds)


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(msgspec.Struct):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class VideoUrl(msgspec.Struct):
    url: str


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    video_url: VideoUrl


class Message(CallFields, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | RefusalPart | ImagePart | VideoPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Unsupported = None
    audio: Unsupported = None


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def sampling(self, defaults: Defaults = NO_DEFAULTS) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "expected logprobs: true with top_logprobs", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens is None:
            max_tokens = defaults.get("max_tokens")
        return self.params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None, defaults)

    @property
    def template_options(self) -> dict[str, Any]:
        """Returns the variables of the chat template besides the messages; `reasoning_effort` is passed as in vLLM."""
        effort = self.reasoning_effort
        options = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {**options, **(self.chat_template_kwargs or {})}


class Conversation(NamedTuple):
    """Messages as chat templates take them, with a part of type "image" or "video" for each; these, in order; and the
    tools that the template shows."""

    messages: list[dict[str, Any]]
    media: list[MediaRef]
    tools: list[dict[str, Any]]

    @property
    def parts(self) -> int:
        contents = (message["content"] for message in self.messages)
        return len(self.tools) + sum(1 if isinstance(content, str) else len(content) for content in contents)

    @classmethod
    def of(cls, messages: list[Message], tools: Sequence[Tool] | None = None) -> Conversation:
        conversation = cls([], [], tools_for_template(tools) if tools else [])
        results = CallResults() if any(each.tool_calls or each.role == "tool" for each in messages) else None
        for place, message in enumerate(messages):
            for name, way_out in (("function_call", "use tool_calls"), ("audio", "expected nothing")):
                if getattr(message, name):
                    where = f"messages[{place}].{name}"
                    raise ApiError(400, f"{name} is not supported: {way_out} at $.{where}", param=where)
            content: Any = message.content or ""
            if not isinstance(content, str):
                parts = enumerate(content)
                content = [conversation._plain(f"messages[{place}].content[{part}]", item) for part, item in parts]
            fields = {"role": message.role, "content": content}
            if message.name is not None:
                fields["name"] = message.name
            if reasoning := message.reasoning_content or message.reasoning:
                fields.update(reasoning_content=reasoning, reasoning=reasoning)  # templates read either
                if not content:  # the template of gpt-oss has one or the other beside calls
                    fields["thinking"] = reasoning
            complete = [fields] if results is None else results.add(place, message.role, message, fields)
            conversation.messages.extend(complete)
        conversation.messages.extend(() if results is None else results.finish())
        return conversation

    def _plain(self, where: str, part: TextPart | RefusalPart | ImagePart | VideoPart) -> dict[str, str]:
        if isinstance(part, TextPart | RefusalPart):
            return {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}
        if isinstance(part, VideoPart):
            self.media.append(MediaRef(where, part.video_url.url, VIDEO))
            return {"type": "video"}
        self.media.append(MediaRef(where, part.image_url.url, IMAGE))
        return {"type": "image"}


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[Id], msgspec.Meta(max_length=MAX_PARTS)]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A body of /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def content(self) -> str | Conversation:
        """Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "expected either prompt or messages", param="prompt")
        if self.messages is None:
            return self.prompt or ""
        check_tools(self.tools or ())
        return Conversation.of(self.messages, self.tools)


DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
STRICT: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
FIELDS: dict[type[msgspec.Struct], frozenset[str]] = {}


def register_body(kind: type[T]) -> type[T]:
    """Adds a body of requests to those that `decoded` takes."""
    DECODERS[kind] = msgspec.json.Decoder(kind)
    STRICT[kind] = msgspec.json.Decoder(strict(kind, StreamOptions))
    options = (f"stream_options.{name}" for name in StreamOptions.__struct_fields__)
    FIELDS[kind] = frozenset((*kind.__struct_fields__, *options))
    return kind


for body_kind in (
    *(CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest),
    *(EmbeddingRequest, ScoreRequest, RerankRequest),
):
    register_body(body_kind)

WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decoded(body: bytes | bytearray, kind: type[T], unknown: list[str] | None = None) -> T:
    """Decodes a body. Names of unknown fields are appended to `unknown`. Raises ApiError."""
    if len(body) > LONG:
        request = _decoded_in_parts(body, kind, unknown)
        if request is not None:
            return request
        check_json_size(body)
    try:
        return _decode(body, kind, unknown)
    except WRONG as error:
        raise body_error(error) from None


def _decoded_in_parts(body: bytes | bytearray, kind: type[T], unknown: list[str] | None) -> T | None:
    """Decodes a body without its long data URLs and embeddings. Returns None if it has none, or has an error: then the
    whole body is decoded, for the right position in the error."""
    short, urls = extract_data_urls(body)
    if not urls:
        return None
    check_json_size(short)
    try:
        request = _decode(short, kind, unknown)
    except WRONG as error:
        if len(body) <= MAX_NBYTES:
            return None
        raise body_error(error, "long images and embeddings not counted") from None
    return request if _is_whole_with(request, urls) else None


def _decode(body: bytes | bytearray, kind: type[T], unknown: list[str] | None) -> T:
    """Decodes a body, and checks fields in NEUTRAL_ONLY. Raises WRONG, ApiError."""
    try:
        request: T = STRICT[kind].decode(body)
    except msgspec.ValidationError as error:
        if "unknown field" in str(error) or "got `float`" in str(error):
            return _decode_with_unknown(body, kind, unknown)
        raise
    for name in NEUTRAL_ONLY:
        if name not in FIELDS[kind] and getattr(request, name) is not None:
            require_neutral(name, getattr(request, name))
    return request


def _decode_with_unknown(body: bytes | bytearray, kind: type[T], unknown: list[str] | None) -> T:
    """As `_decode`, ten times as slow. Names of unknown fields are appended to `unknown`."""
    try:
        request: T = DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        repaired = _with_whole_numbers(body, kind) if "got `float`" in str(error) else None
        if repaired is None:
            raise
        return _decode_with_unknown(repaired, kind, unknown)
    names = unknown_fields(body, FIELDS[kind])
    if unknown is not None:
        unknown[:] = names
    return request


def _with_whole_numbers(body: bytes | bytearray, kind: type[msgspec.Struct]) -> bytes | None:
    """Returns the body with 10.0 written as 10 for each field of type int; None: no field needs that."""
    fields = msgspec.json.decode(body)
    if not isinstance(fields, dict):  # a body that is a float
        return None
    floats = [name for name in _whole_numbers(kind) & fields.keys() if isinstance(fields[name], float)]
    whole = {name: int(fields[name]) for name in floats if fields[name].is_integer()}
    return msgspec.json.encode({**fields, **whole}) if whole else None


@functools.cache
def _whole_numbers(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the encoded names of the fields of type `int` or `int | None`."""
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    kinds = {field.encode_name: set(map(type, getattr(field.type, "types", (field.type,)))) for field in fields}
    optional = {msgspec.inspect.IntType, msgspec.inspect.NoneType}
    return frozenset(name for name, types in kinds.items() if msgspec.inspect.IntType in types <= optional)


def _is_whole_with(request: msgspec.Struct, urls: dict[str, str]) -> bool:
    """Puts the long strings in place of their marks. Returns False if a mark is none of a medium or embeddings."""
    if restore := getattr(request, "restore", None):
        restore(urls)
        return not urls
    if isinstance(request, CompletionRequest):
        embeds = request.prompt_embeds
        if isinstance(embeds, str):
            request.prompt_embeds = urls.pop(embeds, embeds)
        elif embeds is not None:
            embeds[:] = [urls.pop(text, text) for text in embeds]
    messages: list[Message] = getattr(request, "messages", None) or []
    for message in messages:
        if isinstance(message.content, list):
            for part in message.content:
                if not isinstance(part, TextPart | RefusalPart):
                    source = part.image_url if isinstance(part, ImagePart) else part.video_url
                    source.url = urls.pop(source.url, source.url)
    return not urls
