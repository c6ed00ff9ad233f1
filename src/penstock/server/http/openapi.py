"""`/openapi.json`: the server's routes as an OpenAPI document.

Requests are described from the structs that decode them and the tables of `request_fields`, so a range that is
documented is the range that is checked. `response_schema` describes the answers.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.server.chat import request_fields, response_schema
from penstock.server.chat.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.server.chat.request_schema import (
    DECODERS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from penstock.server.errors import RETRIED
from penstock.server.http.dashboard import DashboardData
from penstock.server.messages.messages_request import CountTokensRequest, MessagesRequest
from penstock.server.options import ServerOptions
from penstock.server.responses.responses_request import ResponsesRequest
from penstock.server.status.history import HistoryView

PATH = "/openapi.json"
SCHEMAS = "#/components/schemas/"
JSON, EVENTS, METRICS, PAGE = "application/json", "text/event-stream", "text/plain", "text/html"
KEY = "key"  # the name of the security scheme

REFUSALS = {
    400: "the request is invalid; `param` is the field",
    401: "no API key, or an invalid one",
    404: "not found",
    408: "the body did not arrive in time",
    413: "the body is too long",
    429: "too many requests are open: `Retry-After` says when to send it again",
    500: "the server has failed",
    503: "no engine can answer now: send the request again",
}
TO_THE_DASHBOARD = {"description": "the dashboard", "headers": {"Location": {"schema": {"const": "/dashboard"}}}}
OF_A_BODY = tuple(REFUSALS)
OF_A_QUESTION = (401, 500)


def route(options: ServerOptions) -> Route:
    """Returns the route of the document, which is built at the first request and does not change after it."""
    document = functools.cache(lambda: msgspec.json.encode(documented(options)))
    assert penstock.__version__  # found now: an upgrade may replace the package while the server runs

    async def document_response(request: Request) -> Response:
        return Response(document(), media_type=JSON)

    return Route(PATH, document_response, methods=["GET"])


def documented(options: ServerOptions) -> dict[str, Any]:
    kinds = (*DECODERS, DashboardData, HistoryView, *response_schema.ALL)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    for kind in DECODERS:
        schemas[kind.__name__]["properties"] = request_fields.properties() | schemas[kind.__name__]["properties"]
    for kind, name in ((ChatRequest, "top_logprobs"), (CompletionRequest, "logprobs")):
        _set_maximum(schemas[kind.__name__]["properties"][name], options.max_logprobs)
    return {
        "openapi": "3.1.0",
        "servers": [{"url": options.root_path or "/"}],
        "info": {
            "title": "Penstock",
            "version": penstock.__version__,
            "description": "OpenAI's API. Fields that are not named here are ignored; the answer names them in its "
            f"header {request_fields.HEADER}.",
        },
        "paths": _paths(bool(options.api_keys)),
        "components": {
            "schemas": schemas,
            "securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _set_maximum(schema: dict[str, Any], maximum: int) -> None:
    for variant in schema["anyOf"]:
        if variant.get("type") == "integer":
            variant["maximum"] = maximum


def _paths(has_keys: bool) -> dict[str, Any]:
    security: list[Any] = [{KEY: []}] if has_keys else []

    def post(
        summary: str, kind: type, answer: type, chunk: type | None = None, error: type = response_schema.ErrorResponse
    ) -> dict[str, Any]:
        content = {JSON: _schema(answer)} | ({} if chunk is None else {EVENTS: _events(chunk)})
        return {
            "summary": summary,
            "operationId": kind.__name__,
            "security": security,
            "requestBody": {"required": True, "content": {JSON: _schema(kind)}},
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_refusals(*OF_A_BODY, error=error),
            },
        }

    def get(summary: str, answer: type | str, *refusals: int, is_open: bool = False, path: str = "") -> dict[str, Any]:
        """`answer`: the schema's class, or the media type of a text. `path`: a parameter in the path."""
        parameter = {"name": path, "in": "path", "required": True, "schema": {"type": "string"}}
        text = {"schema": {"type": "object" if answer == JSON else "string"}}
        content = {answer: text} if isinstance(answer, str) else {JSON: _schema(answer)}
        return {
            "summary": summary,
            "security": [] if is_open else security,
            **({"parameters": [parameter]} if path else {}),
            "responses": {"200": {"description": "what is known", "content": content}, **_refusals(*refusals)},
        }

    def health(summary: str, answer: type) -> dict[str, Any]:
        operation = get(summary, answer, is_open=True)
        unready = {"description": "no group serves, or the server is about to end", "content": {JSON: _schema(answer)}}
        return {**operation, "responses": {**operation["responses"], "503": unready}}

    model = get("One model", response_schema.ModelCard, 404, *OF_A_QUESTION, path="name")
    answers = response_schema
    responses = post("Create a response", ResponsesRequest, answers.ResponseObject, answers.ResponseEvent)
    messages = post(
        "Create a message", MessagesRequest, answers.MessageObject, answers.MessageEvent, answers.MessageError
    )
    count = post("The tokens of messages", CountTokensRequest, answers.TokenCount, error=answers.MessageError)
    count_input = post("The tokens of a response's input", ResponsesRequest, answers.ResponseTokenCount)
    chat = post("Continue a conversation", ChatRequest, response_schema.ChatCompletion, response_schema.ChatChunk)
    completion = post(
        "Continue a text", CompletionRequest, response_schema.TextCompletion, response_schema.CompletionChunk
    )
    embeddings = post("Vectors of texts", EmbeddingRequest, response_schema.EmbeddingResponse)
    score = post("Scores of pairs of texts", ScoreRequest, response_schema.ScoreResponse)
    rerank = post("Documents by their scores", RerankRequest, response_schema.RerankResponse)
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/embeddings": {"post": embeddings},
        **{path: {"post": _named(score, path)} for path in ("/score", "/v1/score")},
        **{path: {"post": _named(rerank, path)} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
        "/tokenize": {"post": post("The ids of a text", TokenizeRequest, response_schema.TokenizeResponse)},
        "/detokenize": {"post": post("The text of ids", DetokenizeRequest, response_schema.DetokenizeResponse)},
        "/version": {"get": get("The version", response_schema.ServerVersion, is_open=True)},
        "/load": {"get": get("Open requests", response_schema.ServerLoad, *OF_A_QUESTION)},
        "/ping": {method: health("As /health/ready", response_schema.Readiness) for method in ("get", "post")},
        "/v1/models": {"get": get("All models", response_schema.ModelList, *OF_A_QUESTION)},
        "/v1/models/{name}": {"get": model},
        "/v1/responses": {"post": responses},
        "/v1/responses/input_tokens": {"post": _named(count_input, "/input_tokens")},
        "/v1/responses/{response_id}": {
            "get": get("A stored response", answers.ResponseObject, 400, 404, *OF_A_QUESTION, path="response_id"),
            "delete": get("Delete a response", answers.DeletedResponse, 404, *OF_A_QUESTION, path="response_id"),
        },
        "/v1/responses/{response_id}/input_items": {
            "get": get("Its input", answers.ResponseItemList, 400, 404, *OF_A_QUESTION, path="response_id")
        },
        "/v1/messages": {"post": messages},
        "/v1/messages/count_tokens": {"post": count},
        "/metrics": {"get": get("Counters, as Prometheus reads them", METRICS, *OF_A_QUESTION)},
        "/": {"get": {"summary": "Leads to the dashboard", "security": [], "responses": {"307": TO_THE_DASHBOARD}}},
        "/dashboard/grafana.json": {"get": get("A dashboard for Grafana to import", JSON, is_open=True)},
        "/dashboard": {"get": get("A page that shows what the server does", PAGE, is_open=True)},
        "/dashboard/data": {"get": get("What that page shows now", DashboardData, *OF_A_QUESTION, 503)},
        "/dashboard/history": {"get": get("The last 15 minutes: points and events", HistoryView, *OF_A_QUESTION, 503)},
        "/health": {"get": health("How every process is", response_schema.HealthResponse)},
        "/health/live": {"get": get("Whether this process lives", response_schema.Live, is_open=True)},
        "/health/ready": {"get": health("Whether a request would be answered now", response_schema.Readiness)},
    }


def _named(operation: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns an operation with an id of its own: several paths have it."""
    return {**operation, "operationId": operation["operationId"] + path.title().replace("/", "")}


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": SCHEMAS + kind.__name__}}


def _events(chunk: type) -> dict[str, Any]:
    """Returns the schema of a stream's events: chunks, an error after the first chunk, and [DONE] in some APIs."""
    schema = {"anyOf": [_schema(kind)["schema"] for kind in (chunk, response_schema.ErrorResponse)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    events = [{"properties": {"data": data_schema}} for data_schema in (data, {"const": "[DONE]"})]
    return {"schema": {"type": "object", "required": ["data"], "anyOf": events}}


def _refusals(*statuses: int, error: type = response_schema.ErrorResponse) -> dict[str, Any]:
    """`error`: the form of errors; those of a connection are OpenAI's on all routes."""
    kinds = dict.fromkeys((response_schema.ErrorResponse, error))
    schemas = [_schema(kind)["schema"] for kind in kinds]
    schema = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    again = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return {
        str(status): {
            "description": REFUSALS[status],
            "content": {JSON: schema},
            **({"headers": again} if status in RETRIED else {}),
        }
        for status in statuses
    }
