"""/v1/messages through the server, as Anthropic's clients send them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

for library in ("openai", "httptools"):
    pytest.importorskip(library)

from penstock.server.chat import response_schema  # noqa: E402
from tests.e2e.schema_cases import WEATHER  # noqa: E402
from tests.e2e.test_server import KEY, Served, run_server  # noqa: E402
from tests.support.engine import START, simulated_device  # noqa: E402
from tests.support.grammars import simulated_chats  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402

LIMITS: dict[str, Any] = {"max_open_requests": 256, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}
MODEL = "simulated"
USER = {"role": "user", "content": "hi"}
PROMPT = "user: hi\nassistant:"
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}


async def post(served: Served, path: str = "", key: str = f"x-api-key: {KEY}", **fields: Any) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    body = {"model": MODEL, "messages": [USER], **fields}
    status, text = await served.exchange("POST", f"/v1/messages{path}", body, f"{key}\r\n")
    return status, json.loads(text)


async def events_of(served: Served, kill: str = "", **fields: Any) -> list[dict[str, Any]]:
    """`kill`: a process that is killed after some events."""
    reader, writer = await served.connect(
        "/v1/messages", {"model": MODEL, "messages": [USER], "stream": True, **fields}
    )
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("message_stop", "error"):
        line = await reader.readline()
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
            events.append(json.loads((await reader.readline()).removeprefix(b"data: ")))
            assert events[-1]["type"] == name
            if kill and len(events) == 20:
                os.kill(served.child(kill).pid, signal.SIGKILL)
    writer.close()
    return events


def texts(events: list[dict[str, Any]], field: str = "text") -> str:
    return "".join(event["delta"].get(field, "") for event in events if event["type"] == "content_block_delta")


async def a_message_is_the_answer_of_a_chat(served: Served) -> None:
    status, message = await post(served, max_tokens=6)
    assert status == 200 and message["stop_reason"] == "max_tokens" and message["role"] == "assistant"
    msgspec.convert(message, response_schema.MessageObject)
    assert message["content"] == [{"type": "text", "text": served.answer(PROMPT, 6)}]
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 19 and usage["output_tokens"] == 6
    status, message = await post(served, max_tokens=6, system="be brief", key=f"authorization: Bearer {KEY}")
    assert message["content"][0]["text"] == served.answer(f"system: be brief\n{PROMPT}", 6)
    text = served.answer(PROMPT, 6)
    stop = text.split()[3]
    status, message = await post(served, max_tokens=6, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text.partition(stop)[0]


async def a_stream_has_the_events_of_the_whole_message(served: Served) -> None:
    events = await events_of(served, max_tokens=30)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"} and len(kinds) > 10
    assert texts(events) == served.answer(PROMPT, 30)
    assert events[-2]["usage"]["output_tokens"] == 30 and events[-2]["delta"]["stop_reason"] == "max_tokens"


async def tokens_are_counted(served: Served) -> None:
    assert await post(served, "/count_tokens") == (200, {"input_tokens": 19})
    assert await post(served, "/count_tokens", system="be brief") == (200, {"input_tokens": 19 + 17})


async def errors_have_anthropics_form(served: Served) -> None:
    for fields, status, kind in (
        ({}, 400, "invalid_request_error"),
        ({"max_tokens": 5, "model": "other"}, 404, "not_found_error"),
        ({"max_tokens": 5, "key": "x-api-key: no"}, 401, "authentication_error"),
        ({"max_tokens": 5, "mcp_servers": [{}]}, 400, "invalid_request_error"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error"),
    ):
        answered, body = await post(served, **fields)  # type: ignore[arg-type]
        assert (answered, body["type"], body["error"]["type"]) == (status, "error", kind), body
        msgspec.convert(body, response_schema.MessageError)


@in_a_loop
async def test_messages_are_answered_counted_and_refused() -> None:
    async with run_server(LIMITS) as served:
        for scene in (
            a_message_is_the_answer_of_a_chat,
            a_stream_has_the_events_of_the_whole_message,
            tokens_are_counted,
            errors_have_anthropics_form,
        ):
            await scene(served)
        await served.must_be_empty()


@in_a_loop
async def test_stream_of_a_message_goes_on_when_a_process_is_killed() -> None:
    device = simulated_device(step_seconds=0.01)
    async with run_server(LIMITS, simulated=device, api_server_count=1) as served:
        for kind in ("output", "core"):
            events = await events_of(served, kill=kind, max_tokens=120)
            assert texts(events) == served.answer(PROMPT, 120) and events[-1]["type"] == "message_stop"
            await served.launcher.serving(START)


@in_a_loop
async def test_tools_of_messages_are_those_of_chats(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    async with run_server({**LIMITS, "served_model_name": (MODEL,)}, **simulated_chats(tmp_path)) as served:
        fields: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "max_tokens": 400, "seed": 3}
        fields["tool_choice"] = {"type": "tool", "name": "weather"}
        status, message = await post(served, **fields)
        assert status == 200 and message["stop_reason"] == "tool_use", message
        (use,) = message["content"]
        assert use["name"] == "weather" and use["input"]["city"] in ("Rio", "Bern")
        events = await events_of(served, **fields)
        assert json.loads(texts(events, "partial_json")) == use["input"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sunny"}]}
        hidden = {"type": "redacted_thinking", "data": "x"}
        history = [USER, {"role": "assistant", "content": [hidden, use]}, {"role": "user", "content": [result]}]
        status, message = await post(served, model=MODEL, tools=[TOOL], messages=history, max_tokens=4)
        assert status == 200 and message["stop_reason"] == "max_tokens"
        assert await served.total("penstock_tool_calls_total") == 2  # of the whole message and of the stream
        status, body = await post(served, model=MODEL, tools=[TOOL], messages=history[:2], max_tokens=4)
        assert status == 400 and "weather" in body["error"]["message"]
