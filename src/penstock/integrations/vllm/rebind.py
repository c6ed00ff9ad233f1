"""A plugin of pytest, `-p penstock.integrations.vllm.rebind`: replaces vLLM's parts before test modules import them.

Processes spawned by tests also run this module first, in the place of multiprocessing's main module.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from penstock.integrations.vllm import register


def reach_spawned(library: str) -> None:
    """Makes spawned children of `library` (multiprocessing, or the fork multiprocess) run this module."""
    spawn: Any = importlib.import_module(f"{library}.spawn")
    prepared = spawn.get_preparation_data

    def with_this_module(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepared(name)
        if "init_main_from_path" not in data:  # pytest's own main module does nothing in a child
            data["init_main_from_name"] = __spec__.name
        return data

    spawn.get_preparation_data = with_this_module


register()
for library in ("multiprocessing", "multiprocess"):
    if importlib.util.find_spec(library) is not None:
        reach_spawned(library)
