"""`penstock serve` on two nodes, as its pages say: the second one in a pid namespace of its own."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.conftest import eventually
from tests.support import tiny_models
from tests.support.command import serving
from tests.support.engine import START
from tests.support.nodes import NAMESPACES, free_port, has_namespaces, secret_in_environment
from tests.support.relay import TO_CONNECTOR, Relay, relay

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here"),
    pytest.mark.timeout(300),
]

SIMULATED = ("--device-model", "simulated", "--step-ms", "2")
PROMPTS = [f"{start} {number}" for number in range(8) for start in ("A picture of", "What is")]
IMAGES = 8
REQUEST_NBYTES = 4096  # to the other node, without its image


@contextlib.contextmanager
def two_nodes_serving(*options: str) -> Iterator[tuple[int, Relay]]:
    """Both nodes serve, at the home node's port. Their link goes through the relay."""
    home = free_port()
    with secret_in_environment(), relay(("127.0.0.1", home)) as link, tempfile.TemporaryFile("w+") as log:
        away = ("--nnodes", "2", "--master-port", str(link.address[1]), "--node-rank", "1", "--headless", *options)
        node = [*NAMESPACES, sys.executable, "-m", "penstock", "serve", *away]
        with subprocess.Popen(node, stderr=log) as process:
            try:
                with serving("--nnodes", "2", "--master-port", str(home), *options) as (_, port):
                    yield port, link
            finally:
                process.kill()
                process.wait()
                log.seek(0)
                print(log.read())  # shown when the test fails


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


def image_part(seed: int) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    picture, chance = Image.new("RGB", (280, 280), "white"), random.Random(seed)
    left, top = chance.randrange(200), chance.randrange(200)
    ImageDraw.Draw(picture).ellipse((left, top, left + 70, top + 70), fill=chance.choice(("red", "blue", "green")))
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def describe_all(port: int) -> list[str]:
    """Returns the answers to each prompt about each image."""
    images = [image_part(seed) for seed in range(IMAGES)]

    def describe(case: tuple[str, dict[str, Any]]) -> str:
        content = [{"type": "text", "text": case[0]}, case[1]]
        message = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
        text: str = ask(port, "/v1/chat/completions", message)["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(describe, itertools.product(PROMPTS[::4], images)))


def generated(port: int) -> dict[str, float]:
    """Returns the number of generated tokens by engine, as `/metrics` has it."""
    lines = [line for line in ask(port, "/metrics").splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return {line.partition('engine="')[2][0]: float(line.rpartition(" ")[2]) for line in lines}


def test_health_and_metrics_of_the_home_node_have_both_nodes() -> None:
    with two_nodes_serving(*SIMULATED) as (port, _):
        groups = ask(port, "/health")["groups"]
        assert [(group["node"], group["serves"]) for group in groups] == [(0, True), (1, True)]
        complete_all(port)
        assert all(tokens > 0 for tokens in generated(port).values())

        def is_empty() -> bool:
            return all(group["open"] == 0 for group in ask(port, "/health")["groups"])

        eventually(is_empty)


@tiers.needs_all
@pytest.mark.parametrize(
    ("write_model", "image_nbytes"),
    [(None, 96 * 96 * 3 * 4), (tiny_models.write_llama, 0), (tiny_models.write_qwen2_vl, 280 * 280 * 3 * 2 * 4)],
    ids=["bundled", "tiny-llama", "tiny-qwen2vl"],
)
def test_a_model_answers_on_two_nodes_as_on_one_and_an_image_crosses_once(
    write_model: Callable[[Path], Path] | None, image_nbytes: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = [] if write_model is None else [str(write_model(tmp_path))]

    def answer_all(port: int) -> list[str]:
        return [*complete_all(port), *(describe_all(port) if image_nbytes else ())]

    with serving(*model) as (_, port):
        alone = answer_all(port)
    assert len(set(alone)) > 4
    with two_nodes_serving(*model) as (port, link):
        assert answer_all(port) == alone
        assert all(tokens > 0 for tokens in generated(port).values())
        if image_nbytes:
            nbytes = link.nbytes[TO_CONNECTOR]
            print(f"{nbytes} bytes to the other node, images of {image_nbytes}")
            assert image_nbytes < nbytes < IMAGES * image_nbytes + len(alone) * REQUEST_NBYTES


@tiers.needs_all
def test_bundled_model_answers_the_same_with_ranks_on_one_and_two_nodes() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    ranks = ("--tensor-parallel-size", "2", "--threads", "1")
    with serving(*ranks) as (_, port):
        alone = complete_all(port), describe_all(port)
    with two_nodes_serving(*ranks, "--tensor-parallel-over-nodes") as (port, _):
        assert (complete_all(port), describe_all(port)) == alone
    assert len(set(alone[1])) > 4, "it sees which picture it is"
