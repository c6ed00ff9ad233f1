"""Scripts print help, and do nothing else, for `--help`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import file_of, imports
from tests.test_architecture import ROOT

SCRIPTS = [path for path in sorted((ROOT / "scripts").iterdir()) if os.access(path, os.X_OK) and path.name != "prose"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_prints_only_help_for_help(script: Path, tmp_path: Path) -> None:
    """`make`, which would install packages, is a program that fails."""
    make = tmp_path / "make"
    make.write_text("#!/bin/sh\necho make ran >&2\nexit 1\n")
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(SCRIPTS) >= 10 and not done.stdout.startswith("#") and len(done.stdout.split()) > 10


def test_unknown_kind_of_tests_is_refused_by_name_before_any_begins() -> None:
    """The name comes last: of all other kinds each is known."""
    outside = {name: value for name, value in os.environ.items() if name != "PENSTOCK_STAGE"}
    done = subprocess.run(
        ["scripts/test", "all,nowhere"], capture_output=True, text=True, timeout=60, cwd=ROOT, env=outside
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("there is no kind nowhere of tests")


def test_vllm_env_asks_for_missing_packages_but_not_for_devices(tmp_path: Path) -> None:
    """The requirements of a release without a build for the CPU: its compiled operators come from another release."""
    program = re.findall(r"<<'PY'\n(.*?)^PY$", (ROOT / "scripts" / "vllm-env").read_text(), re.MULTILINE | re.DOTALL)[1]
    names = ("no-such-package>=3", "pytest", "pytest<1", "torch==1", "nvidia-no-such-package>=1", "flashinfer-no-such")
    metadata = "".join(f"Requires-Dist: {name}\n" for name in names)
    (tmp_path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: 1\n{metadata}")
    command = [sys.executable, "-c", program, "vllm", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["no-such-package>=3", "pytest<1"]


def test_vllm_env_names_the_interpreter_without_the_tests_of_vllm(tmp_path: Path) -> None:
    """The interpreter is there, and cannot download."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no index >&2\nexit 7\n")
    python.chmod(0o755)
    done = subprocess.run(["scripts/vllm-env", tmp_path], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (7, f"PENSTOCK_PEER_PYTHON={python}\n"), done.stderr


def test_model_tests_import_only_what_makes_their_stage_run() -> None:
    """`make test` leaves `model` out when none of these paths changed."""
    paths = re.search(r'\[model\]="([^"]+)"', (ROOT / "scripts" / "test").read_text())[1].split()
    assert all((ROOT / path).exists() for path in paths)
    waiting = list((ROOT / "tests" / "model").glob("*.py"))
    known = set(waiting)
    while waiting:
        more = {file for name in imports(waiting.pop()) if (file := file_of(name))} - known
        known |= more
        waiting += more
    assert not [str(file) for file in known if not any(file.is_relative_to(ROOT / path) for path in paths)]
