"""Servers of models that attend both ways: vectors and scores as transformers computes them, also when a worker is
killed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from tests.crash.test_engine_migration import kill  # noqa: E402
from tests.e2e.test_server import run_server  # noqa: E402
from tests.e2e.test_server_pooling import LIMITS, SIZES, TEXTS  # noqa: E402
from tests.support.encoders import reference_logits, reference_vectors, tokenized, write_encoder  # noqa: E402
from tests.support.engine import Running  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402

ENCODER = {**SIZES, "runner": "auto", "max_model_len": 4096, "api_server_count": 1}
SHORT = [text[:100] for text in TEXTS]


@pytest.mark.timeout(300)
@in_a_loop
async def test_vectors_of_an_encoder_come_back_when_the_worker_is_killed(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "mini", "bert", "mean_tokens")
    async with run_server(LIMITS, model=str(path), **ENCODER) as served:
        prompts = [tokenized(path, text)[0] for text in SHORT]
        expected = [vector / np.linalg.norm(vector) for vector in reference_vectors(path, prompts, "mean")]
        answer = await served.client.embeddings.create(model="mini", input=SHORT, encoding_format="float")
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        for entry, vector in zip(answer.data, expected, strict=True):
            assert float(np.dot(entry.embedding, vector)) >= 0.9999

        status, error = await served.post("/v1/embeddings", {"input": "x" * 200})
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 130 tokens" in error["error"]["message"], error
        assert "202 tokens" in error["error"]["message"], error
        _, cut = await served.post("/v1/embeddings", {"input": "x" * 200, "truncate_prompt_tokens": 20})
        _, same = await served.post("/v1/embeddings", {"input": "x" * 18})
        assert cut["data"] == same["data"]  # special tokens stay at both ends

        inputs = [[SHORT[0], f"{number} " * 20] for number in range(60)]
        create = served.client.embeddings.create
        tasks = [asyncio.ensure_future(create(model="mini", input=texts, encoding_format="float")) for texts in inputs]
        engine = Running(served.launcher)
        await engine.until(lambda: sum(task.done() for task in tasks) >= 5)
        kill(engine, "worker")
        assert sum(task.done() for task in tasks) < 55, "it was too late"
        answers = await asyncio.gather(*tasks)
        assert engine.number(StatusBoard.SERVING) > 1
        for answer in answers:
            assert float(np.dot(answer.data[0].embedding, expected[0])) >= 0.9999


@pytest.mark.timeout(300)
@in_a_loop
async def test_documents_are_ranked_by_the_classifier_of_an_encoder(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "reranker", "xlm-roberta", num_labels=1)
    pairs = [(SHORT[0], text) for text in SHORT[1:]]
    scores = torch.sigmoid(torch.tensor(reference_logits(path, pairs))).tolist()
    async with run_server(LIMITS, model=str(path), **ENCODER) as served:
        status, answer = await served.post("/rerank", {"query": SHORT[0], "documents": SHORT[1:]})
        assert status == 200, answer
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        assert [row["index"] for row in answer["results"]] == order
        assert [row["relevance_score"] for row in answer["results"]] == pytest.approx(sorted(scores)[::-1], abs=1e-4)
        status, answer = await served.post("/score", {"text_1": SHORT[0], "text_2": SHORT[1:]})
        assert [row["score"] for row in answer["data"]] == pytest.approx(scores, abs=1e-4)
        body: dict[str, Any] = {"text_1": "a", "text_2": "b" * 300}
        status, answer = await served.post("/score", body)
        assert status == 400 and "maximum context length is 128 tokens" in answer["error"]["message"]  # less 2 for pads
        _, cut = await served.post("/score", {**body, "truncate_prompt_tokens": -1})
        _, same = await served.post("/score", {**body, "text_2": "b" * (128 - 5)})
        assert cut["data"] == same["data"] and cut["usage"]["prompt_tokens"] == 128
        status, answer = await served.post("/score", {**body, "truncate_prompt_tokens": 0})
        assert status == 400 and "expected a prompt of 1 to 128 tokens, got none" in answer["error"]["message"]
        status, answer = await served.post("/v1/embeddings", {"input": "a"})
        assert status == 400 and "--convert embed" in answer["error"]["message"]
        status, answer = await served.post("/score", {"text_1": "a", "text_2": "b", "instruction": "c"})
        assert (status, answer["error"]["param"]) == (400, "instruction")
