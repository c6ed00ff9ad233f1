"""The peer interpreter: another Python, named by PENSTOCK_PEER_PYTHON, that has what this one lacks (torch, vllm).

The peer interpreter imports this file, too, and has no penstock.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache

from bench.impls import Unavailable

VARIABLE = "PENSTOCK_PEER_PYTHON"


@cache
def python_with(module: str) -> str:
    """An interpreter that has this module: this one, or the peer. Raises Unavailable if there is none."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    named = os.environ.get(VARIABLE)
    if not named:
        raise Unavailable(f"{module} is not installed, and {VARIABLE} names no interpreter that has it")
    path = shutil.which(named)
    if path is None:
        raise Unavailable(f"{VARIABLE} names {named}, which is not an executable")
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([path, "-c", probe], check=False, capture_output=True).returncode != 0:
        raise Unavailable(f"{module} is not installed in {path} ({VARIABLE})")
    return path
