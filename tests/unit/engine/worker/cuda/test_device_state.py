"""What a device keeps of each slot, written by interpreted kernels, beside the state of the core in each step."""

from __future__ import annotations

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Asked  # noqa: F401

# isort: split
from tests.support.interpreter import require_interpreter

require_interpreter()

from tests import tiers  # noqa: E402
from tests.support.device_state_cases import check_long_write, check_state  # noqa: E402


@pytest.mark.parametrize("seed", range(2 if tiers.TIER == "push" else 12))
def test_state_is_that_of_the_core_in_each_step(seed: int) -> None:
    """With joins, prefix hits, chunks, preemptions and resumptions. Steps without news write nothing."""
    device = check_state(seed)
    assert device.preemptions > 0 and device.cached_tokens > 0  # type: ignore[attr-defined]
    assert device.quiet_steps > 5 and device.written_steps > 5 and device.mixed_steps > 5


def test_writes_longer_than_a_program_are_whole() -> None:
    check_long_write()
