"""Tool calls through the server. The model is random, so only a grammar makes it call."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

for library in ("openai", "httptools", "torch", "llguidance"):
    pytest.importorskip(library)

from tests import tiers  # noqa: E402
from tests.e2e.schema_cases import WEATHER  # noqa: E402
from tests.e2e.test_server import Served, refused, run_server  # noqa: E402
from tests.support.engine import START  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.tiny_models import END_OF_TURN, LLAMA, SPECIAL, write_llama  # noqa: E402

LIMITS = {"max_open_requests": 256, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
END = str(SPECIAL.index(END_OF_TURN))
USER = {"role": "user", "content": "hi"}


class Choice(NamedTuple):
    """A choice of an answer, whole or put together from a stream."""

    content: str
    calls: list[tuple[str, str]]  # name and arguments
    reason: str
    ids: list[str]  # of the calls


async def whole(served: Served, **fields: Any) -> list[Choice]:
    answer = await served.client.chat.completions.create(**{"model": LLAMA, "messages": [USER], **fields})
    choices = []
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        named = [(call.function.name, call.function.arguments) for call in calls]
        choices.append(Choice(choice.message.content or "", named, choice.finish_reason, [call.id for call in calls]))
    return choices


async def streamed(served: Served, kill: str = "", **fields: Any) -> list[Choice]:
    """`kill`: a process of the first group that is killed after some chunks."""
    contents, calls, reasons = {}, {}, {}
    stream = await served.client.chat.completions.create(
        **{"model": LLAMA, "messages": [USER], "stream": True, **fields}
    )
    number = 0
    async for event in stream:
        number += 1
        if number == 12 and kill:
            os.kill(served.child(kill).pid, signal.SIGKILL)
        for choice in event.choices:
            contents[choice.index] = contents.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            for call in choice.delta.tool_calls or []:
                parts = calls.setdefault(choice.index, {}).setdefault(call.index, ["", "", ""])
                new = (call.function.name, call.function.arguments, call.id)
                parts[:] = [part + (more or "") for part, more in zip(parts, new, strict=True)]
    assert number > 12 or not kill
    return [
        Choice(
            contents[index],
            [(name, arguments) for name, arguments, _ in calls.get(index, {}).values()],
            reasons[index],
            [call_id for _, _, call_id in calls.get(index, {}).values()],
        )
        for index in sorted(contents)
    ]


def require_weather(choice: Choice) -> None:
    assert choice.content == "" and choice.reason == "tool_calls", choice
    for name, arguments in choice.calls:
        assert name == "weather", choice
        value = json.loads(arguments)
        assert value["city"] in ("Rio", "Bern") and 1 <= value["days"] <= 14 and len(value) == 2, choice


async def forced_calls_have_names_and_arguments_of_the_schema(served: Served) -> None:
    for fields in ({"tool_choice": NAMED}, {"tool_choice": "required", "tools": TOOLS[:1]}):
        fields = {"tools": TOOLS, "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 400, **fields}
        choices = await whole(served, **fields)
        assert len(choices) == 2
        for choice in choices:
            if choice.reason != "length":
                require_weather(choice)
        # A choice's calls and their ids differ from those of others.
        ids = [call_id for choice in choices for call_id in choice.ids]
        assert len(set(ids)) == len(ids) and all(call_id.startswith("call_") for call_id in ids)
        again = await streamed(served, **fields)
        assert [choice._replace(ids=[]) for choice in again] == [choice._replace(ids=[]) for choice in choices]


async def one_call_is_made_where_calls_are_not_parallel(served: Served) -> None:
    fields = {"tools": TOOLS[:1], "temperature": 1.0, "max_tokens": 400, "logit_bias": {END: -4}}
    several = 0
    for seed in range(6):
        (choice,) = await whole(served, **fields, tool_choice="required", parallel_tool_calls=False, seed=seed)
        require_weather(choice)
        assert len(choice.calls) == 1
        (parallel,) = await whole(served, **fields, tool_choice="required", seed=seed)
        several += len(parallel.calls) > 1
    assert several


async def text_of_auto_is_a_call_if_it_has_the_marks(served: Served) -> None:
    text = '<tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>'
    for fields, calls in (
        ({"tools": TOOLS}, [("time", '{"a": 1}')]),
        ({"tools": TOOLS, "tool_choice": "none"}, []),
        ({}, []),
    ):
        body = {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 200, **fields}
        for choice in (*await whole(served, **body), *await streamed(served, **body)):
            assert choice.calls == calls and choice.content == ("" if calls else text)
            assert choice.reason == ("tool_calls" if calls else "stop")
    (cut,) = await whole(served, **{**body, "tools": TOOLS, "max_tokens": 50})
    assert cut.reason == "length" and cut.calls[0][0] == "time"


async def answers_of_a_format_are_json_or_calls(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    kinds = set()
    for seed in range(8):
        (choice,) = await whole(
            served, tools=TOOLS[:1], response_format=schema, temperature=1.0, max_tokens=400, seed=seed
        )
        kinds.add(bool(choice.calls))
        if choice.calls:
            require_weather(choice)
        else:
            assert choice.content in ('"yes"', '"no"') and choice.reason == "stop"
    assert kinds == {True, False}


async def a_conversation_with_calls_goes_on(served: Served) -> None:
    answer = await served.client.chat.completions.create(
        model=LLAMA, messages=[USER], tools=TOOLS, tool_choice=NAMED, max_tokens=200
    )
    message = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    (choice,) = await whole(served, messages=[USER, message, *results], tools=TOOLS, max_tokens=4)
    assert choice.reason == "length"
    with refused("BadRequestError") as caught:
        await whole(served, messages=[USER, message], tools=TOOLS)
    assert caught.value.param == "messages[1].tool_calls[0]"


async def what_makes_no_sense_is_refused(served: Served) -> None:
    for fields, param in (
        ({"tools": [{**TOOLS[1], "function": {"name": 'a"\n'}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "tool_choice"),
        (
            {"tools": [{**NAMED, "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}]},
            "tools[0].function.parameters.uniqueItems",
        ),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
    ):
        with refused("BadRequestError") as caught:
            await whole(served, **fields)
        assert caught.value.param == param, fields


async def calls_and_grammars_are_counted(served: Served) -> None:
    body = {"tools": TOOLS[:1], "tool_choice": NAMED, "temperature": 1.0, "max_tokens": 400, "seed": 11, "n": 2}
    names = ("tool_calls", "grammar_masks", "grammar_mask_seconds", "grammars_compiled", "grammar_compile_seconds")
    before = [await served.total(f"penstock_{name}_total") for name in names]
    choices = [*await whole(served, **body), *await streamed(served, **body)]
    after = [await served.total(f"penstock_{name}_total") for name in names]
    assert after[0] - before[0] == sum(len(choice.calls) for choice in choices) == 4
    assert after[1] > before[1] + 40 and after[2] > before[2] and after[3] > 0 and after[4] > 0
    assert await served.total("penstock_grammars_open") == 0


async def many_tools_are_answered(served: Served) -> None:
    many = [{"type": "function", "function": {"name": f"f{number}", "parameters": WEATHER}} for number in range(100)]
    (choice,) = await whole(served, tools=many, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert len(choice.calls) == 1 and choice.calls[0][0].startswith("f")
    thousand = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
    assert (await whole(served, tools=thousand, max_tokens=2))[0].reason == "length"


SCENES = [
    forced_calls_have_names_and_arguments_of_the_schema,
    one_call_is_made_where_calls_are_not_parallel,
    text_of_auto_is_a_call_if_it_has_the_marks,
    answers_of_a_format_are_json_or_calls,
    a_conversation_with_calls_goes_on,
    what_makes_no_sense_is_refused,
    calls_and_grammars_are_counted,
    many_tools_are_answered,
]


@in_a_loop
async def test_tool_calls_are_forced_read_and_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    async with run_server(LIMITS, model=str(model), simulated=None, api_server_count=1, max_num_seqs=16) as served:
        for scene in SCENES:
            await scene(served)
            print("passed:", scene.__name__, file=sys.stderr)


@in_a_loop
async def test_reasoning_is_apart_from_content_and_counted(tmp_path: Path) -> None:
    """An answer of DeepSeek-R1 begins inside the reasoning, which the random model never ends."""
    model = write_llama(tmp_path)
    options = {**LIMITS, "reasoning_parser": "deepseek_r1"}
    async with run_server(options, model=str(model), simulated=None, api_server_count=1, max_num_seqs=16) as served:
        fields = {"model": LLAMA, "messages": [USER], "max_tokens": 20, "temperature": 0.0, "logit_bias": {END: -50}}
        create = served.client.chat.completions.create
        for more in ({}, {"extra_body": {"guided_regex": "[0-9]{4}"}}, {"tools": TOOLS, "tool_choice": "required"}):
            answer = await create(**fields, **more)
            message = answer.choices[0].message
            assert message.content is None and message.tool_calls is None
            assert message.reasoning_content == message.reasoning != ""
            assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 20
            events = [event async for event in await create(**fields, **more, stream=True)]
            deltas = [choice.delta for event in events for choice in event.choices]
            assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
            assert not any(delta.content or delta.tool_calls for delta in deltas)
        fields["messages"] = [USER, {"role": "assistant", "content": "It is"}]
        answer = await create(**fields, tools=TOOLS, extra_body={"continue_final_message": True})
        message = answer.choices[0].message
        assert message.content and message.reasoning is None, "a message that has content is continued with content"


@tiers.needs_all
@in_a_loop
async def test_tool_calls_on_two_ranks_are_equal_after_a_kill(tmp_path: Path) -> None:
    """Arguments are equal in each answer; the ids of calls are drawn once for each request, so each comes once."""
    model = write_llama(tmp_path)
    options = {"model": str(model), "simulated": None, "api_server_count": 1, "max_num_seqs": 16, "dtype": "float32"}
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "n": 2, "max_tokens": 200, "logit_bias": {END: -4}}
    fields |= {"temperature": 1.0, "seed": 7}
    async with run_server(LIMITS, **options) as served:
        expected = [choice._replace(ids=[]) for choice in await whole(served, **fields)]
    async with run_server(LIMITS, tensor_parallel_size=2, **options) as served:
        for kill in ("", "worker", "output", "core"):
            ranks = await streamed(served, kill, **fields)
            assert [choice._replace(ids=[]) for choice in ranks] == expected, kill
            ids = [call_id for choice in ranks for call_id in choice.ids]
            assert len(set(ids)) == len(ids) and {len(call_id) for call_id in ids} == {29}, kill
            await served.launcher.serving(START)
