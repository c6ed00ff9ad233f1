"""The three ways that vLLM is run, each as an environment of its processes. No file of vLLM is edited for any of them.

A plugin of vLLM is an entry point, found in the metadata of an installed package: each way has a folder of such
metadata, on PYTHONPATH. For ours it has penstock, too, as this interpreter has it: nothing is installed for vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.output import ROOT
from bench.impls import Unavailable
from bench.impls.peer import python_with

AS_IT_IS, PARKING, OURS = "vllm", "vllm-parking", "penstock"
WAYS = (AS_IT_IS, PARKING, OURS)
ON_DEVICE = "penstock-device"  # ours, with cached images as views, as where a worker copies them to a device
GROUP = "vllm.general_plugins"
COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two workers on two processors: more threads of theirs wait for each other
}
# Ours alone; what the environment of the benchmark says goes before it.
SETTINGS = {"PENSTOCK_VLLM": "1", "PENSTOCK_VLLM_STRICT": "1"}


@dataclass(frozen=True)
class Way:
    name: str
    python: str
    environment: Mapping[str, str]


def find(name: str, folder: Path, plugins: Mapping[str, str] | None = None) -> Way:
    """Returns a way with metadata in `folder`; `plugins`: more entry points. Raises Unavailable."""
    python = python_with("vllm")
    folder = folder / name
    folder.mkdir(parents=True)
    points = dict(plugins or {})
    settings = dict.fromkeys(SETTINGS, "0")
    if name == PARKING:
        points["penstock_bench_parking"] = "bench.vllm_cases.parking:register"
    if name == OURS:
        settings = {key: os.environ.get(key, value) for key, value in SETTINGS.items()}
        _link_penstock(folder, python)
    if points:
        _write_metadata(folder, points)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return Way(name, python, {**COMMON, **settings, "PYTHONPATH": path})


def on_device(way: Way) -> Way:
    return replace(way, name=ON_DEVICE, environment={**way.environment, "PENSTOCK_VLLM_VIEWS": "always"})


def _write_metadata(folder: Path, points: Mapping[str, str]) -> None:
    info = folder / "penstock_bench-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-bench\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {place}" for name, place in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _link_penstock(folder: Path, python: str) -> None:
    """Links the package and its native core, which lie apart in an editable install, and copies its metadata."""
    distribution = importlib.metadata.distribution("penstock")
    if not distribution.entry_points.select(group=GROUP):
        raise Unavailable(
            f"penstock {distribution.version} has no entry point in {GROUP}: run `make .venv/stamp-bench`"
        )
    package, core = importlib.util.find_spec("penstock"), importlib.util.find_spec("penstock._native")
    assert package is not None and package.origin and core is not None and core.origin, "the benchmark imports both"
    suffix = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    if not core.origin.endswith(suffix):
        raise Unavailable(
            f"{Path(core.origin).name} is not for {python}, which loads *{suffix}: use one version of both"
        )
    here = folder / "penstock"
    here.mkdir()
    for part in (*Path(package.origin).parent.iterdir(), Path(core.origin)):
        if part.name != "__pycache__" and not (here / part.name).exists():
            (here / part.name).symlink_to(part)
    info = folder / f"penstock-{distribution.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(distribution.read_text(name) or "")
