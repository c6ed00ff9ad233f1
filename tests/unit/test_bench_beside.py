"""`scripts/bench NAME --beside PYTHON`: which figures are compared, and what is printed of runs of two builds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness import beside


def run_of(*records: dict[str, Any]) -> dict[beside.Row, beside.Record]:
    return beside.rows_of(json.dumps({"bench": "fake", "impl": "penstock", **record}) for record in records)


def test_ratio_is_of_medians_and_above_one_where_this_build_is_worse() -> None:
    ours = [run_of({"case": "send", "nbytes": 64, "p50_us": us, "per_s": 1000}) for us in (3.0, 9.0, 2.0)]
    other = [run_of({"case": "send", "nbytes": 64, "p50_us": us, "per_s": 1500}) for us in (2.0, 2.0, 1.0)]
    assert list(beside.compare(ours, other)) == [
        ("send, penstock, nbytes 64", "p50_us", 3.0, 2.0, 1.5),
        ("send, penstock, nbytes 64", "per_s", 1000, 1500, 1.5),
    ]


def test_records_of_a_case_are_compared_in_their_order() -> None:
    runs = [
        run_of({"case": "a", "size": 1, "each_ms": ms}, {"case": "a", "size": 2, "each_ms": 8 * ms}) for ms in (1, 2)
    ]
    rows = [(item.row, item.ratio) for item in beside.compare(runs[1:], runs[:1])]
    assert rows == [("a, penstock, size 1", 2), ("a, penstock, size 2", 2)]


def test_only_costs_and_rates_that_every_run_has_are_compared() -> None:
    first = run_of(
        {"case": "a", "p99_us": 1, "max_us": 1, "count": 1, "quiet": True}, {"case": "target", "figure_ms": 1}
    )
    second = run_of({"case": "a", "p99_us": 2, "max_us": 2, "count": 2, "quiet": True}, {"case": "b", "p50_us": 1})
    assert not list(beside.compare([first], [second]))


def interpreter(folder: Path, milliseconds: float) -> Path:
    """Stands in for a Python that has penstock: says where, and runs any benchmark at once."""
    record = json.dumps({"bench": "fake", "case": "kill", "impl": "penstock", "told_ms": [0, milliseconds, 99]})
    path = folder / f"python-{milliseconds}"
    path.write_text(f"#!/bin/sh\n[ $1 = -c ] && echo {folder}/src/penstock/__init__.py || echo '{record}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("limit", "status", "mark"), [("1.3", 0, ""), ("1.2", 1, "ABOVE")])
def test_figures_above_the_limit_are_marked_and_fail_the_command(
    limit: str,
    status: int,
    mark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(sys, "executable", str(interpreter(tmp_path, 5.0)))
    command = [
        "deaths",
        "--beside",
        str(interpreter(tmp_path, 4.0)),
        "--rounds",
        "3",
        "--limit",
        limit,
        "--gigabytes=0",
    ]
    assert beside.main(command) == status
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["kill,", "penstock:"] and row.split()[2:] == [
        "told_ms",
        "5",
        "4",
        "1.250",
        *mark.split(),
    ]
