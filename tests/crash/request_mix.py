"""Requests with every feature that depends on the tokens before: seeds, samples, stop strings, penalties and so on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engine.protocol.sampling_params import SamplingParams
from tests.crash.comparable_requests import Answer, AnyRequest, ClientRequest, HttpRequest, Progress, ask_all
from tests.crash.migrating import Migrating


@dataclass(frozen=True)
class Shape:
    """What the tree's model has: ids below `vocabulary`, `ends` that may end an answer, and `tokens` of an answer."""

    model: str
    vocabulary: int
    ends: tuple[int, ...]
    tokens: tuple[int, int] = (60, 200)
    has_logprobs: bool = False
    has_images: bool = False


FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.3},
    {"stop": True},
    {"n": 3, "temperature": 1.0, "ends": True},
    {"logprobs": 3, "temperature": 0.9},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.0},
    {"ends": True, "min_tokens": 30, "temperature": 1.1},
    {"repetition_penalty": 1.3},
    {"n": 2, "stop": True, "temperature": 1.2},
    {"stop": True, "include_stop_str_in_output": True, "temperature": 0.8, "logprobs": 1},
    {"prompts": 2, "n": 2, "temperature": 1.0},
    {"skip_special_tokens": False, "top_p": 0.9, "top_k": 40, "temperature": 1.5, "priority": 1},
    {"stop": True, "min_tokens": 40},
)
WAYS = ("stream", "client", "whole", "chat stream", "client", "chat whole")


class Mix:
    """Requests with every feature in every way, from a seed. Each has a prompt of its own."""

    def __init__(self, shape: Shape, seed: int, images: Sequence[str] = ()) -> None:
        """`images`: data URLs, for chats of a model that takes images."""
        self._shape = shape
        self._random = random.Random(seed)
        self._images = images
        self._number = 0

    async def requests(self, engine: Migrating, count: int) -> list[AnyRequest]:
        """Stop strings are pieces of the answers without them, so those are asked first."""
        drafts = [self._request() for _ in range(count)]
        with_stop = [(at, request) for at, (request, has_stop) in enumerate(drafts) if has_stop]
        answers = await ask_all(engine, [request for _, request in with_stop], "scout", Progress())
        requests = [request for request, _ in drafts]
        for (at, request), answer in zip(with_stop, answers, strict=True):
            requests[at] = self._with_stop(request, answer)
        self._random.shuffle(requests)
        return requests

    def _request(self) -> tuple[AnyRequest, bool]:
        features = dict(FEATURES[self._number % len(FEATURES)])
        way = WAYS[self._number % len(WAYS)] if self._number < len(WAYS) else self._random.choice(WAYS)
        self._number += 1
        has_stop = features.pop("stop", False)
        if features.pop("ends", False):
            features["stop_token_ids"] = list(self._shape.ends)
        if not self._shape.has_logprobs:
            features.pop("logprobs", None)
        features["max_tokens"] = self._random.randint(*self._shape.tokens)
        features["seed"] = self._random.getrandbits(40)
        features.setdefault("temperature", 0)
        if way == "client":
            return self._client_request(features), has_stop
        return self._http_request(way, features), has_stop

    def _client_request(self, features: dict[str, Any]) -> ClientRequest:
        features.pop("prompts", None)
        priority = features.pop("priority", 0)
        features["stop_token_ids"] = tuple(features.pop("stop_token_ids", ()))
        ids = [self._random.randrange(self._shape.vocabulary) for _ in range(self._random.randint(1, 60))]
        return ClientRequest(ids, SamplingParams(ignore_eos=not features["stop_token_ids"], **features), priority)

    def _http_request(self, way: str, features: dict[str, Any]) -> HttpRequest:
        texts = [self._text() for _ in range(features.pop("prompts", 1))]
        body: dict[str, Any] = {"model": self._shape.model, "ignore_eos": "stop_token_ids" not in features, **features}
        if "stream" in way:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if "chat" not in way:
            return HttpRequest("/v1/completions", {**body, "prompt": texts if len(texts) > 1 else texts[0]})
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        content: Any = " ".join(texts)
        if self._images:
            urls = self._random.sample(list(self._images), self._random.randint(1, min(2, len(self._images))))
            content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content.append({"type": "text", "text": " ".join(texts)})
        return HttpRequest("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]})

    def _text(self) -> str:
        return "".join(self._random.choices("abcdefghij  é", k=self._random.randint(1, 60)))

    def _with_stop(self, request: AnyRequest, answer: Answer) -> AnyRequest:
        """Adds a stop string that the answer has in its second half, and one that it does not have."""
        assert not answer.error, answer.error
        text = answer.choices[0].text
        text = text.encode(errors="surrogateescape").decode(errors="ignore")
        middle = self._random.randint(len(text) // 3, max(len(text) // 3, len(text) - 3))
        middle_text = text[middle : middle + self._random.randint(2, 5)]
        stop = [
            stop_string for stop_string in (middle_text, "nowhere in it") if stop_string and "\ufffd" not in stop_string
        ]
        if isinstance(request, HttpRequest):
            return HttpRequest(request.path, {**request.body, "stop": stop})
        params = msgspec.structs.replace(request.params, stop=tuple(stop))
        return ClientRequest(request.prompt, params, request.priority, request.images)
