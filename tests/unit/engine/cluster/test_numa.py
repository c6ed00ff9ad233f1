"""NUMA nodes: which one is chosen, and which are refused."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from penstock import MemoryOptions, cli
from penstock.engine import cli_args
from penstock.engine.cluster import numa
from penstock.engine.cluster.topology import Cluster
from penstock.engine.launcher.preflight import require_startable
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice, parse_or_auto
from penstock.memory import segment


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, processors in ((0, "0-3,8-11"), (1, "4-7,12")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{processors}\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)


def numa_node_of(text: str) -> int | None:
    words = ["serve", "--device-model", "simulated", "--numa-node", text]
    return cli_args.engine_config(cli.parser().parse_args(words)).numa_node


def test_node_is_that_of_all_processors_or_none(two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.nodes() == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12}}
    for processors, node in (({2, 8}, 0), ({4, 12}, 1), ({3, 4}, None), ({99}, None)):
        assert numa.node_of(processors) == node
        monkeypatch.setattr("os.sched_getaffinity", lambda _, processors=processors: processors)
        assert numa_node_of("auto") == node
    assert numa_node_of("1") == 1


def test_a_machine_of_one_node_or_none_binds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path)
    assert numa.node_of({0}) is None
    numa.require_node(7)  # it is not known that there is none
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-1\n")
    assert numa.node_of({0}) is None


def test_missing_numa_node_is_refused_before_any_process_starts(two_nodes: None) -> None:
    with pytest.raises(ValueError, match="there is no NUMA node 7 here, but 0, 1"):
        require_startable(EngineConfig(simulated=SimulatedDevice(), numa_node=7))
    for text in ("-1", "one", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="a number, or auto"):
            parse_or_auto(text)


def test_shared_memory_of_a_tree_lies_where_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[tuple[object, object]] = []
    create_segment = segment.create_segment

    def recorded(name: str, shape: dict[str, Any], memory: MemoryOptions, **options: Any) -> Any:
        wishes.append((memory.huge_pages, memory.numa_node))
        return create_segment(name, shape, memory, **options)

    for module in ("penstock.channel.channel", "penstock.tensor.store"):
        monkeypatch.setattr(f"{module}.create_segment", recorded)
    config = EngineConfig(simulated=SimulatedDevice(), numa_node=0, huge_pages=True, store_nbytes=4 << 20)
    Cluster.open(config).close()
    assert set(wishes) == {(False, 0), (True, 0)} and wishes.count((True, 0)) == 1
    with pytest.raises(ValueError, match="huge_pages are for the store"):
        EngineConfig(simulated=SimulatedDevice(), huge_pages=True)
