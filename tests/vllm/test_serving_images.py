"""`vllm serve` with images: what it answers with our parts is what it answers without."""

import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Store
from penstock.integrations.vllm.signed_store import SHARED_IMAGES
from tests import tiers
from tests.support import peer
from tests.support.tiny_models import QWEN2_VL
from tests.support.vllm_server import NAME, START, VllmServer, serving

SHM = ("--mm-processor-cache-type", "shm")
LAYOUTS = {
    "TP 2": ("images", SHM, {}),
    "TP 1, 2 API servers": ("images", ("--tensor-parallel-size", "1", "--api-server-count", "2", *SHM), {}),
    "DP 2": ("images", ("--tensor-parallel-size", "1", "--data-parallel-size", "2", *SHM), {}),
    "tensors, TP 2": (
        "tensors",
        ("--mm-tensor-ipc", "torch_shm"),
        {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    ),
}


def image(seed: int, side: int = 224) -> dict[str, Any]:
    """Noise, as a part of a message."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


IMAGE_COUNT = 4
ABORTED = 100_000  # seeds of images of aborted requests begin here
FORGOTTEN = 90.0  # seconds until nothing is held: an image that was not sent is held for 60 by its API server


def messages() -> list[list[dict[str, Any]]]:
    """The contents of 24 messages: each with one of four images, some with two."""
    images = [image(seed) for seed in range(IMAGE_COUNT)]
    return [
        [
            *([images[(number + 1) % IMAGE_COUNT]] if number % 5 == 4 else []),
            images[number % IMAGE_COUNT],
            {"type": "text", "text": f"def f{number % 3}"},
        ]
        for number in range(24)
    ]


@contextlib.contextmanager
def connected(server: VllmServer, content: list[dict[str, Any]]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which a request was sent; it is closed with the block, which aborts the request."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection


def answer(server: VllmServer, content: list[dict[str, Any]]) -> str:
    with connected(server, content) as connection:
        response = connection.getresponse()
        text = response.read()
    assert response.status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


def answers(server: VllmServer) -> list[str]:
    with ThreadPoolExecutor(6) as threads:
        return list(threads.map(lambda content: answer(server, content), messages()))


def abort(server: VllmServer, seed: int) -> None:
    """Asks about an image that is new to the server, and goes away within 200 ms."""
    with connected(server, [image(seed, side=56), {"type": "text", "text": "def f"}]):
        time.sleep(random.Random(seed).random() * 0.2)


OURS = re.compile(r"/dev/shm/.*penstock")

pytestmark = pytest.mark.timeout(1200)


def shared_store(server: VllmServer) -> Store | None:
    """The store that a process of the server names in its environment."""
    for pid in server.pids():
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        for variable in variables:
            name, _, value = variable.partition("=")
            if name == SHARED_IMAGES:
                return Store.attach(value.partition("/")[0])
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_answers_to_images_as_without_us(layout: str, tmp_path: Path) -> None:
    part, options, variables = LAYOUTS[layout]
    python = peer.python_of_vllm()
    site = peer.write_site(tmp_path / "site")
    model = peer.write_model(python, QWEN2_VL, tmp_path)
    ours = {"PENSTOCK_VLLM": part, "PENSTOCK_VLLM_STRICT": "1", **variables}
    with serving(site, model, tmp_path / "ours.log", *options, **ours) as server:
        ours_first = answers(server)
        assert ours_first == answers(server)  # and of what is cached
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in server.pids())
        assert "memfd:penstock:vllm" in maps
        assert not OURS.search(maps)
        stores = {line.split()[4] for line in maps.splitlines() if "memfd:penstock:vllm images" in line}
        assert len(stores) == (part == "images"), "one for all processes"
        store = shared_store(server)
        assert (store is not None) == (part == "images")
        if store is not None:
            assert store.stats().puts == IMAGE_COUNT  # by whichever server saw it first, and by no other
            store.close()
    if part == "tensors":  # vLLM refuses this layout
        options = ()
    with serving(site, model, tmp_path / "theirs.log", *options, **variables) as server:
        assert answers(server) == ours_first


def test_nothing_is_held_of_requests_with_images_that_are_aborted(tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    site = peer.write_site(tmp_path / "site")
    model = peer.write_model(python, QWEN2_VL, tmp_path)
    ours = {"PENSTOCK_VLLM": "images", "PENSTOCK_VLLM_STRICT": "1"}
    with serving(site, model, tmp_path / "ours.log", *SHM, **ours) as server, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: abort(server, seed), range(ABORTED, ABORTED + tiers.VLLM_IMAGE_ABORTS)))
        store = shared_store(server)
        assert store is not None
        with contextlib.closing(store):
            deadline = time.monotonic() + FORGOTTEN
            while True:
                answer(server, messages()[0])  # an API server looks after its images where it has one to send
                stats = store.stats()
                held = [item for item in stats.items if item.holders]
                granted = [(holder.name, holder.granted) for holder in stats.pool.holders if holder.granted]
                if len(held) + len(granted) <= 1:  # the image of the last answer, until the next one
                    break
                assert time.monotonic() < deadline, (held, granted)
                time.sleep(1)
            print(f"{stats.puts} images of {tiers.VLLM_IMAGE_ABORTS} aborted requests")
            assert stats.puts > IMAGE_COUNT, "no request was aborted after its image was put"


def ask_until(server: VllmServer, is_over: threading.Event, seed: int) -> None:
    """Asks about one new image after the other, whatever becomes of the answers."""
    for number in itertools.count():
        if is_over.is_set():
            return
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            answer(server, [image(seed + number, side=112), {"type": "text", "text": "def f"}])


@pytest.mark.parametrize("parts", ["0", "images"])
def test_a_server_ends_with_one_of_its_api_servers_and_leaves_nothing(parts: str, tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    site = peer.write_site(tmp_path / "site")
    model = peer.write_model(python, QWEN2_VL, tmp_path)
    variables = {"PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1"}
    _, options, _ = LAYOUTS["TP 1, 2 API servers"]
    is_over = threading.Event()
    with serving(site, model, tmp_path / "log", *options, **variables) as server, ThreadPoolExecutor(6) as threads:
        answers(server)
        for number in range(6):
            threads.submit(ask_until, server, is_over, ABORTED * (number + 1))
        try:
            time.sleep(1)
            store, pids = shared_store(server), server.pids()
            assert (store is not None) == (parts != "0")
            files = {file for pid in pids for file in server.files_of(pid)}
            os.kill(server.api_servers()[-1], signal.SIGKILL)
            print(f"PENSTOCK_VLLM={parts}: ended after {server.seconds_until_end():.1f} s")
        finally:
            is_over.set()
        deadline = time.monotonic() + 30
        while server.pids():
            assert time.monotonic() < deadline, f"of {pids} there are still {server.pids()}"
            time.sleep(0.1)
        assert not [file for file in files if os.path.exists(file)]
        if store is not None:
            with contextlib.closing(store):
                stats = store.stats()
                while held := [holder for holder in stats.pool.holders if holder.blocks or holder.granted]:
                    assert time.monotonic() < deadline, held
                    time.sleep(0.1)
                    stats = store.stats()
                assert not [item for item in stats.items if item.holders or item.is_being_written]
