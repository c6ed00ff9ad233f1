"""The benchmarks of nodes as a user starts them, small: of the bridge, every way of which carries its frames, and of a
server of two nodes."""

from pathlib import Path

from tests import tiers
from tests.support.benches import quick_run


@tiers.needs_all
def test_a_quick_run_of_the_bridge_measures_every_way_and_a_value(tmp_path: Path) -> None:
    records, tables = quick_run("-m bench.nodes.bridge", "--out", tmp_path)
    measured = {(record["impl"], record["nbytes"]) for record in records if record["case"] == "bridge"}
    assert measured == {
        (way, nbytes) for way in ("penstock", "penstock-bridge", "zeromq-tcp") for nbytes in (120, 2600)
    }
    assert all(record["ms"] > 0 for record in records if record["case"] == "value")
    assert {record["case"] for record in records} >= {"value", "idle", "target"}
    assert "Targets" in tables


@tiers.needs_all
def test_a_quick_run_measures_the_first_token_of_an_engine_of_each_node(tmp_path: Path) -> None:
    records, _ = quick_run("-m bench.nodes", "--only", "remote-group", "--out", tmp_path)
    assert [record["impl"] for record in records if record["case"] == "remote-group"][-1] == "added"
