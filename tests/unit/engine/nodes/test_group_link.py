"""What the two sides of a group's link agree on: the secret, the port, the facts."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.bridge.link_offer import LinkOffer, differences
from penstock.engine.nodes.group_link import group_link, home_number, model_facts, model_word, node_secret, port_of
from penstock.engine.nodes.rank_link import rank_link
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice
from penstock.environment import NODE_SECRET

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
    monkeypatch.setenv(NODE_SECRET.name, "0f" * 32)
    assert node_secret() == b"\x0f" * 32


@pytest.mark.parametrize("text", ["", "0f" * 31, "0f" * 33, "xy" * 32])
def test_another_secret_is_refused_and_not_repeated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_SECRET.name, text)
    with pytest.raises(ValueError, match="64 hexadecimal digits in PENSTOCK_NODE_SECRET") as caught:
        node_secret()
    assert not text or text not in str(caught.value)


def write_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    header = json.dumps({"a": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return folder


def facts_of(model: Path) -> dict[str, str]:
    config = EngineConfig(model=str(model))
    return model_facts(config, model_word(config))


def test_nodes_with_copies_of_a_model_agree_and_other_parts_are_named(tmp_path: Path) -> None:
    home = facts_of(write_model(tmp_path / "home"))
    assert home == facts_of(write_model(tmp_path / "copy"))
    fine_tune = facts_of(write_model(tmp_path / "fine-tune", b"WEIGHTS"))
    assert [name for name in home if fine_tune[name] != home[name]] == ["model_fingerprint"]
    other = write_model(tmp_path / "tokenizer")
    (other / "tokenizer.json").write_text("{ }")
    different = [name for name in home if facts_of(other)[name] != home[name]]
    assert different == ["tokenizer.json", "model_fingerprint"]


def test_both_sides_of_a_link_say_that_the_weights_differ(tmp_path: Path) -> None:
    models = [write_model(tmp_path / "home"), write_model(tmp_path / "node", b"WEIGHTS")]
    configs = [replace(HOME, simulated=None, model=str(model)) for model in models]
    words = [model_word(config) for config in configs]
    for specs in (
        [group_link(config, 2, "", word) for config, word in zip(configs, words, strict=True)],
        [rank_link(config, 0, 1, "") for config in configs],
    ):
        here, there = map(LinkOffer.of, specs)
        assert differences(here, there) == [f"model_fingerprint is {words[0]:016x} here, {words[1]:016x} there"]
        assert differences(there, here) == [f"model_fingerprint is {words[1]:016x} here, {words[0]:016x} there"]


def test_a_simulated_device_has_no_model_to_compare() -> None:
    assert model_facts(HOME, model_word(HOME)) == {"model_fingerprint": "0" * 16}
