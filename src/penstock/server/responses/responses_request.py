"""The body of `/v1/responses`, and the chat for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.engine.text.grammar_fields import FunctionDefinition, NamedSchema, ResponseFormat, Schema, Tool
from penstock.server.chat.request_fields import Neutral, refused, require_neutral_fields
from penstock.server.chat.request_schema import (
    MAX_MESSAGES,
    ChatRequest,
    ImagePart,
    ImageUrl,
    Message,
    RefusalPart,
    Sampling,
    TextPart,
    register_body,
)
from penstock.server.chat.tool_fields import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionName,
    NamedTool,
    RequestFunction,
    RequestToolCall,
    ToolChoice,
)
from penstock.server.errors import ApiError

# Patterns of a chat's fields, as errors have them, and the fields of the body.
NAMES = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_(?:completion_)?tokens\Z", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"messages\Z", "input"),
    (r"(input\[\d+\])\.tool_call_id", r"\1.call_id"),
    # Calls that follow each other are one message of the chat: the path is that of the first.
    (r"(input\[\d+\]|previous_response_id)\.tool_calls\[\d+\](?:\.id|\.function\.arguments)?", r"\1"),
    (r"tool_choice\.allowed_tools", "tool_choice"),
    (r"(tools\[\d+\]|tool_choice(?:\.tools\[\d+\])?)\.function", r"\1"),
)
# Fields refused by name, with the values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "max_tokens": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
INCLUDED_LOGPROBS = (
    "message.output_text.logprobs"  # all else that `include` may name is of tools and items not made here
)
INSTEAD = {"max_tokens": ": use max_output_tokens", "response_format": ": use text.format"}


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image", omit_defaults=True):
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


Part = InputText | OutputText | InputImage | RefusalPart | ReasoningText | SummaryText


class ResponseItem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An item of any type. `ItemReader` checks the fields that a type needs."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = None

    @property
    def images(self) -> list[InputImage]:
        parts = [part for content in (self.content, self.output) if isinstance(content, list) for part in content]
        return [part for part in parts if isinstance(part, InputImage)]


class ItemReader:
    """Turns items into the messages of a chat. Items of one turn of the model are one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.paths: list[str] = []  # of each message: where its first item stands
        self._turn: Message | None = None  # of the model, which goes on with the next item

    def add(self, where: str, item: ResponseItem) -> None:
        """Adds an item, which stands at `where`. Raises ApiError."""
        if item.type == "message":
            self._add_message(where, item)
        elif item.type == "reasoning":
            if item.encrypted_content:
                raise refused(f"{where}.encrypted_content")
            texts = item.content or item.summary or []
            text = texts if isinstance(texts, str) else "".join(getattr(part, "text", "") for part in texts)
            if self._turn is None or self._turn.content or self._turn.tool_calls:
                self._turn = self._append(where, Message(role="assistant", reasoning_content=""))
            self._turn.reasoning_content = f"{self._turn.reasoning_content or ''}{text}"
        elif item.type == "function_call":
            function = RequestFunction(_required(where, "name", item.name), item.arguments)
            call = RequestToolCall(_required(where, "call_id", item.call_id), function)
            if self._turn is None:
                self._turn = self._append(where, Message(role="assistant"))
            self._turn.tool_calls = [*(self._turn.tool_calls or ()), call]
        elif item.type == "function_call_output":
            content = _contents(f"{where}.output", _required(where, "output", item.output))
            call_id = _required(where, "call_id", item.call_id)
            self._turn = None
            self._append(where, Message(role="tool", content=content, tool_call_id=call_id))
        else:
            known = "message, reasoning, function_call, function_call_output or item_reference"
            raise ApiError(400, f"expected {known}, got {item.type!r:.80} at $.{where}.type", param=f"{where}.type")

    def _add_message(self, where: str, item: ResponseItem) -> None:
        role = _required(where, "role", item.role)
        content = _contents(f"{where}.content", "" if item.content is None else item.content)
        if role != "assistant":
            self._turn = None
            self._append(where, Message(role=role, content=content))
        elif self._turn is not None and not self._turn.content:
            self._turn.content = content
        else:
            self._turn = self._append(where, Message(role="assistant", content=content))

    def _append(self, where: str, message: Message) -> Message:
        self.messages.append(message)
        self.paths.append(where)
        return message


def _required(where: str, name: str, value: Any) -> Any:
    if value is None:
        raise ApiError(400, f"object missing required field {name} at $.{where}.{name}", param=f"{where}.{name}")
    return value


