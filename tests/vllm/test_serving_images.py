"""`vllm serve` with images: what it answers with our parts is what it answers without."""

import re
from pathlib import Path

import pytest

from penstock import Store
from penstock.integrations.vllm.signed_store import SHARED_IMAGES
from tests.support import peer
from tests.support.tiny_models import QWEN2_VL
from tests.support.vllm_server import VllmServer, image, serving, text

SHM = ("--mm-processor-cache-type", "shm")
LAYOUTS = {
    "TP 2": ("images", ("--tensor-parallel-size", "2", *SHM), {}),
    "TP 1, 2 API servers": ("images", ("--api-server-count", "2", *SHM), {}),
    "DP 2": ("images", ("--data-parallel-size", "2", *SHM), {}),
    "tensors, TP 2": (
        "tensors",
        ("--tensor-parallel-size", "2", "--mm-tensor-ipc", "torch_shm"),
        {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    ),
}
IMAGES = [image(seed) for seed in range(4)]
CONTENTS = [
    [*([IMAGES[(number + 1) % 4]] if number % 5 == 4 else []), IMAGES[number % 4], text(f"def f{number % 3}")]
    for number in range(24)
]
OURS = re.compile(r"/dev/shm/.*penstock")

pytestmark = pytest.mark.timeout(1200)


def shared_store(server: VllmServer) -> Store | None:
    """The store that a process of the server names in its environment."""
    for pid in server.processes():
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
    with serving(python, site, model, tmp_path / "ours.log", *options, **ours) as server:
        answers = server.answers(CONTENTS, 6)
        assert answers == server.answers(CONTENTS, 6)  # and of what is cached
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in server.processes())
        assert "memfd:penstock:vllm" in maps
        assert not OURS.search(maps)
        store = shared_store(server)
        assert (store is not None) == (layout in ("TP 1, 2 API servers", "DP 2"))
        if store is not None:
            assert store.stats().puts == len(IMAGES)  # by whichever server saw it first, and by no other
            store.close()
    if part == "tensors":  # vLLM refuses this layout
        options = options[:2]
    with serving(python, site, model, tmp_path / "theirs.log", *options, **variables) as server:
        assert server.answers(CONTENTS, 6) == answers
