"""/v1/responses through the server, with OpenAI's client."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

for library in ("openai", "httptools"):
    pytest.importorskip(library)

from penstock.server.chat import response_schema  # noqa: E402
from tests.e2e.schema_cases import WEATHER  # noqa: E402
from tests.e2e.test_server import KEY, Served, refused, run_server  # noqa: E402
from tests.support.engine import START, simulated_device  # noqa: E402
from tests.support.grammars import simulated_chats  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402

ANOTHER_KEY = "open"
LIMITS: dict[str, Any] = {"max_open_requests": 256, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}
MODEL = "simulated"
TOOL: Any = {"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER, "strict": True}


async def events_of(served: Served, **fields: Any) -> list[Any]:
    stream = await served.client.responses.create(**{"model": MODEL, "stream": True, **fields})
    return [event async for event in stream]


def require_order(events: list[Any]) -> None:
    """Events are numbered without a gap, and each item and part ends before the next one begins."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete")
    opened: list[str] = []
    for kind in kinds[2:-1]:
        if kind.endswith(".added"):
            opened.append(kind.removesuffix(".added"))
        elif kind in ("content_part.done", "output_item.done"):
            assert opened.pop() == kind.removesuffix(".done")
        else:
            assert opened and kind.endswith((".delta", ".done")), kind
    assert not opened


# ── on a simulated device ────────────────────────────────────────────────────────────────────────────────────────────
async def a_response_is_the_answer_of_a_chat(served: Served) -> None:
    response = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=6)
    assert response.output_text == served.answer("user: hi\nassistant:", 6)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (19, 6, 25)
    assert (await served.client.responses.input_tokens.count(model=MODEL, input="hi")).input_tokens == 19
    fields = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief", "metadata": {"a": "b"}}
    fields |= {"include": ["reasoning.encrypted_content"]}  # as agents ask for, and there is none
    response = await served.client.responses.create(model=MODEL, max_output_tokens=6, **fields)
    assert response.output_text == served.answer("system: be brief\nuser: hi\nassistant:", 6)
    assert response.metadata == {"a": "b"} and response.instructions == "be brief"


async def a_stream_has_the_events_of_the_whole_response(served: Served) -> None:
    events = await events_of(served, input="hello", max_output_tokens=30)
    require_order(events)
    text = served.answer("user: hello\nassistant:", 30)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text and events[-1].response.usage.output_tokens == 30
    assert sum(event.type == "response.output_text.delta" for event in events) > 5
    response_id = events[0].response.id
    assert (await served.client.responses.retrieve(response_id)).output_text == text
    # As the document at /openapi.json has them.
    msgspec.json.decode((await served.get(f"/v1/responses/{response_id}"))[1], type=response_schema.ResponseObject)
    items = (await served.get(f"/v1/responses/{response_id}/input_items"))[1]
    msgspec.json.decode(items, type=response_schema.ResponseItemList)
    for query in ("?limit=0", "?order=x", "?after=x"):
        assert (await served.get(f"/v1/responses/{response_id}/input_items{query}"))[0] == 400


async def any_server_knows_a_response(served: Served) -> None:
    """Each request comes by a connection of its own, and either of the two servers takes it."""
    first = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=4)
    prompt = f"user: hi\nassistant: {first.output_text}\nuser: more\nassistant:"

    async def go_on() -> None:
        async with served.with_key(KEY) as client:
            fields = {"input": "more", "previous_response_id": first.id, "max_output_tokens": 4}
            response = await client.responses.create(model=MODEL, **fields)
            assert response.output_text == served.answer(prompt, 4)
            assert response.previous_response_id == first.id
            again = await client.responses.retrieve(response.id)
            assert again.output_text == response.output_text

    for _ in range(6):
        await asyncio.gather(*(go_on() for _ in range(8)))
    for server in ("0", "1"):
        assert await served.total("penstock_requests_total", f'route="responses",server="{server}"') > 0


async def a_conversation_goes_on_response_by_response(served: Served) -> None:
    prompt, previous = "", None
    for turn in range(4):
        prompt += f"user: {turn}\nassistant:"
        response = await served.client.responses.create(
            model=MODEL, input=str(turn), previous_response_id=previous, max_output_tokens=3
        )
        assert response.output_text == served.answer(prompt, 3), turn
        prompt, previous = f"{prompt} {response.output_text}\n", response.id
    items = await served.client.responses.input_items.list(previous)
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", "3")]


