"""The routes of a server that makes vectors and scores: embeddings, score and rerank.

The engine computes each prompt as a request of its own. A vector lies in the store, where this process reads it; the
chunk of the answer has the handle.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.model_dir import hidden_size_of, pooling_of, second_text_offset
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Floats, SamplingParams
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.chat.pooling_schema import (
    MAX_INPUTS,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.chat.prompt_builder import LONG, PromptBuilder
from penstock.server.chat.prompt_list import separate_prompts
from penstock.server.chat.request_reporter import RequestReporter
from penstock.server.chat.request_schema import Conversation
from penstock.server.chat.streaming import RequestStreams, cancel_on_disconnect, json_response
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.http.endpoint import Admission, Answer, BodyReader, Endpoint, account_of
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, Served

Input: TypeAlias = str | list[int] | tuple[str, str]  # a text, ids, or a pair of texts
ATTEMPTS = 3  # to compute a vector that the store gives up before it is read
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)  # the id that ends a request means nothing
# Of Qwen3-Reranker, as its page and vLLM write it, for a model without a --chat-template.
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    '{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Given a web search query, retrieve relevant passages that answer the query") }}\n<Query>: '
    '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n<Document>: '
    '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
    '<|im_start|>assistant\n<think>\n\n</think>\n\n{{ "" }}'
)


class PoolingRoutes:
    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        client: Client,
        reader: PromptBuilder,
        bodies: BodyReader,
        row: ProcessCounters,
        find_model: Callable[[str | None], tuple[str, bytes]],
        reporter: RequestReporter | None,
    ) -> None:
        """`find_model` returns the name of the model for answers, and the digest of its LoRA adapter (b"": none). It
        raises ApiError for a name that is not served."""
        self._reporter = reporter
        self._config = config
        self._options = options
        self._client = client
        self._reader = reader
        self._bodies = bodies
        self._row = row
        self._find_model = find_model
        self._size = hidden_size_of(config)
        self._is_normalized = config.pooling == "embed" and pooling_of(config).is_normalized
        self._second_text = second_text_offset(config)
        self._max_open = max(1, config.max_num_seqs * config.all_groups // 2)  # the other slots are for other requests

    def posts(self, admission: Admission) -> dict[str, Endpoint]:
        score = Endpoint(admission, "score", self._score)
        rerank = Endpoint(admission, "rerank", self._rerank)
        return {
            "/v1/embeddings": Endpoint(admission, "embeddings", self._embeddings),
            **dict.fromkeys(("/score", "/v1/score"), score),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        }

    def _require(self, *kinds: str) -> None:
        """Raises ApiError unless the engine pools in one of these ways."""
        if not self._config.pooling:
            raise ApiError(
                400, "this server generates answers: --runner pooling serves a model for embeddings and scores"
            )
        if self._config.pooling not in kinds:
            raise ApiError(400, "this server makes scores: --convert embed serves a model for embeddings")

    # ── routes ──
    async def _embeddings(self, request: Request) -> Answer:
        self._require("embed")
        async with self._bodies.receive(request) as body:
            fields = await self._bodies.decode(request, body, EmbeddingRequest)
            name, _ = self._find_model(fields.model)
            if fields.dimensions is not None and self._size is not None and fields.dimensions > self._size:
                message = f"expected dimensions from 1 to {self._size}, got {fields.dimensions}"
                raise ApiError(400, message, param="dimensions")
            inputs = separate_prompts(fields.input, "input", MAX_INPUTS)
            prompts = await self._ids(inputs, fields, "input")
        vectors = await cancel_on_disconnect(request.scope, self._vectors(request, fields, prompts))
        data = []
        for index, vector in enumerate(vectors):
            shown = _shown(self._cut(vector, fields.dimensions), fields.encoding_format)
            data.append(msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown})))
            await asyncio.sleep(0)  # thousands of numbers take up to 1 ms, and others go on in between
        return self._answer(request, "embd", name, prompts, object="list", data=data)

    async def _score(self, request: Request) -> Answer:
        self._require("embed", "classify")
        async with self._bodies.receive(request) as body:
            fields = await self._bodies.decode(request, body, ScoreRequest)
            (name, _), pairs = self._find_model(fields.model), fields.pairs()
            texts, prompts = await self._pair_prompts(pairs, fields, fields.instruction, fields.param)
        vectors = await cancel_on_disconnect(request.scope, self._vectors(request, fields, prompts))
        scores = self._scores(pairs, texts, vectors)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return self._answer(request, "score", name, prompts, object="list", data=data)

    async def _rerank(self, request: Request) -> Answer:
        self._require("embed", "classify")
        async with self._bodies.receive(request) as body:
            fields = await self._bodies.decode(request, body, RerankRequest)
            (name, _), pairs = self._find_model(fields.model), [(fields.query, text) for text in fields.texts]
            texts, prompts = await self._pair_prompts(pairs, fields, fields.instruction, "documents")
        vectors = await cancel_on_disconnect(request.scope, self._vectors(request, fields, prompts))
        scores = self._scores(pairs, texts, vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or len(scores)]
        shows = fields.return_documents is not False
        results = [
            {
                "index": index,
                **({"document": {"text": pairs[index][1]}} if shows else {}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        return self._answer(request, "rerank", name, prompts, results=results)

    def _answer(self, request: Request, kind: str, model: str, prompts: Sequence[list[int]], **fields: Any) -> Response:
        tokens = sum(map(len, prompts))
        head = {"id": f"{kind}-{request.state.request_id}", "created": int(time.time()), "model": model}
        answer = {**head, **fields, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        return json_response(answer)

    # ── prompts ──
    async def _ids(self, inputs: Sequence[Input], fields: PoolingFields, param: str) -> list[list[int]]:
        """Returns the ids of texts. Raises ApiError for an empty or too long prompt."""
        max_tokens, keep, prompts = self._config.max_model_len, fields.truncate_prompt_tokens, []
        limit = Limit(max_tokens, param, None)
        if keep is not None and keep > max_tokens:
            name = "truncate_prompt_tokens"
            message = f"expected at most {max_tokens} tokens, as many as the model has, got {keep} at $.{name}"
            raise ApiError(400, message, param=name)
        for value in inputs:
            ids = await self._truncated(value, fields, limit, max_tokens if keep == -1 else keep)
            if not ids:
                raise ApiError(
                    400, f"expected a prompt of 1 to {max_tokens} tokens, got none at $.{param}", param=param
                )
            if len(ids) > max_tokens:
                raise context_length_exceeded(max_tokens, len(ids), limit)
            prompts.append(ids)
            await asyncio.sleep(0)  # each takes up to 1 ms
        return prompts

    async def _truncated(self, value: Input, fields: PoolingFields, limit: Limit, keep: int | None) -> list[int]:
        """Returns at most `keep` ids: the last ones. A model that attends both ways reads the first ones, and special
        tokens at both ends."""
        add_special, is_whole = fields.add_special_tokens is not False, self._config.is_encoder
        if keep == 0:
            return []
        if is_whole and not isinstance(value, list):
            text, second = (value, None) if isinstance(value, str) else value
            arguments = self._reader.tokenizer.tokenizer, text, second, add_special, keep, self._second_text
            if len(text) + len(second or "") <= LONG:
                return encode_whole(*arguments)
            return await self._reader.in_a_thread(functools.partial(encode_whole, *arguments))
        assert not isinstance(value, tuple), "pairs are of models that attend both ways"
        ids = await self._reader.ids(value, add_special, limit if keep is None else None)
        if keep is None or keep >= len(ids):
            return ids
        return [*ids[: keep - 1], ids[-1]] if is_whole else ids[len(ids) - keep :]

    async def _pair_prompts(
        self, pairs: Sequence[tuple[str, str]], fields: PoolingFields, instruction: str | None, param: str
    ) -> tuple[list[str], list[list[int]]]:
        """Returns prompts, and the texts of those that are a text alone. `param`: for errors of the second texts.
        Raises ApiError."""
        if instruction is not None and (self._config.pooling == "embed" or self._config.is_encoder):
            message = "instruction is for a model that judges by yes and no: write it into the text"
            raise ApiError(400, message, param="instruction")
        if self._config.pooling == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            return texts, await self._ids(texts, fields, param)
        if self._config.is_encoder:
            return [], await self._ids(pairs, fields, param)
        if fields.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens is not supported for scores: the end of the prompt is the question"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        prompts = []
        for query, document in pairs:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            limit = Limit(self._config.max_model_len, param, None)
            kwargs = self._options.default_chat_template_kwargs
            prompt = await self._reader.conversation(Conversation(messages, [], []), True, kwargs, False, limit)
            prompts += await self._ids([prompt.ids], fields, param)
        return [], prompts

    def _scores(self, pairs: Sequence[tuple[str, str]], texts: Sequence[str], vectors: Sequence[Floats]) -> list[float]:
        """Returns the score of each pair: the model's, or the cosine of two embeddings."""
        if not texts:
            return [float(vector[0]) for vector in vectors]
        of_text = {text: _unit(vector) for text, vector in zip(texts, vectors, strict=True)}
        return [float(of_text[query] @ of_text[document]) for query, document in pairs]

    def _cut(self, vector: Floats, dimensions: int | None) -> Floats:
        """Returns the first numbers of a vector, of length 1 again if vectors of the model are."""
        if dimensions is None or dimensions >= vector.size:
            return vector
        return _unit(vector[:dimensions]) if self._is_normalized else vector[:dimensions]

    # ── vectors ──
    async def _vectors(self, request: Request, fields: PoolingFields, prompts: Sequence[list[int]]) -> list[Floats]:
        """Returns the vector of each prompt. Raises EngineError."""
        report = None if self._reporter is None else self._reporter.of(request)
        latencies = LatencyRecorder(self._row, request.state.began, report)
        vectors: dict[int, Floats] = {}
        for _ in range(ATTEMPTS):
            missing = [number for number in range(len(prompts)) if number not in vectors]
            submits = [functools.partial(self._submit, request, fields, prompts[number]) for number in missing]
            batch = RequestStreams(submits, self._max_open)
            with latencies.watching(batch.streams):
                async with contextlib.aclosing(batch.chunks()) as chunks:
                    async for place, chunk in chunks:
                        stream = batch.streams[place]
                        latencies.chunk(stream, chunk)
                        self._row.engines[stream.group][Served.PROMPT_TOKENS] += stream.prompt_tokens
                        self._row.engines[stream.group][Served.PROMPT_TOKENS_CACHED] += stream.cached_tokens
                        vector = None if chunk.vector_handle is None else self._client.take_vector(chunk.vector_handle)
                        if vector is not None:
                            vectors[missing[place]] = vector
            if len(vectors) == len(prompts):
                return [vectors[number] for number in range(len(prompts))]
        raise EngineError(503, "the store had no room for a vector until it was read: send the request again")

    async def _submit(self, request: Request, fields: PoolingFields, ids: list[int]) -> OutputStream:
        return await self._client.submit(
            ids,
            PARAMS,
            priority=fields.priority or 0,
            client=fields.user or "",
            account=account_of(request, fields.user, bool(self._options.api_keys)),
            salt=(fields.cache_salt or "").encode(),
            request_id=request.state.request_id,
            adapter=self._find_model(fields.model)[1],
        )


def _unit(vector: Floats) -> Floats:
    unit: Floats = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit


def encode_whole(
    tokenizer: Any, text: str, second: str | None, add_special: bool, keep: int | None, offset: int
) -> list[int]:
    """Returns the ids of a text, or of a pair of texts, for a model that attends both ways. `keep`: at most so many,
    without the ends of the texts; special tokens stay. `offset`: is added to the ids of the second text."""
    (encoding,) = tokenizer.encode_batch_fast(
        [text if second is None else (text, second)], add_special_tokens=add_special
    )
    ids = [token + kind * offset for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]
    if keep is None or keep >= len(ids):
        return ids
    places = [[at for at, text in enumerate(encoding.sequence_ids) if text == number] for number in (1, 0)]
    dropped = set[int]()
    while len(ids) - len(dropped) > keep and any(places):  # of the longer text, as `longest_first` of transformers
        dropped.add(max(places, key=len).pop())
    return [token for at, token in enumerate(ids) if at not in dropped]


def _shown(vector: Floats, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
