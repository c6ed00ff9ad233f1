"""The settings of the integration, from environment variables, and the count of parts that fell back to vLLM's."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.environment import VLLM, VLLM_CHECK_STEPS, VLLM_LATENCY, VLLM_STRICT, VLLM_TENSOR_MB, VLLM_VIEWS

PARTS = ("queue", "images", "tensors", "steps")
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
    """Returns the settings. Raises ValueError that names a variable with a wrong value."""
    return Settings(
        parts=_parts(VLLM.read(environ)),
        latency=VLLM_LATENCY.read(environ),
        views=VLLM_VIEWS.read(environ),
        tensor_mb=VLLM_TENSOR_MB.read(environ),
        strict=VLLM_STRICT.read(environ),
        check_steps=VLLM_CHECK_STEPS.read(environ),
    )


def _parts(value: str) -> frozenset[str]:
    if value == "0":
        return frozenset()
    if value == "1":
        return frozenset(PARTS) - {"steps"}
    parts = frozenset(part.strip() for part in value.split(","))
    if parts - set(PARTS):
        raise ValueError(f"expected {VLLM.name} to be {VLLM.values}, got {value!r}")
    if "steps" in parts and "queue" not in parts:
        raise ValueError(f"expected {VLLM.name} to name queue, through which steps travel, got {value!r}")
    return parts


def is_strict() -> bool:
    """Returns whether a part raises instead of falling back. Does not check the values of all variables."""
    return os.environ.get(VLLM_STRICT.name) == "1"


def fall_back(part: str, sentence: str) -> None:
    """Counts a part that stays vLLM's, and logs the reason, once for each sentence.

    Raises:
        RuntimeError: with PENSTOCK_VLLM_STRICT=1.
    """
    fall_backs[part, sentence] += 1
    if is_strict():
        raise RuntimeError(f"{part}: {sentence} ({VLLM_STRICT.name}=1 makes this an error)")
    if fall_backs[part, sentence] == 1:
        LOGGER.warning("penstock leaves %s to vLLM's own: %s", part, sentence)


def rebind(original: Any, replacement: Any) -> None:
    """Binds our class or function in the modules, of vLLM or not, that have imported the original by its name."""
    name = original.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
