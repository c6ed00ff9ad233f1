"""Processes that share device memory are killed: on a device if there is one, else on a driver without a device."""

from __future__ import annotations

import contextlib

import pytest

from tests import tiers
from tests.conftest import spawn

# Where torch or cuda-bindings is missing, this skips the rest.
from tests.support.libcuda import has_device, open_device


@pytest.mark.timeout(300 + 5 * tiers.DEVICE_DEATHS)
def test_deaths_of_either_end_leave_no_mapping_and_no_slice(seed: int) -> None:
    with contextlib.nullcontext() if has_device() else open_device():
        with spawn(_campaign, tiers.DEVICE_DEATHS, seed, within=240 + 5 * tiers.DEVICE_DEATHS) as campaign:
            campaign.join()
            assert campaign.exitcode == 0


def _campaign(deaths: int, seed: int) -> None:
    from tests.crash import device_ends  # opens a device

    device_ends.run_campaign(deaths, seed)
