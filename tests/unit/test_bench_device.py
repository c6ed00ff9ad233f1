"""bench device: how idle time is counted. tests/e2e/test_device.py rehearses its cases."""

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from bench.device_cases.idle_share import idle_of


def test_idle_time_counts_gaps_after_the_first_tenth() -> None:
    intervals = [(0.0, 2.0), (50.0, 500.0), (400.0, 597.0), (600.0, 800.0), (820.0, 1000.0)]
    free, long, window = idle_of(intervals)
    assert window == 900
    assert free == pytest.approx(23 / 900)
    assert long == pytest.approx(20 / 900)
