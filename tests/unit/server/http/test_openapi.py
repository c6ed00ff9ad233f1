"""The document at /openapi.json: all routes, and the very ranges that are refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette")
pytest.importorskip("jsonschema_rs")  # schemathesis brings it

import jsonschema_rs
from starlette.routing import Route

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.server.chat.prompt_builder import NumberTokenizer, PromptBuilder
from penstock.server.chat.request_schema import ChatRequest, CompletionRequest, decoded
from penstock.server.errors import ApiError
from penstock.server.http import openapi
from penstock.server.http.app import ApiServer
from penstock.server.options import MAX_LOGPROBS, ServerOptions
from penstock.server.status.counters import ServerCounters

DOCUMENT = openapi.documented(ServerOptions(api_keys=("k",), max_logprobs=MAX_LOGPROBS))  # what decoding allows
SCHEMAS = DOCUMENT["components"]["schemas"]
NUMBERS = st.one_of(
    st.sampled_from([-101, -100, -2.001, -2, -1, -1e-9, 0, 1e-7, 1e-6, 0.5, 1, 1.0001, 2, 128, 129, 1e6, 1e7, 1 << 31]),
    st.integers(-(1 << 64), 1 << 64),
    st.floats(allow_nan=False, allow_infinity=False),
)


def validator(kind: type) -> Any:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": {"schemas": SCHEMAS}}
    return jsonschema_rs.Draft202012Validator(schema)


def test_every_route_is_in_the_document_and_no_other() -> None:
    config = EngineConfig(simulated=SimulatedDevice())
    tally, board = ServerCounters(ServerCounters.create(1), 1), StatusBoard(StatusBoard.create(1))
    client: Any = None
    builder = PromptBuilder(config, NumberTokenizer(200))
    api = ApiServer(config, ServerOptions(), client, builder, tally, board, 0)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in api.routes().routes
        if isinstance(route, Route) and route.path != openapi.PATH
        for method in (route.methods or set()) - {"HEAD"}
    }
    output = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert output == routes
    board.close()


def test_document_asks_for_a_key_only_where_one_is_needed() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            # The page is empty without what needs the key.
            pages = "/", "/dashboard", "/dashboard/grafana.json", "/version", "/ping"
            is_open = path in pages or path.startswith("/health")
            assert bool(operation["security"]) == (not is_open), path
            assert ("401" in operation["responses"]) == bool(operation["security"])
    without = openapi.documented(ServerOptions())["paths"]
    assert not any(operation["security"] for methods in without.values() for operation in methods.values())


def test_openapi_document_has_every_schema_that_it_refers_to() -> None:
    def references(item: Any) -> list[str]:
        if isinstance(item, list):
            return [reference for each in item for reference in references(each)]
        if not isinstance(item, dict):
            return []
        return [item[name] for name in ("$ref",) if name in item] + [
            reference for each in item.values() for reference in references(each)
        ]

    result = {reference.removeprefix(openapi.SCHEMAS) for reference in references(DOCUMENT)}
    assert {"ChatRequest", "CompletionRequest", "ErrorResponse", "ChatChunk"} <= result <= SCHEMAS.keys()


def test_document_has_the_limit_of_log_probabilities() -> None:
    schemas = openapi.documented(ServerOptions(max_logprobs=7))["components"]["schemas"]
    assert jsonschema_rs.is_valid(limited := schemas["CompletionRequest"]["properties"]["logprobs"], 7)
    assert not jsonschema_rs.is_valid(limited, 8)


FIELDS = [
    name for name in CompletionRequest.__struct_fields__ if name not in ("prompt", "response_format", "stream_options")
]
RELATED = {"min_tokens", "best_of", "max_tokens"}  # to other fields: no schema says that


@given(
    st.dictionaries(
        st.sampled_from([field for field in FIELDS if field not in RELATED]), NUMBERS, min_size=1, max_size=3
    )
)
@example({"logprobs": 128})
@example({"logprobs": 1025})
def test_server_takes_exactly_the_numbers_that_openapi_allows(fields: dict[str, Any]) -> None:
    body = {"prompt": "x", **fields}
    try:
        decoded(msgspec.json.encode(body), CompletionRequest).sampling()
        is_taken = True
    except ApiError:
        is_taken = False
    assert is_taken == validator(CompletionRequest).is_valid(body), body


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"tools": [{"type": "function"}]}),
        (ChatRequest, {"functions": [{}]}),
        (ChatRequest, {"modalities": ["audio"]}),
        (ChatRequest, {"response_format": {"type": "yaml"}}),
        (ChatRequest, {"structured_outputs": {"pattern": "a+"}}),
        (ChatRequest, {"echo": True}),
        (CompletionRequest, {"guided_whitespace_pattern": " "}),
        (CompletionRequest, {"guided_regex": 7}),
        (CompletionRequest, {"prompt_logprobs": -2}),
        (CompletionRequest, {"logit_bias": {"a": 1}}),
        (CompletionRequest, {"logit_bias": {"1": 101}}),
        (CompletionRequest, {"stop": [""]}),
    ],
)
def test_server_refuses_fields_that_openapi_does_not_allow(kind: type, fields: dict[str, Any]) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    assert not validator(kind).is_valid(body)
    with pytest.raises(ApiError) as caught:
        request = decoded(json.dumps(body).encode(), kind)
        request.answer_grammar(request.sampling())
    assert caught.value.status == 400 and caught.value.param is not None
    assert validator(kind).is_valid({**body, **dict.fromkeys(fields)})


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "functions": None, "modalities": ["text"], "prediction": None},
        {"response_format": {"type": "text"}, "reasoning_effort": "low", "safety_identifier": "x", "echo": False},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "annotations": []}]},
    ],
)
def test_neutral_fields_of_common_clients_are_ignored(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    decoded(json.dumps(body).encode(), ChatRequest).sampling()
    assert validator(ChatRequest).is_valid(body)
