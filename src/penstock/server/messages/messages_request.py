"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat for an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.engine.text.grammar_fields import FunctionDefinition, NamedSchema, ResponseFormat, Schema, Tool
from penstock.server.chat.request_fields import Neutral, refused, require_neutral_fields
from penstock.server.chat.request_schema import (
    MAX_MESSAGES,
    MAX_STOPS,
    ChatRequest,
    ImagePart,
    ImageUrl,
    Message,
    Sampling,
    Short,
    Stop,
    TextPart,
    register_body,
)
from penstock.server.chat.tool_fields import (
    MAX_TOOLS,
    FunctionName,
    Id,
    NamedTool,
    RequestFunction,
    RequestToolCall,
    ToolChoice,
)
from penstock.server.errors import ApiError

# Patterns of a chat's fields, as errors have them, and the fields of the body.
NAMES = (
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
    (r"response_format\.json_schema", "output_config.format"),
    (r"stop\Z", "stop_sequences"),
    (r"(messages\[\d+\])\.(?:tool_call_id|tool_calls\[\d+\](?:\.id|\.function\.arguments)?)", r"\1.content"),
)
# Fields refused by name, with the values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "container": (),
    "mcp_servers": ([],),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "stop": ([],),
}
INSTEAD = {"response_format": ": use output_config.format", "stop": ": use stop_sequences"}


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class SystemBlock(msgspec.Struct):
    """A tag of a struct that stands in no union is not required; `type` is."""

    type: Literal["text"]
    text: str


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]

    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    data: str = msgspec.field(name="url")

    def url(self) -> str:
        return self.data


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    data: str  # of another server, which alone can read it


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: Id
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: Id
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]


def _texts(content: str | list[TextBlock] | list[SystemBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _part(block: TextBlock | ImageBlock) -> TextPart | ImagePart:
    return TextPart(block.text) if isinstance(block, TextBlock) else ImagePart(ImageUrl(block.source.url()))


def _chat_messages(message: InputMessage) -> list[Message]:
    """Returns the messages of a chat for a message: results of tools are messages, and come first."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    messages, parts, calls, thoughts = list[Message](), list[Any](), list[RequestToolCall](), list[str]()
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content: Any = block.content or ""
            content = content if isinstance(content, str) else [_part(part) for part in content]
            messages.append(Message(role="tool", content=_plain(content), tool_call_id=block.tool_use_id))
        elif isinstance(block, ToolUseBlock):
            calls.append(RequestToolCall(block.id, RequestFunction(block.name, block.input)))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif not isinstance(block, RedactedThinkingBlock):
            parts.append(_part(block))
    if parts or calls or thoughts or not messages:
        reasoning = "".join(thoughts) or None
        messages.append(
            Message(role=message.role, content=_plain(parts), tool_calls=calls or None, reasoning_content=reasoning)
        )
    return messages


def _plain(parts: Any) -> Any:
    """Returns a single text without a part: some templates take texts only."""
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


# ── tools and options ────────────────────────────────────────────────────────────────────────────────────────────────
class MessageTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class MessageMetadata(msgspec.Struct):
    user_id: Short | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # the reasoning is bounded by max_tokens alone
    display: str | None = None


class OutputFormat(msgspec.Struct):
    schema: Schema
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct):
    type: str


class ContextManagement(msgspec.Struct):
    edits: Annotated[list[ContextEdit], msgspec.Meta(max_length=MAX_TOOLS)] = []

    def require_supported(self) -> None:
        """Raises ApiError for an edit. Earlier thinking is the chat template's to keep or to drop."""
        for number, edit in enumerate(self.edits):
            if not edit.type.startswith("clear_thinking_"):
                raise refused(f"context_management.edits[{number}]")


def _chat_tool(where: str, tool: MessageTool) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"tools of type {tool.type!r:.80} are not supported: expected custom at $.{where}.type"
        raise ApiError(400, message, param=f"{where}.type")
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    try:
        return Tool(msgspec.convert(fields, FunctionDefinition))
    except msgspec.ValidationError:
        message = f"expected a name of letters, digits, _, - and . at $.{where}.name, got {tool.name!r:.80}"
        raise ApiError(400, message, param=f"{where}.name") from None


def _chat_choice(choice: MessageToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedTool(FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


# ── the bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────
@register_body
class CountTokensRequest(Sampling, kw_only=True):
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[MessageTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    stop_sequences: Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    metadata: MessageMetadata | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the former name of `output_config.format`
    cache_control: Any = None
    container: Neutral = None
    context_management: ContextManagement | None = None
    mcp_servers: Neutral = None
    inference_geo: Any = None

    def restore(self, urls: dict[str, str]) -> None:
        """Puts long images in the place of marks."""
        blocks = [block for message in self.messages if isinstance(message.content, list) for block in message.content]
        blocks += [
            inner
            for block in blocks
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
            for inner in block.content
        ]
        for block in blocks:
            if isinstance(block, ImageBlock):
                block.source.data = urls.pop(block.source.data, block.source.data)

    def translate(self) -> tuple[ChatRequest, list[str]]:
        """Returns the chat for an answer, and the path of each message of the chat. Raises ApiError."""
        require_neutral_fields(self, REFUSED, INSTEAD)
        if self.context_management is not None:
            self.context_management.require_supported()
        messages, paths = list[Message](), list[str]()
        if self.system:
            messages, paths = [Message(role="system", content=_texts(self.system))], ["system"]
        for number, message in enumerate(self.messages):
            more = _chat_messages(message)
            messages += more
            paths += [f"messages[{number}]"] * len(more)
        return ChatRequest(**{**self._shared(), "messages": messages}), paths

    def _shared(self) -> dict[str, Any]:
        """Returns the fields of the chat besides the messages."""
        choice, output = self.tool_choice, self.output_config
        output_format = self.output_format if output is None or output.format is None else output.format
        return {
            **{name: getattr(self, name) for name in Sampling.__struct_fields__},
            "stop": self.stop_sequences,
            "user": self.user if self.metadata is None else self.metadata.user_id,
            "tools": None
            if self.tools is None
            else [_chat_tool(f"tools[{n}]", tool) for n, tool in enumerate(self.tools)],
            "tool_choice": _chat_choice(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": output_format and ResponseFormat("json_schema", NamedSchema(output_format.schema)),
            "reasoning_effort": None if output is None else output.effort,
            "chat_template_kwargs": self.thinking and {"enable_thinking": self.thinking.type != "disabled"},
            # A last message of the model is the beginning of the answer.
            "continue_final_message": self.messages[-1].role == "assistant" or None,
        }


@register_body
class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]  # required here
