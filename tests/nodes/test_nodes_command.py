"""`penstock serve` on two nodes, as its pages say: the second one in a pid namespace of its own."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import tiers
from tests.conftest import eventually
from tests.support.command import serving
from tests.support.engine import START
from tests.support.nodes import NAMESPACES, free_port, has_namespaces, secret_in_environment

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here"),
    pytest.mark.timeout(300),
]

SIMULATED = ("--device-model", "simulated", "--step-ms", "2")
PROMPTS = [f"{start} {number}" for number in range(8) for start in ("A picture of", "What is")]


@contextlib.contextmanager
def two_nodes_serving(*options: str) -> Iterator[int]:
    """Both nodes serve, at the home node's port."""
    common = ("--nnodes", "2", "--master-port", str(free_port()), *options)
    with secret_in_environment():
        node = [*NAMESPACES, sys.executable, "-m", "penstock", "serve", *common, "--node-rank", "1", "--headless"]
        with subprocess.Popen(node, stderr=subprocess.DEVNULL) as process:
            try:
                with serving(*common) as (_, port):
                    yield port
            finally:
                process.kill()


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=START) as response:
        text = response.read().decode()
        return json.loads(text) if response.headers["content-type"].startswith("application/json") else text


def complete_all(port: int) -> list[str]:
    def complete(prompt: str) -> str:
        answer = ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0})
        text: str = answer["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(complete, PROMPTS))


def describe_all(port: int) -> list[str]:
    """Returns what the bundled model says of four pictures."""
    image = pytest.importorskip("PIL.Image")
    answers = []
    for colour in ("red", "green", "blue", "yellow"):
        raw = io.BytesIO()
        picture = image.new("RGB", (56, 56), "white")
        picture.paste(image.new("RGB", (28, 28), colour), (14, 14))
        picture.save(raw, "PNG")
        url = "data:image/png;base64," + base64.b64encode(raw.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 16, "temperature": 0}
        answers.append(ask(port, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    return answers


def generated(port: int) -> dict[str, float]:
    """Returns the number of generated tokens by engine, as `/metrics` has it."""
    lines = [line for line in ask(port, "/metrics").splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return {line.partition('engine="')[2][0]: float(line.rpartition(" ")[2]) for line in lines}


def test_health_and_metrics_of_the_home_node_have_both_nodes() -> None:
    with two_nodes_serving(*SIMULATED) as port:
        groups = ask(port, "/health")["groups"]
        assert [(group["node"], group["serves"]) for group in groups] == [(0, True), (1, True)]
        complete_all(port)
        assert all(tokens > 0 for tokens in generated(port).values())

        def is_empty() -> bool:
            return all(group["open"] == 0 for group in ask(port, "/health")["groups"])

        eventually(is_empty)


@tiers.needs_all
def test_the_bundled_model_answers_on_two_nodes_as_on_one() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with serving() as (_, port):
        alone = complete_all(port)
    with two_nodes_serving() as port:
        assert complete_all(port) == alone
        assert all(tokens > 0 for tokens in generated(port).values())


@tiers.needs_all
def test_the_bundled_model_answers_with_ranks_on_two_nodes_as_with_ranks_on_one() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    ranks = ("--tensor-parallel-size", "2", "--threads", "1")
    with serving(*ranks) as (_, port):
        alone = complete_all(port), describe_all(port)
    with two_nodes_serving(*ranks, "--tensor-parallel-over-nodes") as port:
        assert (complete_all(port), describe_all(port)) == alone
    assert len(set(alone[1])) == 4, "it sees which picture it is"
