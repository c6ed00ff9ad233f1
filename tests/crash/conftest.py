"""What tests of deaths share."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.launcher import back_off
from tests.crash.zygote import Zygote
from tests.support import tiny_models
from tests.support.kept_fork_server import kept_fork_server  # noqa: F401


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(autouse=True)
def shared_fork_server(kept_fork_server: None) -> None:  # noqa: F811
    """Launchers of this process share fork servers."""


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of this process start a unit again at once, however short its life was."""
    monkeypatch.setattr(back_off, "SECONDS", (0.0, *[0.02] * 8))
    monkeypatch.setattr(back_off, "MIN_START_INTERVAL_S", 0.0)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by a process of its own, so that this one does without torch."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, tiny_models.__file__, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder
