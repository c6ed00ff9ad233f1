"""Embeddings, scores and reranking as clients see them, on a tiny real model: what transformers computes."""

import base64
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
transformers = pytest.importorskip("transformers")
pytest.importorskip("httptools")

from penstock.engine.protocol.messages import Floats  # noqa: E402
from tests.e2e.test_server import Served, refused, run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.tiny_models import HIDDEN, LLAMA, write_llama  # noqa: E402

TEXTS = ["a", "How is the weather in Rio?", "How is the weather in Bern?", "x" * 200, "Äpfel 😀"]
MAX_LEN = 320
SIZES: dict[str, Any] = {
    "simulated": None,
    "runner": "pooling",
    "store_nbytes": 1 << 22,
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
}
LIMITS = {"max_open_requests": 64, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_llama(tmp_path_factory.mktemp("pooling"))
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "classifier_from_token": ["n", "y"]}))
    yield path


@functools.cache
def stock_of(path: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of transformers."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return transformers.AutoTokenizer.from_pretrained(path), stock


def tokenized(path: Path, text: str) -> list[int]:
    return list(stock_of(path)[0](text).input_ids)


def reference(path: Path, ids: list[int]) -> Floats:
    with torch.inference_mode():
        state = stock_of(path)[1].model(torch.tensor([ids])).last_hidden_state[0, -1]
    vector: Floats = torch.nn.functional.normalize(state, dim=-1).numpy()
    return vector


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def embeddings_are_those_of_transformers(served: Served, path: Path) -> None:
    for encoding in ("float", "base64", openai.NOT_GIVEN):
        answer = await served.client.embeddings.create(model=LLAMA, input=TEXTS, encoding_format=encoding)
        lengths = [len(tokenized(path, text)) for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
        for number, (text, entry) in enumerate(zip(TEXTS, answer.data, strict=True)):
            vector = entry.embedding
            if encoding == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
            expected = reference(path, tokenized(path, text))
            assert entry.index == number and len(vector) == HIDDEN
            assert np.abs(np.array(vector) - expected).max() <= 1e-4 and float(np.dot(vector, expected)) >= 0.9999


async def inputs_may_be_ids(served: Served, path: Path) -> None:
    ids = [tokenized(path, text) for text in TEXTS[:2]]
    texts = await served.client.embeddings.create(model=LLAMA, input=TEXTS[:2])
    lists = await served.client.embeddings.create(model=LLAMA, input=ids)
    single = await served.client.embeddings.create(model=LLAMA, input=ids[1])
    plain = await served.client.embeddings.create(model=LLAMA, input=TEXTS[1])
    assert [entry.embedding for entry in texts.data] == [entry.embedding for entry in lists.data]
    assert single.data[0].embedding == plain.data[0].embedding == texts.data[1].embedding


async def dimensions_are_cut_and_have_length_one_again(served: Served, path: Path) -> None:
    answer = await served.client.embeddings.create(model=LLAMA, input=TEXTS[1], dimensions=16)
    short = reference(path, tokenized(path, TEXTS[1]))[:16]
    assert np.abs(np.array(answer.data[0].embedding) - short / np.linalg.norm(short)).max() <= 1e-4


async def prompts_are_truncated_to_their_ends(served: Served, path: Path) -> None:
    ids = list(range(10, 260)) * 2
    _, answer = await served.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 100})
    assert np.abs(np.array(answer["data"][0]["embedding"]) - reference(path, ids[-100:])).max() <= 1e-4
    status, answer = await served.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": -1})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, MAX_LEN)
    status, _ = await served.post("/v1/embeddings", {"input": ids[:MAX_LEN]})
    assert status == 200


