"""`penstock doctor`: each subject has a line, and what is missing is named."""

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from penstock import _native, cli
from penstock.engine.cluster.cuda_devices import Devices, TorchBuild
from penstock.tools import doctor
from penstock.tools.doctor import Finding, examine_model, examine_packages, examine_port, examine_torch

ASKED = doctor._asked_of_torch


@pytest.fixture(autouse=True)
def torch_is_not_imported_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It takes seconds; one test asks the real one."""
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "torch_build", lambda: TorchBuild("2.13.0", "13.0", None))
        patched.setattr(doctor, "_asked_of_torch", lambda: ("2.13.0", "13.0", 3.21, [["NVIDIA H100", 80 << 30]]))
        yield


def test_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    subjects = [
        *("penstock", "kernel", "memfd", "pidfd", "futex", "/proc", "memory", "cpus", "descriptors", "processes")
    ]
    subjects += ["huge pages", "numa", "engine", "videos", "torch", "cuda", "port", "model"]
    for line, subject in zip(lines, subjects, strict=True):
        assert line.split()[0] in ("ok", "warning")
        assert subject in line


def test_doctor_names_what_limits_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, owner = _native.memory_available()
    assert nbytes > 0
    assert owner in ("the machine", "its control group")
    monkeypatch.setattr(_native, "memory_available", lambda: (3 << 20, "a small box"))
    cli.main(["doctor"])
    assert "3.0 MiB available, as a small box leaves them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spin", "text"),
    [
        ((300_000, None), "waits spin for 300 µs at most"),
        ((50_000, "a control group limits processor time"), "at most: a control group limits processor time"),
        ((0, "there is one processor"), "waits never spin"),
    ],
)
def test_doctor_reports_how_long_waits_spin(
    spin: tuple[int, str | None], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "max_spin", lambda: spin)
    cli.main(["doctor"])
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(("module", "name"), [(os, "pidfd_open"), (os, "P_PIDFD"), (signal, "pidfd_send_signal")])
def test_doctor_names_missing_modules_of_python(
    module: Any, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, name)
    assert cli.main(["doctor"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("missing"))
    assert line.split()[1] == "pidfd" and f"built without {name}" in line


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_torch_and_its_devices_are_named() -> None:
    torch, cuda = examine_torch()
    assert torch == Finding("ok", "torch", "2.13.0, built for CUDA 13.0, imported in 3.2 s")
    assert cuda == Finding("ok", "cuda", "1 device: NVIDIA H100 (80.0 GiB)")


@pytest.mark.parametrize(("number", "level"), [(0, "ok"), (None, "warning"), (1, "warning")])
def test_doctor_reports_the_driver_when_torch_finds_no_device(
    number: int | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_asked_of_torch", lambda: ("2.13.0", "13.0", 3.21, []))
    monkeypatch.setattr(doctor, "cuda_devices", lambda: Devices(number, "the driver says so"))
    _, cuda = examine_torch()
    assert cuda.level == level and "finds no device: the driver says so" in cuda.text


def test_doctor_queries_torch_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(doctor, "_asked_of_torch", ASKED)
    torch, cuda = examine_torch()
    assert torch.level == "ok" and torch.text.startswith(metadata.version("torch")) and cuda.subject == "cuda"


def test_a_torch_that_cannot_be_imported_is_missing_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_asked_of_torch", ASKED)
    monkeypatch.setattr(doctor, "ASK_TORCH", "raise ImportError('libcudart.so.13: not found')")
    (torch,) = examine_torch()
    assert torch.level == "missing" and torch.text.endswith("ImportError: libcudart.so.13: not found")


def test_doctor_names_missing_packages_with_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("starlette", "tokenizers"):
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    result = examine_packages()
    assert result.level == "warning" and result.text.startswith("not installed: starlette, tokenizers; ")
    assert f"{sys.executable} -m pip install" in result.text


def test_taken_port_is_named_and_counts_only_when_requested() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = examine_port("127.0.0.1", port)
        assert result.level == "missing" and f"{port} of 127.0.0.1: Address already in use" in result.text
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(doctor, "USUAL_PORT", port)
            assert examine_port("127.0.0.1", None).level == "warning"
    assert examine_port("127.0.0.1", port) == Finding("ok", "port", f"{port} of 127.0.0.1 is free")
    assert examine_port("127.0.0.1", 70_000).level == "missing"


def test_a_directory_that_could_not_be_served_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    assert cli.main(["doctor", str(tmp_path)]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("missing  model") and "(model_type 'gemma3') are not supported" in line
    result = examine_model("")
    assert result.level == "ok" and result.text.startswith("penstock-shapes: LlavaForConditionalGeneration, 6.9 MiB")
