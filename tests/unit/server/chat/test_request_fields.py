"""Which fields of a request are honoured, refused, ignored and unknown; and that the documents say the same."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.server.chat.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.server.chat.request_fields import (
    IGNORED,
    MAX_NAMES,
    MAX_REMEMBERED,
    NEUTRAL_ONLY,
    UnknownFields,
    is_neutral,
)
from penstock.server.chat.request_schema import (
    DECODERS,
    FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decoded,
)
from penstock.server.errors import ApiError
from penstock.server.http import openapi
from penstock.server.messages.messages_request import CountTokensRequest, MessagesRequest
from penstock.server.options import ServerOptions
from penstock.server.responses.responses_request import ResponsesRequest

SERVE = Path(__file__).parents[4] / "docs/howto/serve.md"
STREAMED = {"stream_options.include_usage", "stream_options.continuous_usage_stats"}  # of each kind in the table
MESSAGES = [{"role": "user", "content": "hi"}]

# As `openai` 2.54 and vLLM's main branch of 2026 name them.
OF_OPENAI = {
    "model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens",
    "metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key",
    "prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier",
    "stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity",
    "web_search_options messages prompt best_of echo suffix",
}
OF_VLLM = {
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template",
    "continue_final_message documents ec_transfer_params ignore_eos include_reasoning include_stop_str_in_output",
    "kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority",
    "prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs",
    "return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start",
    "session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs",
    "thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking",
    "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern",
    "logits_processors chat_template_kwargs",
}


def body_of(kind: type, **fields: Any) -> bytes:
    needed = {
        ChatRequest: {"messages": MESSAGES},
        CompletionRequest: {"prompt": "x"},
        TokenizeRequest: {"prompt": "x"},
        DetokenizeRequest: {"tokens": [1]},
        EmbeddingRequest: {"input": "x"},
        ScoreRequest: {"text_1": "x", "text_2": "y"},
        RerankRequest: {"query": "x", "documents": ["y"]},
        ResponsesRequest: {"input": "x"},
        CountTokensRequest: {"messages": MESSAGES},
        MessagesRequest: {"messages": MESSAGES, "max_tokens": 1},
    }[kind]
    return json.dumps({**needed, **fields}).encode()


def test_every_field_of_openai_and_of_vllm_has_one_place() -> None:
    honoured = FIELDS[ChatRequest] | FIELDS[CompletionRequest]
    partly = {ChatRequest: {"tools", "tool_choice", "parallel_tool_calls"}, TokenizeRequest: {"tools"}}
    partly[CompletionRequest] = {"prompt_embeds", "echo"}
    partly |= {ScoreRequest: {"documents"}, RerankRequest: {"documents"}}
    for name in {*" ".join(OF_OPENAI | OF_VLLM).split()} - set().union(*partly.values()) | {"documents"}:
        assert (name in honoured) + (name in NEUTRAL_ONLY) + (name in IGNORED) == 1, name
    for kind, names in partly.items():
        assert FIELDS[kind] & (NEUTRAL_ONLY.keys() | IGNORED) == names


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("name", NEUTRAL_ONLY)
def test_unsupported_field_is_refused_unless_its_value_is_neutral(kind: type, name: str) -> None:
    if name in FIELDS[kind]:
        return
    unknown: list[str] = []
    for neutral in (None, *NEUTRAL_ONLY[name]):
        decoded(body_of(kind, **{name: neutral}), kind, unknown)
        assert unknown == []
    for value in ("other", 7, ["x"], {"a": 1}):
        with pytest.raises(ApiError, match=f"^{name} is not supported") as caught:
            decoded(body_of(kind, **{name: value}), kind)
        assert (caught.value.status, caught.value.param) == (400, name)


def test_the_refusal_says_which_values_would_pass() -> None:
    for fields, words in (
        ({"functions": [{"name": "f"}]}, "functions is not supported: use tools"),
        ({"function_call": "auto2"}, "function_call is not supported: use tool_choice"),
        ({"modalities": ["audio"]}, 'expected ["text"], or nothing'),
        ({"stop_regex": "a+"}, "stop_regex is not supported"),
    ):
        with pytest.raises(ApiError) as caught:
            decoded(body_of(ChatRequest, **fields), ChatRequest)
        assert words in caught.value.message


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_changes_nothing_is_ignored_whatever_its_value(name: str) -> None:
    outer, _, inner = name.partition(".")
    for value in (None, True, 7, "x", {"a": [1]}):
        unknown: list[str] = []
        decoded(body_of(CompletionRequest, **{outer: {inner: value} if inner else value}), CompletionRequest, unknown)
        assert unknown == []


def test_true_is_not_one_and_false_is_not_zero() -> None:
    assert is_neutral(1.0, (1,)) and not is_neutral(True, (1,))
    assert is_neutral(False, (False,)) and not is_neutral(0, (False,))


def test_unknown_fields_are_returned_also_of_a_body_with_long_images() -> None:
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64," + "A" * 100_000):
        unknown: list[str] = []
        image = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [image]}]
        body = body_of(ChatRequest, messages=messages, max_token=3, stream_options={"include_usge": True}, stream=False)
        result = decoded(body, ChatRequest, unknown)
        assert result.messages[0].content[0].image_url.url == url  # type: ignore[index,union-attr]
        assert unknown == ["max_token", "stream_options.include_usge"]


def test_an_unknown_field_is_named_with_the_nearest_one_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock.engine")
    fields = UnknownFields(FIELDS[ChatRequest])
    for _ in range(3):
        assert fields.describe(["max_token", "zzz"], path="/v1/x") == "max_token (did you mean max_tokens?), zzz"
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert lines == [
        {"field": "max_token", "nearest": "max_tokens", "path": "/v1/x"},
        {"field": "zzz", "nearest": "", "path": "/v1/x"},
    ]


def test_names_of_unknown_fields_fit_a_header_whatever_they_are(caplog: pytest.LogCaptureFixture) -> None:
    names = ["a\r\nset-cookie: b", "ä\U0001f600", "x" * 10_000, "", *map(str, range(MAX_NAMES))]
    output = UnknownFields(()).describe(names)
    assert re.fullmatch(r"[ -~]+", output) and len(output) < 1000 and output.endswith(" and 4 more")
    fields = UnknownFields(())
    for number in range(2 * MAX_REMEMBERED):
        assert fields.describe([f"name{number}"]) == f"name{number}"
    assert len([record for record in caplog.records if "name" in record.fields["field"]]) == MAX_REMEMBERED  # type: ignore[attr-defined]


def test_the_document_lists_every_field_with_what_passes() -> None:
    schemas = openapi.documented(ServerOptions())["components"]["schemas"]
    for kind, names in FIELDS.items():
        listed = schemas[kind.__name__]["properties"]
        tables = NEUTRAL_ONLY.keys() | IGNORED
        assert listed.keys() == {name for name in names | tables if "." not in name}
        for name, neutral in NEUTRAL_ONLY.items():
            assert name in names or listed[name]["enum"] == [None, *neutral]


def test_the_page_on_serving_lists_every_field() -> None:
    rows = dict(re.findall(r"^\| ([a-z ,]+) \| (`.+`) \|$", SERVE.read_text(), re.MULTILINE))
    listed = {title: set(re.findall(r"`([a-z0-9_.]+)`", names)) for title, names in rows.items()}
    assert listed["honoured by both"] == FIELDS[ChatRequest] & FIELDS[CompletionRequest]
    assert listed["honoured by chats"] == FIELDS[ChatRequest] - FIELDS[CompletionRequest]
    assert listed["honoured by completions"] == FIELDS[CompletionRequest] - FIELDS[ChatRequest]
    assert listed["honoured by embeddings"] == FIELDS[EmbeddingRequest] - STREAMED
    assert listed["honoured by score"] == FIELDS[ScoreRequest] - STREAMED
    assert listed["honoured by rerank"] == FIELDS[RerankRequest] - STREAMED
    assert listed["refused"] == NEUTRAL_ONLY.keys()
    assert listed["ignored"] == IGNORED
