"""What tests of deaths share."""

from collections.abc import Iterator

import pytest

from penstock.engine.launcher import back_off
from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of this process start a unit again at once, however short its life was."""
    monkeypatch.setattr(back_off, "SECONDS", (0.0, *[0.02] * 8))
    monkeypatch.setattr(back_off, "MIN_START_INTERVAL_S", 0.0)
