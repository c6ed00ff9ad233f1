"""What the two sides of a group's link agree on: the secret, the port, the facts."""

import pytest
from msgspec.structs import replace

from penstock.engine.nodes.group_link import (
    SECRET_VARIABLE,
    group_link,
    home_number,
    node_secret,
    port_of,
)
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice

HOME = EngineConfig(
    simulated=SimulatedDevice(), data_parallel_size=2, nodes=Nodes(count=3, address="10.0.0.1", port=500)
)


def on_node(rank: int) -> EngineConfig:
    return replace(HOME, nodes=Nodes(count=3, rank=rank, address="10.0.0.1", port=500))


def test_both_sides_compute_the_same_port_and_link_for_each_group() -> None:
    ports = []
    for rank in (1, 2):
        for group in range(2):
            number = home_number(on_node(rank), group)
            assert HOME.node_of(number) == rank
            there, here = group_link(on_node(rank), number, "uplink", 0), group_link(HOME, number, "bridge", 0)
            assert (there.link, there.same) == (here.link, here.same)
            assert HOME.nodes is not None
            ports.append(port_of(HOME.nodes, HOME.data_parallel_size, number))
    assert ports == [500, 501, 502, 503]


@pytest.mark.parametrize("option", ["max_model_len", "max_num_seqs", "output_processors", "api_server_count"])
def test_options_that_nodes_have_in_common_are_facts_of_the_link(option: str) -> None:
    other = replace(HOME, **{option: getattr(HOME, option) + 1})
    assert group_link(other, 2, "", 0).same[option] != group_link(HOME, 2, "", 0).same[option]


def test_a_secret_has_32_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "0f" * 32)
    assert node_secret() == b"\x0f" * 32


@pytest.mark.parametrize("text", ["", "0f" * 31, "0f" * 33, "xy" * 32])
def test_another_secret_is_refused_and_not_repeated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, text)
    with pytest.raises(ValueError, match="64 hexadecimal digits in PENSTOCK_NODE_SECRET") as caught:
        node_secret()
    assert not text or text not in str(caught.value)