async def bad_bodies_are_refused_by_field(served: Served, path: Path) -> None:
    for fields, param, words in (
        ({"input": ""}, "input", "got none"),
        ({"input": []}, "input", "both or none"),
        ({"input": ["a", 1]}, "input", "both or none"),
        ({"input": ["a", ""]}, "input", "got none"),
        ({}, None, "missing required field"),
        ({"input": [5] * (MAX_LEN + 1)}, "input", f"maximum context length is {MAX_LEN}"),
        ({"input": "x" * 5000}, "input", f"maximum context length is {MAX_LEN}"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [100_000]}, "input", "ids below"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", f"from 1 to {HIDDEN}"),
        ({"input": "a", "encoding_format": "float16"}, "encoding_format", "float16"),
        ({"input": "a", "embed_dtype": "bfloat16"}, "embed_dtype", "bfloat16"),
        ({"input": "a", "truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens", "at most"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "input", "got none"),
    ):
        status, answer = await served.post("/v1/embeddings", fields)
        assert (status, answer["error"]["param"]) == (400, param), (fields, answer)
        assert words in answer["error"]["message"], (fields, answer)


async def embedding_server_generates_nothing(served: Served, path: Path) -> None:
    with refused("BadRequestError") as error:
        await served.client.completions.create(model=LLAMA, prompt="a")
    assert "--runner generate" in str(error.value)
    with refused("BadRequestError"):
        await served.client.chat.completions.create(model=LLAMA, messages=[{"role": "user", "content": "a"}])
    with refused("BadRequestError"):
        await served.client.responses.create(model=LLAMA, input="a")
    status, answer = await served.post(
        "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    )
    assert status == 400 and "--runner generate" in answer["error"]["message"]
    with refused("NotFoundError"):
        await served.client.embeddings.create(model="other", input="a")


async def scores_are_cosines_of_embeddings(served: Served, path: Path) -> None:
    first, *others = [reference(path, tokenized(path, text)) for text in TEXTS]
    status, answer = await served.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    assert status == 200 and answer["object"] == "list"
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([float(first @ v) for v in others], abs=1e-4)
    status, answer = await served.post("/score", {"queries": TEXTS[:2], "documents": TEXTS[2:4]})
    assert status == 200 and len(answer["data"]) == 2
    for fields in (
        {"text_1": TEXTS[:2], "text_2": TEXTS[:3]},
        {"text_1": "a"},
        {"text_1": "a", "text_2": []},
        {"text_1": "a", "text_2": ""},
    ):
        status, answer = await served.post("/score", fields)
        assert (status, answer["error"]["param"]) == (400, "text_2"), answer


async def documents_are_ranked_by_their_scores(served: Served, path: Path) -> None:
    query, *documents = TEXTS
    first, *others = [reference(path, tokenized(path, text)) for text in TEXTS]
    expected = [float(first @ vector) for vector in others]
    order = sorted(range(4), key=lambda index: -expected[index])
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, answer = await served.post(route, {"model": LLAMA, "query": query, "documents": documents})
        assert status == 200 and [entry["index"] for entry in answer["results"]] == order
        assert [entry["document"]["text"] for entry in answer["results"]] == [documents[index] for index in order]
        scores = [entry["relevance_score"] for entry in answer["results"]]
        assert scores == pytest.approx([expected[index] for index in order], abs=1e-4)
    body = {"query": query, "documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False}
    _, answer = await served.post("/rerank", body)
    assert [entry["index"] for entry in answer["results"]] == order[:2] and "document" not in answer["results"][0]


@pytest.mark.timeout(300)
@in_a_loop
async def test_embeddings_are_as_clients_know_them(model: Path) -> None:
    async with run_server(LIMITS, model=str(model), **SIZES) as served:
        for scene in (
            *(embeddings_are_those_of_transformers, inputs_may_be_ids, dimensions_are_cut_and_have_length_one_again),
            *(prompts_are_truncated_to_their_ends, bad_bodies_are_refused_by_field, embedding_server_generates_nothing),
            *(scores_are_cosines_of_embeddings, documents_are_ranked_by_their_scores),
        ):
            await scene(served, model)
        status, text = await served.get("/dashboard/data")
        assert status == 200, text
        assert served.launcher.cluster.store.stats().items == ()  # type: ignore[union-attr]


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def written_prompt(query: str, document: str, instruction: str) -> str:
    """As the page of Qwen3-Reranker writes it."""
    judge = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    prefix = (
        f'<|im_start|>system\n{judge} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return f"{prefix}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{suffix}"


def reference_score(path: Path, query: str, document: str, instruction: str) -> float:
    tokenizer, stock = stock_of(path)
    ids = tokenizer(written_prompt(query, document, instruction)).input_ids
    no, yes = tokenizer.convert_tokens_to_ids(["n", "y"])
    with torch.inference_mode():
        logits = stock(torch.tensor([ids])).logits[0, -1]
    return float(torch.softmax(logits[[no, yes]], -1)[1])


@in_a_loop
async def test_scores_are_the_probability_of_yes(model: Path) -> None:
    sizes = {**SIZES, "convert": "classify", "max_model_len": 1024, "max_num_batched_tokens": 16}
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    documents = ["It rains.", "Bern is a town.", "Sunny and warm in Rio, 30 degrees."]
    expected = [reference_score(model, TEXTS[1], text, instruction) for text in documents]
    async with run_server(LIMITS, model=str(model), tensor_parallel_size=2, **sizes) as served:
        status, answer = await served.post("/v1/score", {"text_1": TEXTS[1], "text_2": documents})
        assert status == 200 and [row["score"] for row in answer["data"]] == pytest.approx(expected, abs=1e-4)
        status, answer = await served.post("/rerank", {"query": TEXTS[1], "documents": documents, "top_n": 1})
        assert [row["index"] for row in answer["results"]] == [int(np.argmax(expected))]
        body = {"query": TEXTS[1], "documents": documents[:1], "instruction": "Is there rain?"}
        status, answer = await served.post("/rerank", body)
        other = reference_score(model, TEXTS[1], documents[0], "Is there rain?")
        assert answer["results"][0]["relevance_score"] == pytest.approx(other, abs=1e-4)
        status, answer = await served.post("/v1/embeddings", {"input": "a"})
        assert status == 400 and "--convert embed" in answer["error"]["message"]
        status, answer = await served.post("/score", {"text_1": "a", "text_2": "x" * 900})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@in_a_loop
async def test_generating_server_refuses_embeddings() -> None:
    async with run_server() as served:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            status, answer = await served.post(path, body)
            assert status == 400 and "--runner pooling" in answer["error"]["message"]
