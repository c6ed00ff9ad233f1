"""The environment variables of the integration, and the count of what fell back to vLLM's own.

| variable | values | default |
|---|---|---|
| PENSTOCK_VLLM | 0, 1 (queue, images and tensors), or parts with commas between them | 0 |
| PENSTOCK_VLLM_LATENCY | auto, spin, eco: as of a channel | auto |
| PENSTOCK_VLLM_VIEWS | arena (views where --enable-shm-tensor-arena is given), always, never | arena |
| PENSTOCK_VLLM_TENSOR_MB | MiB of the store for tensors on their way to the engine core | 256 |
| PENSTOCK_VLLM_STRICT | 1: what would fall back is an error | 0 |
| PENSTOCK_VLLM_CHECK_STEPS | 1: each change carries the whole step, and its reader compares | 0 |
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

PARTS = ("queue", "images", "tensors", "steps")
SWITCH = "PENSTOCK_VLLM"
LATENCY, VIEWS, TENSOR_MB, STRICT = (f"{SWITCH}_{name}" for name in ("LATENCY", "VIEWS", "TENSOR_MB", "STRICT"))
CHECK_STEPS = f"{SWITCH}_CHECK_STEPS"
MAX_TENSOR_MB = 1 << 20

LOGGER = logging.getLogger("vllm.penstock")  # below vLLM's own, which prints it

fall_backs: Counter[tuple[str, str]] = Counter()  # by part and sentence


@dataclass(frozen=True)
class Settings:
    parts: frozenset[str] = frozenset()
    latency: str = "auto"
    views: str = "arena"
    tensor_mb: int = 256
    strict: bool = False
    check_steps: bool = False


def read(environ: Mapping[str, str]) -> Settings:
    """Returns the settings of these variables. Raises ValueError that names a variable with a wrong value."""
    return Settings(
        parts=_parts(environ.get(SWITCH, "0")),
        latency=_choice(environ, LATENCY, ("auto", "spin", "eco")),
        views=_choice(environ, VIEWS, ("arena", "always", "never")),
        tensor_mb=_tensor_mb(environ.get(TENSOR_MB, "256")),
        strict=_choice(environ, STRICT, ("0", "1")) == "1",
        check_steps=_choice(environ, CHECK_STEPS, ("0", "1")) == "1",
    )


def _parts(value: str) -> frozenset[str]:
    if value in ("", "0"):
        return frozenset()
    if value == "1":
        return frozenset(PARTS) - {"steps"}
    parts = frozenset(part.strip() for part in value.split(","))
    if unknown := sorted(parts - set(PARTS)):
        raise ValueError(f"{SWITCH} is 0, 1, or of {', '.join(PARTS)}; {', '.join(map(repr, unknown))} is none of them")
    if "steps" in parts and "queue" not in parts:
        raise ValueError(f"{SWITCH} is {value!r}: steps travel through the queue, which it must name, too")
    return parts


def _choice(environ: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    value = environ.get(variable) or choices[0]
    if value not in choices:
        raise ValueError(f"{variable} is one of {', '.join(choices)}, not {value!r}")
    return value


def _tensor_mb(value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MAX_TENSOR_MB):
        raise ValueError(f"{TENSOR_MB} is a whole number from 1 to {MAX_TENSOR_MB:,}, not {value!r}")
    return int(value)


def fall_back(part: str, sentence: str) -> None:
    """Counts that a part stays vLLM's own, and logs why, once for each sentence.

    Raises:
        RuntimeError: with PENSTOCK_VLLM_STRICT=1.
    """
    fall_backs[part, sentence] += 1
    if os.environ.get(STRICT) == "1":
        raise RuntimeError(f"{part}: {sentence} ({STRICT}=1 makes this an error)")
    if fall_backs[part, sentence] == 1:
        LOGGER.warning("penstock leaves %s to vLLM's own: %s", part, sentence)
