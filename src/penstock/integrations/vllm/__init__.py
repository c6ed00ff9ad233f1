"""vLLM on Penstock: a plugin that replaces vLLM's queues, image cache and tensor transport, and edits no file of it.

vLLM finds `register` by its entry point and calls it in the API server, the engine core and each worker, before queues
and caches are made. Off unless PENSTOCK_VLLM says otherwise: settings.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import os

from penstock import stack_dump
from penstock.integrations.vllm import seams
from penstock.integrations.vllm.settings import LOGGER, Settings, fall_back, is_strict, read

# Where each part is replaced. Steps travel through the queue, which asks for them.
MODULES = {
    "queue": "penstock.integrations.vllm.queue",
    "images": "penstock.integrations.vllm.images",
    "tensors": "penstock.integrations.vllm.tensors",
}


def register() -> None:
    """Replaces the parts of vLLM that PENSTOCK_VLLM names; may be called again.

    A part that does not fit this vLLM, or cannot be loaded, stays vLLM's own, and the log has a sentence about it.

    Raises:
        ValueError, RuntimeError: with PENSTOCK_VLLM_STRICT=1 only, for a wrong value, or a part that stays vLLM's.
    """
    try:
        settings = read(os.environ)
    except ValueError as error:
        if is_strict():
            raise
        LOGGER.error("%s; vLLM runs as it is", error)
        return
    if not settings.parts:
        return
    fitting = frozenset(part for part in sorted(settings.parts) if _fits(part))
    stack_dump.register()
    settings = dataclasses.replace(settings, parts=fitting)
    replaced = [part for part in MODULES if part in fitting and _replace(part, settings)]
    if "steps" in fitting and "queue" in replaced:
        replaced.append("steps")
    LOGGER.info("penstock replaces of vLLM: %s", ", ".join(replaced) or "nothing")


def _fits(part: str) -> bool:
    try:
        sentence = _refusal_of_frontend(part) or seams.misfit(part)
    except Exception as error:  # of vLLM's modules, as they are imported
        sentence = f"{type(error).__name__}: {error}"
    if sentence is not None:
        fall_back(part, sentence)
        return False
    for growth in seams.growths(part):
        LOGGER.warning("%s, which penstock's %s does not know", growth, part)
    return True


def _refusal_of_frontend(part: str) -> str | None:
    is_rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")
    if is_rust and part in ("images", "tensors"):
        return "the frontend in Rust (VLLM_USE_RUST_FRONTEND) sends images and tensors by itself"
    return None


def _replace(part: str, settings: Settings) -> bool:
    try:
        importlib.import_module(MODULES[part]).replace(settings)
    except Exception as error:
        fall_back(part, f"{type(error).__name__}: {error}")
        return False
    return True