def _contents(where: str, content: str | list[Part]) -> Any:
    """Returns contents as a chat has them."""
    if isinstance(content, str):
        return content
    parts: list[TextPart | RefusalPart | ImagePart] = []
    for number, part in enumerate(content):
        if isinstance(part, InputImage):
            if part.image_url is None:
                raise refused(f"{where}[{number}].file_id", ": use image_url")
            parts.append(ImagePart(ImageUrl(part.image_url, part.detail)))
        else:
            parts.append(part if isinstance(part, RefusalPart) else TextPart(part.text))
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


# ── tools and formats ────────────────────────────────────────────────────────────────────────────────────────────────
class ResponseTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct):
    type: str
    name: str = ""


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    mode: Literal["auto", "required"] | None = None  # None: "auto"
    tools: Annotated[list[NamedChoice], msgspec.Meta(max_length=MAX_TOOLS)] = []


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None  # the whole reasoning is in the answer
    generate_summary: str | None = None


def _function(kind: str, where: str) -> None:
    if kind != "function":
        message = f"tools of type {kind!r:.80} are not supported: expected function at $.{where}.type"
        raise ApiError(400, message, param=f"{where}.type")


def _chat_tool(where: str, tool: ResponseTool) -> Tool:
    _function(tool.type, where)
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    try:
        return Tool(msgspec.convert(fields, FunctionDefinition))
    except msgspec.ValidationError:
        message = f"expected a name of letters, digits, _, - and . at $.{where}.name, got {tool.name!r:.80}"
        raise ApiError(400, message, param=f"{where}.name") from None


def _chat_choice(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "allowed_tools":
        _function(choice.type, "tool_choice")
        return NamedTool(FunctionName(choice.name))
    for number, tool in enumerate(choice.tools):
        _function(tool.type, f"tool_choice.tools[{number}]")
    named = [NamedTool(FunctionName(tool.name)) for tool in choice.tools]
    return AllowedToolsChoice(AllowedTools(named, choice.mode or "auto"))


def _chat_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    text_format = text.format
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    schema = _required("text.format", "schema", text_format.schema)
    return ResponseFormat(
        text_format.type, NamedSchema(schema, text_format.name, text_format.description, text_format.strict)
    )


# ── the body ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class TranslatedChat(NamedTuple):
    chat: ChatRequest
    paths: list[str]  # of each message


@register_body
class ResponsesRequest(Sampling, kw_only=True):
    input: str | Annotated[list[ResponseItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Neutral = None
    context_management: Neutral = None
    conversation: Neutral = None
    include: list[str] | None = None
    prompt: Neutral = None
    top_logprobs: Neutral = None
    truncation: Neutral = None
    max_tool_calls: int | None = None  # of tools that a server runs

    @property
    def items(self) -> list[ResponseItem]:
        return [ResponseItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def has_references(self) -> bool:
        return any(item.type == "item_reference" for item in self.items)

    def restore(self, urls: dict[str, str]) -> None:
        """Puts long images in the place of marks."""
        for image in (image for item in self.items for image in item.images):
            image.image_url = urls.pop(image.image_url or "", image.image_url)

    def require_supported(self) -> None:
        """Raises ApiError for a field that is refused by name."""
        require_neutral_fields(self, REFUSED, INSTEAD)
        if INCLUDED_LOGPROBS in (self.include or ()):
            raise refused("include", f" with {INCLUDED_LOGPROBS}")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise refused("text.verbosity", ": expected medium, or nothing")

    def translate(self, earlier: Sequence[ResponseItem] = ()) -> TranslatedChat:
        """Returns the chat that answers. `earlier`: items of the responses before. Raises ApiError."""
        reader = ItemReader()
        if self.instructions:
            reader.add("instructions", ResponseItem(role="system", content=self.instructions))
        for item in earlier:
            reader.add("previous_response_id", item)
        for number, item in enumerate(self.items):
            reader.add(f"input[{number}]", item)
        if not reader.messages:
            raise ApiError(400, "expected an item or more at $.input, got none", param="input")
        shared = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        chat = ChatRequest(
            **{**shared, "response_format": _chat_format(self.text)},
            messages=reader.messages,
            max_completion_tokens=self.max_output_tokens,
            tools=None
            if self.tools is None
            else [_chat_tool(f"tools[{n}]", tool) for n, tool in enumerate(self.tools)],
            tool_choice=_chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return TranslatedChat(chat, reader.paths)
