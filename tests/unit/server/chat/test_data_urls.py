"""Bodies with long images: decoded without them, and the same as if they were decoded with them."""

import json
import random
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")

from penstock.server.chat import request_schema
from penstock.server.chat.data_urls import LONG, extract_data_urls
from penstock.server.chat.request_schema import ChatRequest, TokenizeRequest, decoded
from penstock.server.errors import ApiError

URL = "data:image/png;base64," + "iVBORw0KGgo/" * (LONG // 8)
SHORT = URL[:200]


def chat_body(*parts: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **more}).encode()


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


STRICT, LENIENT = request_schema.STRICT[ChatRequest], request_schema.DECODERS[ChatRequest]


def whole(body: bytes) -> ChatRequest:
    """Decoded in one go."""
    try:
        text: ChatRequest = STRICT.decode(body)
    except msgspec.ValidationError:  # there may be unknown fields
        text = LENIENT.decode(body)
    return text


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all that goes through a decoder."""
    observed: list[int] = []

    class Decoder:
        def __init__(self, kind: type[msgspec.Struct]) -> None:
            self._decode = msgspec.json.Decoder(kind).decode

        def decode(self, body: bytes) -> Any:
            observed.append(len(body))
            return self._decode(body)

    monkeypatch.setattr(request_schema, "DECODERS", {kind: Decoder(kind) for kind in (ChatRequest, TokenizeRequest)})
    monkeypatch.setattr(
        request_schema,
        "STRICT",
        {kind: Decoder(request_schema.STRICT[kind].type) for kind in (ChatRequest, TokenizeRequest)},
    )
    return observed


def test_the_decoder_sees_nothing_of_long_images(lengths: list[int]) -> None:
    body = chat_body(text("what is"), image(), image(SHORT), image(URL + "AAAA"), text("?"), max_tokens=3)
    assert decoded(body, ChatRequest) == whole(body)
    assert decoded(bytearray(body), ChatRequest) == whole(body)
    decoded(body, TokenizeRequest)
    assert max(lengths) < 2000


def test_a_slash_may_be_written_with_a_backslash(lengths: list[int]) -> None:
    body = chat_body(image(), text("/")).replace(b"/", b"\\/").replace(b"data:image\\/", b"data:image/")
    assert decoded(body, ChatRequest) == whole(body) == whole(chat_body(image(), text("/")))
    assert max(lengths) < 2000


@pytest.mark.parametrize(
    "body",
    [
        chat_body(text(URL)),
        chat_body(text(f'"{URL}"')),
        chat_body(text(f'\\"{URL}')),
        chat_body(text("a"), image(), chat_template_kwargs={"picture": URL}),
        chat_body(text("a"), image(), user="x", unknown=[URL, {URL: URL}]),
        chat_body(image("x" + URL), image(URL + "\x00"), image(URL + "é"), image(URL + "\\")),
        chat_body(image(URL + '"')),
        chat_body(image(), text("data:image/"), text('"data:image/')),
    ],
)
def test_data_url_outside_of_an_image_field_is_left_unchanged(body: bytes) -> None:
    assert decoded(body, ChatRequest) == whole(body)


@pytest.mark.parametrize(
    "body",
    [
        chat_body(image())[:-1],
        chat_body(image())[: len(URL) // 2],
        chat_body(image()).replace(b'iVBORw0KGgo/"', b'iVBORw0KGgo/"x'),
        b'{"messages":[], "a": "' + URL.encode() + b'"' + URL.encode() + b'"}',
        chat_body(image(), n="two"),
        URL.encode(),
        b'"' + URL.encode() + b'"',
    ],
)
def test_error_with_extracted_urls_has_the_position_in_the_whole_body(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError) as expected:
        whole(body)
    with pytest.raises(ApiError) as result:
        decoded(body, ChatRequest)
    assert result.value.message == request_schema.body_error(expected.value).message


def test_no_client_can_write_a_mark() -> None:
    (first,), (second,) = (extract_data_urls(chat_body(image()))[1] for _ in range(2))
    assert first != second and len(first) > 32


def test_bodies_of_all_kinds_are_decoded_as_if_in_one() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    makers = (
        lambda: image(),
        lambda: image(URL[: chance.randrange(len(URL))]),
        lambda: image(SHORT),
        lambda: text('"' * chance.randrange(5) + "\\" * chance.randrange(5) + chance.choice([URL, SHORT, "é"])),
    )
    for _ in range(100):
        body = chat_body(*(chance.choice(makers)() for _ in range(chance.randrange(1, 8))))
        body = body.replace(b'"url": "', chance.choice([b'"url": "', b'"url":"', b'"url" :\n"']))
        assert decoded(body, ChatRequest) == whole(body), seed


def test_long_videos_are_cut_out_as_images_are(lengths: list[int]) -> None:
    url = "data:video/mp4;base64," + "AAAAGGZ0eXBt" * (LONG // 8)
    body = chat_body(image(), {"type": "video_url", "video_url": {"url": url}}, text("what?"))
    (message,) = decoded(body, ChatRequest).messages
    assert isinstance(message.content, list)
    kinds = [type(part).__name__ for part in message.content]
    assert kinds == ["ImagePart", "VideoPart", "TextPart"]
    first, second = message.content[:2]
    assert isinstance(first, request_schema.ImagePart) and first.image_url.url == URL
    assert isinstance(second, request_schema.VideoPart) and second.video_url.url == url
    assert lengths and max(lengths) < 1000, "the decoder has seen neither"
