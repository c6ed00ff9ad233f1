"""What a request may say, what is made of it, and in which words it is refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from penstock.engine.client.stream import EngineError
from penstock.engine.media.media_kind import IMAGE, VIDEO
from penstock.engine.protocol.config import SamplingDefaults
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.grammar_fields import GrammarSource
from penstock.server.chat.request_schema import (
    DECODERS,
    ChatRequest,
    CompletionRequest,
    Conversation,
    TokenizeRequest,
    decoded,
)
from penstock.server.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**output: Any) -> CompletionRequest:
    return decoded(json.dumps({"prompt": "x", **output}).encode(), CompletionRequest)


def chat(**output: Any) -> ChatRequest:
    return decoded(json.dumps({**CHAT, **output}).encode(), ChatRequest)


def test_missing_fields_have_the_defaults_of_openai() -> None:
    assert completion().sampling() == SamplingParams(max_tokens=16)
    assert chat().sampling() == SamplingParams(max_tokens=None)


def test_defaults_of_the_model_are_used_where_a_request_gives_none() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=100).explicit
    of_the_model = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert chat().sampling(defaults) == SamplingParams(max_tokens=100, **of_the_model)
    assert chat(max_tokens=200, top_p=1).sampling(defaults) == SamplingParams(
        max_tokens=200, **{**of_the_model, "top_p": 1.0}
    )
    # A completion has OpenAI's own default of 16 tokens, as in vLLM.
    assert completion(temperature=0).sampling(defaults) == SamplingParams(
        max_tokens=16, **{**of_the_model, "temperature": 0.0}
    )


def test_null_fields_are_missing_and_unknown_fields_are_ignored() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    assert completion(**dict.fromkeys(names), metadata={"a": 1}, store=True).sampling() == SamplingParams()


def test_every_sampling_field_reaches_the_sampling_parameters() -> None:
    output = {"n": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "seed": -5}
    output |= {
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "stop": "end",
        "stop_token_ids": [5],
        "min_tokens": 2,
    }
    output |= {
        "ignore_eos": True,
        "logit_bias": {"7": -100},
        "allowed_token_ids": [7, 8],
        "logprobs": 3,
        "max_tokens": 9,
    }
    output |= {"skip_special_tokens": False, "include_stop_str_in_output": True}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in output.items()}
    values |= {"stop": ("end",), "logit_bias": ((7, -100.0),)}
    assert completion(**output).sampling() == SamplingParams(**values)
    assert completion(stop=["a", "b"]).sampling().stop == ("a", "b")
    assert completion(top_k=-1).sampling().top_k == 0
    assert completion(stream_options={"include_usage": True}).includes_usage and not completion().includes_usage


def test_chat_fields_max_completion_tokens_and_top_logprobs_are_used() -> None:
    assert chat(max_tokens=5).sampling().max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).sampling().max_tokens == 6
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling().logprobs == 4
    assert chat(logprobs=False).sampling().logprobs is None


def test_a_whole_number_may_be_written_with_a_point() -> None:
    result = completion(max_tokens=10.0, n=2.0, seed=-5.0, top_k=1e1, logprobs=3.0, min_tokens=0.0).sampling()
    assert result == SamplingParams(max_tokens=10, n=2, seed=-5, top_k=10, logprobs=3)
    assert chat(max_completion_tokens=3.0, top_logprobs=2.0, logprobs=True).sampling().max_tokens == 3
    assert type(result.max_tokens) is int
    long = completion(prompt="x" * 200_000, max_tokens=10.0)
    assert long.max_tokens == 10 and len(long.prompts()[0]) == 200_000


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 10.5}, "max_tokens", "expected int"),
        ({"max_tokens": 0.0}, "max_tokens", "1 or more"),
        ({"max_tokens": 1e300}, "max_tokens", "expected int"),
        ({"max_tokens": 10.0, "n": "5"}, "n", "expected int"),
        ({"max_tokens": "10.0"}, "max_tokens", "expected int"),
        ({"max_tokens": "5"}, "max_tokens", "expected int"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"temperature": 1e7}, "temperature", "<= 1000000"),
        ({"top_p": 0}, "top_p", "> 0.0"),
        ({"min_tokens": 17}, "min_tokens", "up to max_tokens (16)"),
        ({"n": 129}, "n", "<= 128"),
        ({"seed": 1 << 63}, "seed", "at $.seed"),
        ({"stop": ["", "a"]}, "stop[0]", ">= 1"),
        ({"stop": ["a"] * 65}, "stop", "<= 64"),
        ({"stop": "a" * 1025}, "stop", "<= 1024"),
        ({"user": "a" * 1025}, "user", "<= 1024"),
        ({"logit_bias": {str(index): 0 for index in range(1025)}}, "logit_bias", "<= 1024"),
        ({"stop": [1]}, "stop[0]", "expected str"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected int, got str"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ">= 0"),
        ({"logit_bias": {"1000000000": 1}}, "logit_bias", "<= 999999999"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": [1]}, "logit_bias", "expected object"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "expected bool"),
        ({"stream_options": {"include_usage": False}}, "stream_options", "expected stream: true"),
        ({"echo": True, "prompt_embeds": "x"}, "echo", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"prompt": {}}, "prompt", "expected str"),
        ({"prompt": [1.5]}, "prompt[0]", "got float"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]", ">= 0"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields).sampling()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1025}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"regex": "a", "structured_outputs": {"json_object": True}}, "regex"),
        ({"structured_outputs": {"json": "{}", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"ebnf": "root ::= a", "min_tokens": 2, "max_tokens": 4}, "min_tokens"),
        ({"json_schema": "{}", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_a_chat_that_makes_no_sense_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        request = chat(**fields)
        request.answer_grammar(request.sampling())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_structured_outputs_may_have_the_defaults_of_vllm() -> None:
    defaults: dict[str, Any] = dict.fromkeys(("disable_fallback", "disable_any_whitespace"), False)
    defaults |= {"disable_additional_properties": False, "whitespace_pattern": None, "json": None}
    request = chat(structured_outputs={"regex": "a", **defaults})
    assert request.answer_grammar(request.sampling()) == GrammarSource("regex", "a", "structured_outputs.regex")


def test_options_of_a_stream_need_a_stream() -> None:
    assert completion(stream_options={}).sampling() == completion(stream_options=None).sampling()
    assert completion(stream_options={"include_usage": True}, stream=True).includes_usage


def test_prompts_are_one_or_many_texts_or_lists_of_ids() -> None:
    for prompt, expected in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ):
        assert completion(prompt=prompt).prompts() == expected
    for prompt in ([], ["a", 1], [[1], "a"], [1, [1]]):
        with pytest.raises(ApiError) as caught:
            completion(prompt=prompt).prompts()
        assert caught.value.param == "prompt"


def test_templates_get_positions_of_images_and_images_go_separately() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    other = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
    output = chat(
        messages=[
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [text, image, text]},
            {"role": "assistant"},
            {"role": "user", "content": [other]},
        ]
    )
    messages, images, _ = Conversation.of(output.messages)
    assert messages == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [text, {"type": "image"}, text]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    assert images == [("messages[1].content[1]", "http://x/y.png", IMAGE), ("messages[3].content[0]", "data:,", IMAGE)]


def test_videos_stand_beside_images_in_their_order() -> None:
    image, video = ({"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}"}} for kind in ("image", "video"))
    body = json.dumps({"messages": [{"role": "user", "content": [video, image, video]}]}).encode()
    messages, media, _ = Conversation.of(decoded(body, ChatRequest).messages)
    assert messages == [{"role": "user", "content": [{"type": "video"}, {"type": "image"}, {"type": "video"}]}]
    assert [(ref.where[-3:], ref.url, ref.kind) for ref in media] == [
        ("[0]", "data:video", VIDEO),
        ("[1]", "data:image", IMAGE),
        ("[2]", "data:video", VIDEO),
    ]


@pytest.mark.parametrize(
    "part", [{"type": "video_url"}, {"type": "video_url", "video_url": "data:,"}, {"type": "video", "video": "x"}]
)
def test_a_part_that_is_no_video_is_refused_with_its_place(part: dict[str, Any]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(ApiError, match=r"at \$\.messages"):
        decoded(body, ChatRequest)


def test_tokens_are_of_a_text_or_of_messages_and_not_of_both() -> None:
    assert decoded(b'{"prompt": "a"}', TokenizeRequest).content() == "a"
    assert decoded(json.dumps(CHAT).encode(), TokenizeRequest).content() == (
        [{"role": "user", "content": "hi"}],
        [],
        [],
    )
    for body in (b"{}", json.dumps({**CHAT, "prompt": "a"}).encode()):
        with pytest.raises(ApiError):
            decoded(body, TokenizeRequest).content()


@given(
    st.binary()
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda item: json.dumps(item).encode())
)
@example(b"0.0")
def test_any_bytes_are_understood_or_refused_with_400(body: bytes) -> None:
    for kind in DECODERS:
        try:
            decoded(body, kind)
        except ApiError as error:
            assert error.status == 400


@given(
    st.fixed_dictionaries(
        {"prompt": st.text() | st.lists(st.integers() | st.text() | st.lists(st.integers()))},
        optional={
            name: st.none() | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.text()
            for name in CompletionRequest.__struct_fields__
            if name != "prompt"
        },
    )
)
def test_any_values_are_understood_or_refused_with_400(fields: dict[str, Any]) -> None:
    try:
        request = decoded(msgspec.json.encode(fields), CompletionRequest)
        request.sampling()
        request.prompts()
    except ApiError as error:
        assert error.status == 400 and error.param


def test_an_error_has_the_form_that_clients_know() -> None:
    error = ApiError(400, "wrong", param="n")
    assert json.loads(error.body) == {
        "error": {"message": "wrong", "type": "invalid_request_error", "param": "n", "code": "invalid_request_error"}
    }
    for status, kind in ((401, "authentication_error"), (429, "rate_limit_error"), (503, "server_error")):
        assert json.loads(ApiError(status, "x").body)["error"]["type"] == kind


def test_retry_after_is_sent_with_429_and_503_alone() -> None:
    assert ApiError.of(EngineError(503, "no group serves")).response().headers["retry-after"] == "1"
    for status in (429, 503):
        assert ApiError(status, "x").response().headers["retry-after"] == "1"
    assert "retry-after" not in ApiError(400, "x").response().headers
    assert "retry-after" not in ApiError.of(EngineError(400, "too long")).response().headers


def test_an_error_that_is_not_the_clients_doing_names_its_request() -> None:
    assert ApiError.of(EngineError(503, "gone"), "abc").message == "gone (request abc)"
    assert ApiError.of(EngineError(400, "too long"), "abc").message == "too long"


def test_error_shortens_a_long_value_and_keeps_its_begin_and_end() -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "x" * 100_000, "content": ""}])
    assert len(caught.value.body) < 3000 and caught.value.param == "messages[0].role"
    assert caught.value.message.startswith("invalid enum value 'xxx")
    assert caught.value.message.endswith("xxx' at $.messages[0].role")
