"""Requests with schemas, tools and histories that a seeded program has damaged: each is answered or refused by name."""

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

for library in ("openai", "httptools", "torch", "llguidance"):
    pytest.importorskip(library)

from tests import tiers  # noqa: E402
from tests.e2e.test_server import run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.tiny_models import LLAMA, write_llama  # noqa: E402

Json: TypeAlias = Any
LIMITS = {"max_open_requests": 64, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}
AT_ONCE = 8
ANSWER_S = 60.0
GROWTH_NBYTES = 32 << 20
SECONDS = tiers.limit(1800, soak=360_000)

CITY = {"type": "string", "minLength": 1, "maxLength": 8, "pattern": "^[a-z]+$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "kind": {"enum": ["a", "b", None, 3]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 3},
        "either": {"anyOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": 0}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "object", "properties": {"x": {"const": 1}, "next": {"$ref": "#/$defs/part"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "strict": True}},
]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rio"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "and now?"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
DEEP = "deep"  # stands for a value of many levels
LEVELS = (("[", "]"), ('{"items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}"))
USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": LLAMA, "max_tokens": 6}
REQUESTS: list[Json] = [
    {**CHAT, "messages": USER, "response_format": FORMAT},
    {**CHAT, "messages": USER, "guided_json": SCHEMA},
    {**CHAT, "messages": USER, "structured_outputs": {"regex": "[a-z]{1,9}(x|y)*"}},
    {**CHAT, "messages": USER, "structured_outputs": {"grammar": 'root ::= "a" | b\nb ::= [0-9]+ root?'}},
    {**CHAT, "messages": USER, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {**CHAT, "messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
    {**CHAT, "messages": HISTORY, "tools": TOOLS, "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
    {**CHAT, "messages": HISTORY, "stop": ["x"], "seed": 1, "temperature": 0.5, "n": 2, "logit_bias": {"5": 1}},
]
ODD_VALUES: list[Json] = [
    *(None, True, -1, 0, 1.5, 2**63, 1e308, "", " ", "\x00", "\ud800", "a" * 70_000, "{", "((a{1,500}){1,500}){1,500}"),
    *([], {}, [[]], {"": ""}, {"$ref": "#"}, {"$ref": "http://localhost/x"}, {"not": {}}, {"if": {}}, {"type": "nul"}),
    *({"uniqueItems": True}, {"pattern": "(?=a)"}, {"minLength": 10**6}, {"enum": list(range(3_000))}, False),
    {"allOf": [{"type": "string"}, {"type": "null"}]},
]


def nodes(value: Json) -> list[tuple[Json, Any]]:
    """Returns each container in `value`, with each of its keys."""
    result: list[tuple[Json, Any]] = []
    containers = [value]
    while containers:
        container = containers.pop()
        for key in [*container] if isinstance(container, dict) else range(len(container)):
            result.append((container, key))
            if isinstance(container[key], (dict, list)):
                containers.append(container[key])
    return result


def mutate(request: Json, drawn: random.Random) -> None:
    """Damages a value of the request. The name of the model stays."""
    values = [node for node in nodes(request) if node[1] != "model"]
    if not values:  # former damage has deleted all
        return
    container, key = drawn.choice(values)
    action = drawn.randrange(7)
    if action == 0:
        container[key] = copy.deepcopy(drawn.choice(ODD_VALUES))
    elif action == 1:
        del container[key]
    elif action == 2:
        other, place = drawn.choice(nodes(request))
        container[key] = copy.deepcopy(other[place])
    elif action == 3 and isinstance(container, list):
        container.extend(copy.deepcopy(container[key]) for _ in range(drawn.choice((1, 2, 200))))
    elif action == 4 and isinstance(container, dict):
        container[drawn.choice(("typ", "$ref", "minLength", "items", "é", "name"))] = container.pop(key)
    elif action == 5:
        container[key] = DEEP
    elif isinstance(container[key], str):
        text = container[key]
        cut = drawn.randrange(len(text) + 1)
        container[key] = text[:cut] + drawn.choice(("\\", "{", '"', "]", "\n", "<tool_call>", "é")) + text[cut:]


def body_of(number: int, seed: int) -> bytes:
    drawn = random.Random(f"{seed} {number}")
    request = copy.deepcopy(drawn.choice(REQUESTS))
    for _ in range(drawn.choice((1, 1, 2, 5))):
        mutate(request, drawn)
    if drawn.random() < 0.2:
        request["stream"] = True
    levels, (begin, end) = drawn.choice((3, 60, 400, 3_000)), drawn.choice(LEVELS)
    body = json.dumps(request).replace(json.dumps(DEEP), begin * levels + "{}" + end * levels).encode()
    if drawn.random() < 0.03:
        cut = drawn.randrange(len(body))
        body = drawn.choice((body[:cut], body[:cut] + b"\xff" + body[cut:]))
    return body


@pytest.mark.timeout(SECONDS)
@in_a_loop
async def test_damaged_requests_are_answered_or_refused(seed: int, tmp_path: Path) -> None:
    model = str(write_llama(tmp_path))
    options: dict[str, Any] = {"model": model, "simulated": None, "api_server_count": 1, "max_num_seqs": 16}
    options |= {"num_gpu_blocks_override": 512, "max_model_len": 512}
    async with run_server(LIMITS, **options) as served:
        roles = ("server", "worker", "core", "output")
        processes = {role: psutil.Process(served.child(role).pid) for role in roles}
        numbers = iter(range(tiers.REQUEST_MUTATIONS))
        statuses: dict[int, int] = {}

        async def ask() -> None:
            for number in numbers:
                body = body_of(number, seed)
                asking = served.exchange("POST", "/v1/chat/completions", body)
                status, answer = await asyncio.wait_for(asking, ANSWER_S)
                about = f"request {number} of seed {seed}: {body[:2000]!r}: {answer[:2000]!r}"
                assert status in (200, 400, 413, 422) and "InternalServerError" not in answer, about
                statuses[status] = statuses.get(status, 0) + 1
                if number == tiers.REQUEST_MUTATIONS // 2:  # the worker has compiled as many grammars as it keeps
                    before.update({role: process.memory_info().rss for role, process in processes.items()})

        before: dict[str, int] = {}
        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        assert {role: served.child(role).pid for role in roles} == {role: each.pid for role, each in processes.items()}
        await served.must_be_empty()
        growth = {role: process.memory_info().rss - before[role] for role, process in processes.items()}
        print(statuses, growth)
        assert min(statuses[200], statuses[400]) > 0.1 * tiers.REQUEST_MUTATIONS, "too few to tell"
        assert max(growth.values()) < GROWTH_NBYTES, growth
