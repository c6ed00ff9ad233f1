"""Structured outputs through the server. The model is random, so only the masks make an answer right."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

for library in ("openai", "httptools", "torch", "llguidance", "jsonschema_rs"):
    pytest.importorskip(library)

import jsonschema_rs  # noqa: E402
import psutil  # noqa: E402

from tests.e2e.schema_cases import HONOURED, REFUSED  # noqa: E402
from tests.e2e.test_server import Served, refused, run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.tiny_models import LLAMA, write_llama  # noqa: E402

TEST = "hi"
LIMITS = {"max_open_requests": 256, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}


async def chat(served: Served, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in ("max_tokens", "temperature", "seed", "n", "stream") if name in fields}
    messages = [{"role": "user", "content": TEST}]
    return await served.client.chat.completions.create(
        model=LLAMA, messages=messages, extra_body=fields, **{"max_tokens": 600, **own}
    )


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def importers() -> list[int]:
    """Returns the pids of all processes of the server that have imported llguidance."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "/llguidance/" in Path(f"/proc/{child.pid}/maps").read_text()]


async def library_is_imported_at_the_first_grammar(served: Served) -> None:
    await chat(served, max_tokens=2)
    assert importers() == []
    await chat(served, guided_regex="a")
    assert len(importers()) == 2, "a server and a worker"


async def schemas_of_each_keyword_are_followed(served: Served) -> None:
    answers = await asyncio.gather(
        *(chat(served, **of_schema(schema), temperature=1.0, seed=seed) for schema in HONOURED for seed in range(2))
    )
    schemas = [schema for schema in HONOURED for _ in range(2)]
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            continue
        ended += 1
        value = json.loads(choice.message.content)
        assert jsonschema_rs.is_valid(schema, value, validate_formats=True), (schema, choice.message.content)
    assert ended > 0.95 * len(schemas), f"{ended} of {len(schemas)} ended"


async def each_field_has_its_grammar(served: Served) -> None:
    boolean = {"type": "boolean"}
    tag = {"structures": [{"begin": "<f>", "schema": boolean, "end": "</f>"}], "triggers": ["<f"]}
    for fields, pattern in (
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json": boolean}}, "true|false"),
        ({"structured_outputs": {"json": json.dumps(boolean)}}, "true|false"),
        ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, "[0-9]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", 'no "way"\n']}}, 'yes|no "way"\n'),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" x\nx ::= [0-9] [0-9]'}}, "a|b[0-9][0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" /[0-9]{2}/'}}, "a|b[0-9][0-9]"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"structured_outputs": {"structural_tag": tag}}, ".*"),
        ({"response_format": {"type": "structural_tag", **tag}}, ".*"),
        ({"guided_json": boolean}, "true|false"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["x", "y"]}, "x|y"),
        ({"guided_grammar": 'root ::= "q" [0-9]'}, "q[0-9]"),
        ({"regex": "a{2,5}"}, "a{2,5}"),
        ({"json_schema": json.dumps(boolean)}, "true|false"),
        ({"ebnf": 'root ::= "e" [a-c]'}, "e[a-c]"),
        ({"regex": ""}, ".*"),
    ):
        choice = (await chat(served, **fields, max_tokens=200, temperature=1.0, seed=3)).choices[0]
        if choice.finish_reason != "length":
            assert re.fullmatch(pattern, choice.message.content, re.DOTALL), (fields, choice.message.content)
        else:
            assert pattern in (".*", r"\{.*\}"), fields


async def samples_streams_and_log_probabilities_follow_too(served: Served) -> None:
    whole = await chat(served, guided_regex="[0-9]{2,30}x", n=3, temperature=1.0, seed=5, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3 and all(re.fullmatch("[0-9]{2,30}x", text) for text in texts)
    streamed = ["", "", ""]
    async for event in await chat(served, guided_regex="[0-9]{2,30}x", n=3, temperature=1.0, seed=5, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == texts
    entries = whole.choices[0].logprobs.content
    likeliest = [entry.top_logprobs[0].token for entry in entries]
    assert any(not re.fullmatch("[0-9x]", token) for token in likeliest), "not the model's own probabilities"


async def what_cannot_be_honoured_is_refused_with_its_path(served: Served) -> None:
    for schema, path in REFUSED:
        with refused("BadRequestError") as caught:
            await chat(served, guided_json=schema)
        assert caught.value.param == "guided_json" + path, (str(schema)[:200], caught.value.message)
    for fields in (
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": r"(a)\1"},
        {"regex": r"[^\s\S]"},
        {"ebnf": "root ::= nowhere"},
        {"structured_outputs": {"grammar": "start: <|nowhere|>"}},
        {"regex": "a" * 200_000},
    ):
        with refused("BadRequestError") as caught:
            await chat(served, **fields)
        assert caught.value.param == next(iter(fields)) or caught.value.param.startswith("structured_outputs")


async def hostile_grammars_get_an_answer_or_a_refusal(served: Served) -> None:
    """Neither server nor worker dies, and a stream beside the grammars goes on."""
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    beside = asyncio.ensure_future(chat(served, guided_regex="[0-9]{300}", max_tokens=400))
    for fields in (
        of_schema({"type": "string", "minLength": 10**6}),
        of_schema({"type": "array", "minItems": 10**6, "items": {}}),
        of_schema({"type": "object", "properties": properties, "required": [*properties]}),
        of_schema({"enum": [f"value {number}" for number in range(6000)]}),
        of_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        {"regex": "((a{1,500}){1,500}){1,500}"},
        {"regex": "(.*a){20}"},
        {"structured_outputs": {"choice": [f"choice {number}" for number in range(1000)]}},
        {"structured_outputs": {"grammar": 'start: a\na: a a | "x" | ""'}},
    ):
        try:
            await asyncio.wait_for(chat(served, **fields, max_tokens=60, temperature=1.0), 30)
        except Exception as error:
            assert getattr(error, "status_code", None) == 400, (fields, error)
    answer = await beside
    assert re.fullmatch("[0-9]{300}", answer.choices[0].message.content)
    assert (await chat(served, max_tokens=2)).choices[0].finish_reason == "length"


SCENES = [
    library_is_imported_at_the_first_grammar,
    schemas_of_each_keyword_are_followed,
    each_field_has_its_grammar,
    samples_streams_and_log_probabilities_follow_too,
    what_cannot_be_honoured_is_refused_with_its_path,
    hostile_grammars_get_an_answer_or_a_refusal,
]


@in_a_loop
async def test_structured_outputs_follow_their_grammars(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    async with run_server(LIMITS, model=str(model), simulated=None, api_server_count=1, max_num_seqs=64) as served:
        for scene in SCENES:
            await scene(served)
            print("passed:", scene.__name__, file=sys.stderr)


@in_a_loop
async def test_grammar_without_a_tokenizer_is_refused() -> None:
    async with run_server(LIMITS, api_server_count=1) as served:
        with refused("BadRequestError") as caught:
            await served.client.completions.create(model="simulated", prompt="x", extra_body={"regex": "a"})
        assert caught.value.param == "regex"
