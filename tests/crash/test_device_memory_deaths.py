"""Processes that share device memory are killed: on a device if there is one, else on a driver without a device."""

from __future__ import annotations

import contextlib
import importlib
import sys

import pytest

from tests import tiers
from tests.conftest import spawn

# Where torch or cuda-bindings is missing, this skips the rest.
from tests.support.libcuda import has_device, open_device

# isort: split
import torch


def test_import_of_device_ends_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are forks of a process that imports it: a fork of a process that has asked the driver has no device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("is_available", "set_device", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asks the driver"))
    monkeypatch.delitem(sys.modules, "tests.crash.device_ends", raising=False)
    monkeypatch.setattr("tests.crash.device_ends", None, raising=False)
    assert not importlib.import_module("tests.crash.device_ends").IS_DOUBLE
    monkeypatch.delitem(sys.modules, "tests.crash.device_ends")


@pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")
@pytest.mark.timeout(300 + 5 * tiers.DEVICE_DEATHS)
def test_deaths_of_either_end_leave_no_mapping_and_no_slice(seed: int) -> None:
    with contextlib.nullcontext() if has_device() else open_device():
        with spawn(_campaign, tiers.DEVICE_DEATHS, seed, within=240 + 5 * tiers.DEVICE_DEATHS) as campaign:
            campaign.join()
            assert campaign.exitcode == 0


def _campaign(deaths: int, seed: int) -> None:
    from tests.crash import device_ends  # opens a device

    device_ends.run_campaign(deaths, seed)
