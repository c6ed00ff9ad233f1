"""What the two sides of a rank link agree on: port, name, and every option that decides what a rank computes."""

import pytest
from msgspec.structs import replace

from penstock.engine.nodes.rank_link import rank_link, rank_port
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice

NODES = Nodes(count=3, address="10.0.0.1", port=500, tensor_parallel_over_nodes=True)
HOME = EngineConfig(simulated=SimulatedDevice(), data_parallel_size=2, tensor_parallel_size=3, nodes=NODES)


def test_each_group_and_other_node_has_a_port_and_a_link() -> None:
    places = [(group, node) for group in range(2) for node in (1, 2)]
    assert [rank_port(NODES, *place) for place in places] == [500, 501, 502, 503]
    assert len({rank_link(HOME, *place, "").link for place in places}) == 4


@pytest.mark.parametrize("option", ["block_size", "max_num_batched_tokens", "threads", "num_gpu_blocks_override"])
def test_options_that_decide_what_a_rank_computes_are_facts_of_the_link(option: str) -> None:
    other = replace(HOME, **{option: (getattr(HOME, option) or 0) + 1})
    here, there = rank_link(HOME, 0, 1, ""), rank_link(other, 0, 1, "")
    assert [name for name in here.same if here.same[name] != there.same[name]] == [option]
