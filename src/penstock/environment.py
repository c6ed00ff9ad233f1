"""The environment variables that Penstock reads, each declared once. The page of commands has them as a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_TENSOR_MB = 1 << 20


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable. An empty value counts as none."""

    name: str
    parse: Callable[[str], T]  # raises ValueError
    values: str  # in words
    default: T
    help: str  # a sentence, in Markdown

    def read(self, environment: Mapping[str, str] | None = None) -> T:
        """Returns the value, or the default. Raises ValueError, which names the variable."""
        text = (os.environ if environment is None else environment).get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"expected {self.name} to be {self.values}, got {text!r}") from None


def _text(name: str, values: str, default: str, help: str) -> Variable[str]:
    return Variable(name, str, values, default, help)


def _choice(name: str, choices: tuple[str, ...], help: str) -> Variable[str]:
    """The first choice is the default."""

    def parse(text: str) -> str:
        return choices[choices.index(text)]

    return Variable(name, parse, f"{', '.join(choices[:-1])} or {choices[-1]}", choices[0], help)


def _switch(name: str, help: str) -> Variable[bool]:
    return Variable(name, lambda text: bool(("0", "1").index(text)), "0 or 1", False, help)


def _megabytes(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_TENSOR_MB):
        raise ValueError
    return int(text)


API_KEY = _text(
    "PENSTOCK_API_KEY", "a text", "", "Key that `penstock serve` requires of requests, and `penstock top` sends"
)
NODE_SECRET = _text(
    "PENSTOCK_NODE_SECRET",
    "64 hexadecimal digits",
    "",
    "Secret by which the nodes of one server recognize each other, the same on all of them",
)
TENSOR_TRANSPORT = _text(
    "PENSTOCK_TENSOR_TRANSPORT",
    "auto, store, inline or device",
    "auto",
    "Default of `penstock serve --tensor-transport`",
)
ALLOW_RUNTIME_LORA = _switch(
    "PENSTOCK_ALLOW_RUNTIME_LORA_UPDATING",
    "Let requests load and unload LoRA adapters of any directory that the server can read; for trusted clients",
)
CACHE_DIR = _text(
    "PENSTOCK_CACHE_DIR",
    "a directory",
    "",
    "Directory of what outlives a server: measured numbers of threads (default: `penstock` in `XDG_CACHE_HOME`, or in "
    "`~/.cache`)",
)
LEAK_WARNINGS = _text(  # read by the native core
    "PENSTOCK_LEAK_WARNINGS", "any text", "", "Print native objects that outlive the interpreter; for tests"
)
VLLM = _text(
    "PENSTOCK_VLLM",
    "0; 1 for queue,images,tensors; or some of queue,images,tensors,steps",
    "0",
    "Parts of vLLM that the plugin replaces",
)
VLLM_LATENCY = _choice(
    "PENSTOCK_VLLM_LATENCY",
    ("auto", "spin", "eco"),
    "Waiting of the queue's channels: spin spins for 10 ms before it sleeps, eco never spins",
)
VLLM_VIEWS = _choice(
    "PENSTOCK_VLLM_VIEWS",
    ("arena", "always", "never"),
    "When large tensors are received as views: arena where `--enable-shm-tensor-arena` is given",
)
VLLM_TENSOR_MB = Variable(
    "PENSTOCK_VLLM_TENSOR_MB",
    _megabytes,
    f"a whole number from 1 to {MAX_TENSOR_MB}",
    256,
    "Size in MiB of the store for tensors on their way to the engine core",
)
VLLM_STRICT = _switch("PENSTOCK_VLLM_STRICT", "Raise an error where a part would fall back to vLLM's own")
VLLM_CHECK_STEPS = _switch(
    "PENSTOCK_VLLM_CHECK_STEPS",
    "Send the whole step with each change of a step; the reader compares, and an error names the field that differs",
)
VLLM_DEATHS = _text(
    "PENSTOCK_VLLM_DEATHS",
    "a path and a token",
    "",
    "Set by the plugin, so that the processes of one vLLM server know a death",
)
VLLM_STORE = _text(
    "PENSTOCK_STORE_*", "a ticket", "", "Set by the plugin, so that the processes of one vLLM server find its stores"
)
VARIABLES = [value for value in list(globals().values()) if isinstance(value, Variable)]


def cache_directory() -> Path:
    """Returns the directory of files that outlive a server. Raises RuntimeError if this user has no home."""
    if directory := CACHE_DIR.read():
        return Path(directory)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"
