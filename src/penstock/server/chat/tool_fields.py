"""Tools of a request, and the calls and results in its conversation: their fields, and what is refused.

The parser of the answer is in `engine/text`, and the grammar of calls beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.engine.text.grammar_fields import Tool
from penstock.server.errors import ApiError

MAX_TOOLS = 1024
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(msgspec.Struct):
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────────────────────
class RequestFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None  # a JSON object, as text by OpenAI


class RequestToolCall(msgspec.Struct):
    id: Id
    function: RequestFunction
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        arguments = self.function.arguments or "{}"
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class CallFields(msgspec.Struct, kw_only=True):
    """The fields of a message that belong to calls."""

    tool_calls: Annotated[list[RequestToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Id | None = None


class CallResults:
    """Puts the results of calls into the order of the calls, since many templates show no ids.

    A message is a dict as chat templates take it. Each call needs a result before the next message that is none.
    """

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, str]] = {}  # by id: the path of the call without a result, and its function
        self._results: dict[str, dict[str, Any]] = {}

    def add(self, place: int, role: str, fields: CallFields, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages that are complete. Raises ApiError for a call without a result, and the other way."""
        where = f"messages[{place}]"
        if role == "tool":
            self._add_result(f"{where}.tool_call_id", fields.tool_call_id, message)
            return []
        complete = self.finish()
        if fields.tool_calls and role != "assistant":
            raise ApiError(
                400, f"expected calls of role assistant, got {role} at $.{where}", param=f"{where}.tool_calls"
            )
        for number, call in enumerate(fields.tool_calls or ()):
            path = f"{where}.tool_calls[{number}]"
            if call.id in self._calls:
                raise ApiError(
                    400, f"expected an id for each call, got {call.id!r} twice at $.{path}.id", param=f"{path}.id"
                )
            self._calls[call.id] = path, call.function.name
        if fields.tool_calls:
            message["tool_calls"] = [call.for_template() for call in fields.tool_calls]
        return [*complete, message]

    def _add_result(self, where: str, call_id: str | None, message: dict[str, Any]) -> None:
        if call_id is None:
            raise ApiError(400, f"expected the id of a call at $.{where}, got none", param=where)
        if call_id not in self._calls or call_id in self._results:
            problem = "a second result of" if call_id in self._results else "no call before with"
            raise ApiError(400, f"{problem} the id {call_id!r} at $.{where}", param=where)
        message["tool_call_id"] = call_id
        message.setdefault("name", self._calls[call_id][1])
        self._results[call_id] = message

    def finish(self) -> list[dict[str, Any]]:
        """Returns the results of the calls so far, in the calls' order. Raises ApiError if a result is missing."""
        for call_id, (path, name) in self._calls.items():
            if call_id not in self._results:
                message = f"the call of {name} at $.{path} has no result: expected one, with its id, behind it"
                raise ApiError(400, message, param=path)
        results = [self._results[call_id] for call_id in self._calls]
        self._calls, self._results = {}, {}
        return results


# ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────────
Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class ToolUse(NamedTuple):
    """What an answer may call."""

    tools: Sequence[Tool]
    allowed: frozenset[str]  # names of the tools that may be called; empty: the answer has no calls
    is_forced: bool  # the answer is a call
    is_parallel: bool  # or several

    @property
    def needs_grammar(self) -> bool:
        """Returns whether an answer of the model alone could break what the request says."""
        is_strict = any(tool.function.strict for tool in self.tools if tool.function.name in self.allowed)
        is_bound = is_strict or not self.is_parallel or len(self.allowed) < len(self.tools)
        return self.is_forced or (bool(self.allowed) and is_bound)


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, is_parallel: bool | None) -> ToolUse | None:
    """Returns None if the request has no tools. Raises ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "expected tools with tool_choice, got none at $.tools", param="tool_choice")
        return None
    names = allowed = check_tools(tools)
    is_forced = choice == "required"
    if choice == "none":
        allowed = []
    elif isinstance(choice, NamedTool):
        allowed, is_forced, is_parallel = [_known(choice, names, "tool_choice")], True, False
    elif isinstance(choice, AllowedToolsChoice):
        path = "tool_choice.allowed_tools"
        named = enumerate(choice.allowed_tools.tools)
        allowed = [_known(tool, names, f"{path}.tools[{number}]") for number, tool in named]
        is_forced = choice.allowed_tools.mode == "required"
    return ToolUse(tools, frozenset(allowed), is_forced, is_parallel is not False)


def check_tools(tools: Sequence[Tool]) -> list[str]:
    """Returns the names of tools. Raises ApiError for a name that is there twice, and for parameters of no object."""
    places: dict[str, int] = {}
    for place, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{place}].function"
        if places.setdefault(name, place) != place:
            message = (
                f"expected a name of its own for each tool, got {name} at $.{where}.name and tools[{places[name]}]"
            )
            raise ApiError(400, message, param=f"{where}.name")
        kind = (tool.function.parameters or ANY_ARGUMENTS).get("type", "object")
        if kind != "object":
            message = f'expected a JSON Schema of type "object", got {kind!r:.80} at $.{where}.parameters.type'
            raise ApiError(400, message, param=f"{where}.parameters")
    return list(places)


def _known(choice: NamedTool, names: Collection[str], where: str) -> str:
    name = choice.function.name
    if name not in names:
        raise ApiError(400, f"there is no tool {name!r:.200} in tools at $.{where}.function.name", param=where)
    return name


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns tools as chat templates take them: `strict` is for the grammar, and no part of a prompt."""
    return [
        {
            "type": tool.type,
            "function": {
                "name": tool.function.name,
                **({} if tool.function.description is None else {"description": tool.function.description}),
                "parameters": tool.function.parameters or ANY_ARGUMENTS,
            },
        }
        for tool in tools
    ]
