"""How much a body may say: it is counted before a decoder, which blocks the event loop, sees any of it."""

import json
import random
from base64 import b64encode
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")

from penstock.server.chat import json_limits, request_schema
from penstock.server.chat.data_urls import BEGIN_NBYTES, LONG, extract_data_urls
from penstock.server.chat.data_urls import CHUNK as SEARCHED
from penstock.server.chat.json_limits import CHUNK, MAX_NBYTES, MAX_THINGS, MAX_VALUES, check_json_size
from penstock.server.chat.request_schema import ChatRequest, CompletionRequest, decoded
from penstock.server.embeds.embeds_file import NPY, ZIP
from penstock.server.errors import ApiError

CHAT = '{"messages":[{"role":"user","content":"a"}],'


def filled(head: str, item: str, tail: str, nbytes: int) -> bytes:
    """With as many of them as there is room for, or as a list of so many."""
    most = (nbytes - len(head) - len(tail) + 1) // (len(item) + 1)
    return (head + ",".join([item] * most) + tail).encode()


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding anything is a failure."""
    monkeypatch.setattr(request_schema, "DECODERS", {})


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize(
    ("kind", "head", "item", "tail"),
    [
        (ChatRequest, '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
        (ChatRequest, '{"messages":[', '{"role":"user","content":"a"}', "]}"),
        (ChatRequest, CHAT + '"chat_template_kwargs":{"a":[', "[]", "]}}"),
        (ChatRequest, CHAT + '"tools":[', "{}", "]}"),
        (ChatRequest, CHAT + '"unknown":[', "1", "]}"),
        (ChatRequest, CHAT, '"a":1', "}"),
        (CompletionRequest, '{"prompt":"a","stop":[', '"a"', "]}"),
        (CompletionRequest, '{"prompt":"a","logit_bias":{', '"1":1', "}}"),
        (CompletionRequest, '{"prompt":"a","stop_token_ids":[', "1", "]}"),
        (CompletionRequest, '{"prompt":[', "1", "]}"),
        (CompletionRequest, '{"prompt":[[', "1", "]]}"),
        (CompletionRequest, '{"prompt":[', "[]", "]}"),
        (CompletionRequest, '{"prompt":[', '"\\\\"', "]}"),
        (CompletionRequest, '{"prompt":[', '"\\""', "]}"),
    ],
)
def test_a_body_of_very_many_pieces_is_refused_before_it_is_decoded(
    kind: type[msgspec.Struct], head: str, item: str, tail: str
) -> None:
    with pytest.raises(ApiError, match=r"a body has at most \d+ (strings|values)") as caught:
        decoded(filled(head, item, tail, MAX_NBYTES), kind)
    assert caught.value.status == 400
    with pytest.raises(ApiError, match="a body has at most 8388608 bytes besides images") as caught:
        decoded(filled(head, item, tail, 2 * MAX_NBYTES), kind)
    assert caught.value.status == 413


def test_long_bodies_of_few_values_are_accepted() -> None:
    ids = list(range(200_000))
    assert decoded(json.dumps({"prompt": ids}).encode(), CompletionRequest).prompts() == [ids]
    text = 'He said: "[{1, 2, 3}, \\]"\n' * 200_000
    assert decoded(json.dumps({"prompt": text}).encode(), CompletionRequest).prompts() == [text]
    messages = [{"role": "user", "content": "a"}] * 10_000
    assert len(decoded(json.dumps({"messages": messages}).encode(), ChatRequest).messages) == 10_000
    url = "data:image/png;base64," + "iVBORw0KGgo/" * 133_000  # 1.2 MB of it
    parts = [{"type": "image_url", "image_url": {"url": url}}] * 16
    (output,) = decoded(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), ChatRequest).messages
    assert isinstance(output.content, list) and len(output.content) == 16


@pytest.mark.parametrize(("item", "most"), [("[]", MAX_THINGS - 3), ('"a"', MAX_THINGS - 3), ("1", MAX_VALUES + 1)])
def test_json_at_the_limit_is_accepted_and_beyond_is_refused(item: str, most: int) -> None:
    head, tail = '{"a":[', "]}"  # an object, its name and a list
    check_json_size((head + ",".join([item] * most) + tail).encode())
    with pytest.raises(ApiError):
        check_json_size((head + ",".join([item] * (most + 1)) + tail).encode())
    check_json_size(b'"' + b"a" * (MAX_NBYTES - 2) + b'"')
    with pytest.raises(ApiError):
        check_json_size(b'"' + b"a" * (MAX_NBYTES - 1) + b'"')


def things_in(output: Any) -> int:
    if isinstance(output, dict):
        return 1 + sum(1 + things_in(item) for item in output.values())
    if isinstance(output, list):
        return 1 + sum(map(things_in, output))
    return int(isinstance(output, str))


def values_in(output: Any) -> int:
    inside = list(output.values() if isinstance(output, dict) else output if isinstance(output, list) else ())
    return max(len(inside) - 1, 0) + sum(map(values_in, inside))


def test_count_of_values_is_exact_for_random_json(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)

    def text() -> str:
        return "".join(chance.choices('"\\[]{},:/a\né', k=chance.randrange(12)))

    def some(depth: int) -> Any:
        kind = chance.randrange(6 if depth else 4)
        if kind == 4:
            return [some(depth - 1) for _ in range(chance.randrange(6))]
        if kind == 5:
            return {text(): some(depth - 1) for _ in range(chance.randrange(6))}
        return (text(), 7, None, True)[kind]

    for _ in range(200):
        output = some(4)
        body = json.dumps(output, ensure_ascii=chance.random() < 0.5).encode()
        monkeypatch.setattr(json_limits, "CHUNK", chance.randrange(2, 20))
        monkeypatch.setattr(json_limits, "MAX_THINGS", things_in(output))
        monkeypatch.setattr(json_limits, "MAX_VALUES", values_in(output))
        check_json_size(body)
        for name, most in (("MAX_THINGS", things_in(output)), ("MAX_VALUES", values_in(output))):
            with monkeypatch.context() as less, pytest.raises(ApiError):
                less.setattr(json_limits, name, most - 1)
                check_json_size(body)


@pytest.mark.parametrize("body", [b"\\" * (3 * CHUNK + 1), b'"' + b"\\" * (2 * CHUNK), b'{"a":"\\', b"\\"])
def test_invalid_json_is_counted_without_an_error(body: bytes) -> None:
    check_json_size(body)


SAFETENSORS = b"\x80\1\0\0\0\0\0\0{"
HEADS = [b"data:image/png;base64,", *(b64encode(head.ljust(9, b"\0")) for head in (NPY, SAFETENSORS, ZIP))]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shift", range(-BEGIN_NBYTES - 1, 2))
def test_long_string_across_the_end_of_a_search_is_extracted(head: bytes, shift: int) -> None:
    string = head + b"A" * LONG
    body = b" " * (SEARCHED + shift) + b'"' + string + b'"'
    assert list(extract_data_urls(body)[1].values()) == [string.decode()]


def test_error_position_in_a_long_body_says_what_is_not_counted() -> None:
    url = "data:image/png;base64," + "A" * MAX_NBYTES
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]})
    with pytest.raises(ApiError, match=r"\(byte \d+\), long images and embeddings not counted"):
        decoded(f"{body[:-1]}x".encode(), ChatRequest)
    with pytest.raises(ApiError, match=r"expected int \| null, got str at \$\.n"):
        decoded(f'{body[:-1]},"n":"x"}}'.encode(), ChatRequest)
    with pytest.raises(ApiError, match="besides images"):
        decoded(json.dumps({"prompt": url}).encode(), CompletionRequest)
