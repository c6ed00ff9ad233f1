"""The peer interpreter: another Python, named by PENSTOCK_PEER_PYTHON, that has what this one lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from bench.impls import Unavailable

VARIABLE = "PENSTOCK_PEER_PYTHON"


@cache
def python_with(module: str) -> str:
    """The peer interpreter's path. Raises Unavailable if none is named, or if it does not have `module`."""
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
