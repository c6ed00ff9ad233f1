"""The interpreter that has vLLM, with this penstock visible to it: a folder for its PYTHONPATH, nothing is installed.

PENSTOCK_PEER_PYTHON names the interpreter; scripts/vllm-env makes one.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.impls.peer import Unavailable, python_with

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
# Of vLLM on a machine without a network and without a GPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def python_of_vllm() -> str:
    """The interpreter. Skips the test that asks, with the reason, where there is none that can load our core."""
    try:
        python = python_with("vllm")
    except Unavailable as reason:
        pytest.skip(f"{reason}; scripts/vllm-env makes one")
    tag = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([python, "-c", tag], check=True, capture_output=True, text=True).stdout.strip()
    if suffix != sysconfig.get_config_var("EXT_SUFFIX"):
        pytest.skip(f"{python} loads modules that end in {suffix}, and our core is built for another interpreter")
    return python


def write_site(folder: Path) -> Path:
    """Writes penstock as an installed package into the folder: sources, compiled modules, and its entry points."""
    import penstock._native
    import penstock.engine._native

    package = folder / "penstock"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(penstock._native.__file__, package)
    shutil.copy(penstock.engine._native.__file__, package / "engine")
    installed = importlib.metadata.distribution("penstock")
    metadata = folder / f"penstock-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(installed.read_text(name) or "")
    return folder


def environment(site: Path, **variables: str) -> Mapping[str, str]:
    """The environment of a process of the peer interpreter; without variables of ours but those that are given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**inherited, **ENVIRONMENT, "PYTHONPATH": str(site), **variables}


def write_model(python: str, name: str, folder: Path) -> Path:
    """Writes the tiny models into the folder, with that interpreter, and returns the path of this one."""
    command = [python, str(ROOT / "tests" / "support" / "tiny_models.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / name


if __name__ == "__main__":  # for a look by hand: python -m tests.support.peer FOLDER
    print(write_site(Path(sys.argv[1])))