async def a_response_is_for_its_own_key(served: Served) -> None:
    response = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    async with served.with_key(ANOTHER_KEY) as stranger:
        for attempt in (
            stranger.responses.retrieve(response.id),
            stranger.responses.delete(response.id),
            stranger.responses.input_items.list(response.id),
            stranger.responses.create(model=MODEL, input="x", previous_response_id=response.id),
        ):
            with refused("APIStatusError") as caught:
                await attempt
            assert f"{response.id}' not found" in caught.value.message
    await served.client.responses.delete(response.id)
    with refused("NotFoundError"):
        await served.client.responses.retrieve(response.id)


async def what_is_not_stored_is_not_found(served: Served) -> None:
    response = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=2, store=False)
    assert response.model_dump()["store"] is False
    for name in (response.id, "resp_0", "x" * 500):
        with refused("BadRequestError") as caught:
            await served.client.responses.create(model=MODEL, input="x", previous_response_id=name)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


async def a_response_outlives_the_servers(served: Served) -> None:
    response = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    killed = {served.child("server", index).pid for index in range(2)}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await served.until(lambda: not killed & {child.pid for child in served.children()}, START)
    await served.launcher.serving(START)
    async with served.with_key(KEY) as client:
        assert (await client.responses.retrieve(response.id)).output_text == response.output_text


async def what_makes_no_sense_is_refused(served: Served) -> None:
    for fields, param in (
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "x" * 5000}, "input"),
        ({"model": "other"}, "model"),
    ):
        with refused("APIStatusError") as caught:
            await served.client.responses.create(**{"model": MODEL, "input": "hi", **fields})
        assert caught.value.param == param and caught.value.status_code in (400, 404), fields


SCENES = [
    a_response_is_the_answer_of_a_chat,
    a_stream_has_the_events_of_the_whole_response,
    any_server_knows_a_response,
    a_conversation_goes_on_response_by_response,
    a_response_is_for_its_own_key,
    what_is_not_stored_is_not_found,
    what_makes_no_sense_is_refused,
    a_response_outlives_the_servers,
]


@in_a_loop
async def test_responses_are_created_stored_and_refused() -> None:
    async with run_server({**LIMITS, "api_keys": (KEY, ANOTHER_KEY)}) as served:
        for scene in SCENES:
            await scene(served)
            print("passed:", scene.__name__, file=sys.stderr)
        await served.must_be_empty()


@in_a_loop
async def test_stream_goes_on_with_its_numbers_when_a_process_is_killed() -> None:
    device = simulated_device(step_seconds=0.01)
    async with run_server(LIMITS, simulated=device, api_server_count=1) as served:
        text = served.answer("user: hello\nassistant:", 120)
        for kind in ("output", "core"):
            stream = await served.client.responses.create(
                model=MODEL, input="hello", max_output_tokens=120, stream=True
            )
            events = []
            async for event in stream:
                events.append(event)
                if len(events) == 20:
                    os.kill(served.child(kind).pid, signal.SIGKILL)
            require_order(events)
            assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == text
            assert events[-1].response.output_text == text
            await served.launcher.serving(START)


# ── with a model ─────────────────────────────────────────────────────────────────────────────────────────────────────
async def calls_are_forced_and_read_back(served: Served) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [TOOL], "max_output_tokens": 400}
    fields |= {"tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"seed": 3}}
    response = await served.client.responses.create(**fields)
    (call,) = response.output
    value = json.loads(call.arguments)
    assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
    assert value["city"] in ("Rio", "Bern") and 1 <= value["days"] <= 14
    events = await events_of(served, **fields)
    require_order(events)
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments and len(arguments) > 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = {"model": MODEL, "tools": [TOOL], "max_output_tokens": 4}
    for before in (
        {"previous_response_id": response.id, "input": [result]},
        {"input": [{"role": "user", "content": "hi"}, call.model_dump(), result]},
        {"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": call.id}, result]},
    ):
        again = await served.client.responses.create(**more, **before)
        assert again.status == "incomplete" and again.usage.input_tokens > response.usage.input_tokens


async def answers_follow_a_schema(served: Served) -> None:
    text_format = {"type": "json_schema", "name": "x", "schema": WEATHER, "strict": True}
    for kind in (text_format, {"type": "json_object"}):
        fields = {"model": MODEL, "input": "hi", "text": {"format": kind}, "max_output_tokens": 300}
        response = await served.client.responses.create(**fields, temperature=0.0, extra_body={"logit_bias": {"2": 40}})
        assert isinstance(json.loads(response.output_text), dict) and response.status == "completed"


@in_a_loop
async def test_tools_and_formats_of_responses_are_those_of_chats(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    async with run_server({**LIMITS, "served_model_name": (MODEL,)}, **simulated_chats(tmp_path)) as served:
        await calls_are_forced_and_read_back(served)
        await answers_follow_a_schema(served)
        assert (await served.exchange("DELETE", "/v1/responses/resp_x"))[0] == 404
