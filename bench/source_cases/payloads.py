"""The sizes of tensors that the documents name, as images, videos and raw values, and the servers that take them.

Issue #19702 complains of payloads past 16 MB; vLLM measures that regime at 23 and 96 MB (#51207).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.serve_cases.cases import Load
from bench.serve_cases.servers import OURS, THEIRS, Ours, Server, Theirs
from bench.vllm_cases import models
from bench.vllm_cases.serving import check_memory
from bench.vllm_cases.ways import COMMON

STORE, INLINE = "store", "inline"
RING, ARENA, IPC = "vllm-ring", "vllm-arena", "vllm-ipc"
WAYS = (OURS, THEIRS, RING, ARENA, IPC)
IMAGE_WAYS = (THEIRS, RING, ARENA)  # vLLM's, with its cache of processed images
VIDEO_WAYS = (THEIRS, IPC)  # without
PIXEL_NBYTES = 24  # three colours of four bytes, twice: the encoder takes an image as two equal frames
MAX_MODEL_LEN = 4096
STORE_OPTIONS = ("--tensor-transport", STORE, "--mm-processor-cache-gb", "1")
RING_OBJECT_MB = 256  # its default, 128, leaves out the largest payload with what lies beside it
RING_CACHE_GB = 1  # as our store
SIDE = 28 * 2  # pixels that become one token; images with sides that are multiples of it are not scaled


@dataclass(frozen=True)
class ImageLoad(Load):
    width: int = SIDE
    height: int = SIDE

    def options(self) -> list[str]:
        return [*super().options(), f"--image-size={self.width}x{self.height}", "--backend=openai-chat"]


@dataclass(frozen=True)
class VideoLoad(Load):
    seconds: int = 1
    width: int = SIDE
    height: int = SIDE

    def options(self) -> list[str]:
        size = [f"--video-size={self.width}x{self.height}", f"--video-seconds={self.seconds}", "--video-fps=8"]
        return [*super().options(), "--videos=1", *size, "--backend=openai-chat", "--timeout=120"]


@dataclass(frozen=True)
class Payload:
    """Images of one size, and how many of them a round asks for."""

    name: str
    width: int
    height: int
    requests: int
    concurrency: int

    @property
    def nbytes(self) -> int:
        return PIXEL_NBYTES * self.width * self.height

    @property
    def load(self) -> ImageLoad:
        return ImageLoad(self.requests, self.concurrency, "16", "1", 1, self.width, self.height)


PAYLOADS = (
    Payload("0.1 MB", 56, 56, 24, 4),
    Payload("4 MB", 392, 448, 16, 4),
    Payload("23 MB", 952, 1008, 8, 2),
    Payload("96 MB", 2016, 1960, 4, 2),
)
FILLING = ImageLoad(14, 2, "16", "1", 1, 2016, 1960)  # more than caches hold: their pages are touched before a round
QUICK_PAYLOADS = (Payload("4 MB", 392, 448, 4, 2),)


def make_model(scratch: Path) -> Path:
    """Makes the model of large inputs if it is not there; returns its directory."""
    directory = scratch / "large-input"
    if not (directory / "config.json").exists():
        models.make_qwen2_vl(directory, models.LARGE_INPUT)
    return directory


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
Kinds = Mapping[str, Callable[[Path], Server]]


def both_transports(model: Path, *options: str) -> dict[str, Callable[[Path], Server]]:
    """Ours with the store, and with tensors in messages."""
    ways = {STORE: STORE_OPTIONS, INLINE: ("--tensor-transport", INLINE)}
    return {way: partial(serve_ours, model, (*more, *options)) for way, more in ways.items()}


def serve_ours(model: Path, options: tuple[str, ...], log: Path) -> Server:
    usual = ("--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--no-enable-prefix-caching")
    return Ours.of([str(model), *usual, *options], log)


def serve_theirs(model: Path, options: tuple[str, ...], log: Path, environment: Mapping[str, str] = COMMON) -> Server:
    """A server of vLLM with workers that may use all processors, as with several of them its default binds to one."""
    check_memory(1)
    more = ("--no-enable-prefix-caching", *options)
    return Theirs.of_model(model, log, longest=MAX_MODEL_LEN, is_compiled=False, more=more, environment=environment)


def ways_of_theirs(
    model: Path, ways: tuple[str, ...], *options: str, environment: Mapping[str, str] = COMMON
) -> dict[str, Callable[[Path], Server]]:
    more = {
        THEIRS: (),
        RING: ("--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", str(RING_CACHE_GB),
               "--mm-shm-cache-max-object-size-mb", str(RING_OBJECT_MB)),
        ARENA: ("--enable-shm-tensor-arena",),
        IPC: ("--mm-tensor-ipc", "torch_shm"),
    }  # fmt: skip
    return {way: partial(serve_theirs, model, (*more[way], *options), environment=environment) for way in ways}
