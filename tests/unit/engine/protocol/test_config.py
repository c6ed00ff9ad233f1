"""What a cluster is told: every option is checked where it enters."""

from typing import Any

import pytest

from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice

SIMULATED = SimulatedDevice()


def test_config_defaults_are_one_process_of_each_kind() -> None:
    config = EngineConfig(simulated=SIMULATED)
    assert (config.data_parallel_size, config.tensor_parallel_size, config.output_processors) == (1, 1, 1)
    assert EngineConfig(simulated=SIMULATED, max_model_len=33, block_size=16).max_blocks_per_request == 3


def test_config_is_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        EngineConfig(simulated=SIMULATED).max_num_seqs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "expected model, a directory, or simulated"),
        ({"max_num_seqs": 0, "model": "m"}, "expected max_num_seqs to be a whole number from 1 to 65535, got 0"),
        ({"max_num_seqs": 2.5, "model": "m"}, "expected max_num_seqs to be a whole number from 1 to 65535, got 2.5"),
        ({"max_num_seqs": True, "model": "m"}, "expected max_num_seqs to be a whole number from 1 to 65535, got True"),
        ({"api_server_count": 33, "model": "m"}, "expected api_server_count to be a whole number from 1 to 32, got 33"),
        ({"output_processors": -1, "model": "m"}, "output_processors to be a whole number from 0 to 8, got -1"),
        (
            {"data_parallel_size": 16, "output_processors": 3, "model": "m"},
            "at most 63, as each .*, got 64",
        ),
        ({"step_timeout": "1", "model": "m"}, "expected step_timeout to be a number from 0 to 1000000, got '1'"),
        ({"step_timeout": float("nan"), "model": "m"}, "step_timeout to be a number from 0 to 1000000, got nan"),
        ({"async_scheduling": 1, "model": "m"}, "expected async_scheduling to be True or False, got 1"),
        ({"enforce_eager": "no", "model": "m"}, "expected enforce_eager to be True or False, got 'no'"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63, "model": "m"},
            r"expected max_num_batched_tokens of max_num_seqs \(64\) or more, got 63",
        ),
        ({"num_gpu_blocks_override": 0, "model": "m"}, "num_gpu_blocks_override to be a whole number from 1 to"),
        ({"threads": 0, "model": "m"}, "expected threads to be a whole number from 1 to"),
        ({"migration_limit": -1, "model": "m"}, "expected migration_limit to be a whole number from 0 to"),
        ({"migration_timeout": "x", "model": "m"}, "migration_timeout to be a number from 0 to 1000000, got 'x'"),
        ({"queue_timeout": -0.1, "model": "m"}, "expected queue_timeout to be a number from 0 to 1000000, got -0.1"),
        ({"queue_timeout": float("nan"), "model": "m"}, "queue_timeout to be a number from 0 to 1000000, got nan"),
        ({"queue_timeout": float("inf"), "model": "m"}, "queue_timeout to be a number from 0 to 1000000, got inf"),
        ({"queue_timeout": 1000000.1, "model": "m"}, "queue_timeout to be a number from 0 to 1000000, got 1000000.1"),
        ({"migration_max_seq_len": 0, "model": "m"}, "expected migration_max_seq_len to be a whole number from 1 to"),
        ({"end_ids": (3, -1), "model": "m"}, r"expected end_ids of 0 or more, got \(3, -1\)"),
        ({"runner": "draft", "model": "m"}, "expected runner to be auto, generate or pooling, got 'draft'"),
        ({"convert": "embed", "model": "m"}, "convert 'embed' needs runner 'pooling', got 'auto'"),
        ({"runner": "pooling", "convert": "none", "model": "m"}, "expected convert embed or classify with runner"),
        ({"runner": "pooling", "device": "cuda", "model": "m"}, "runner 'pooling' needs a model that CPUs of this"),
        ({"runner": "pooling", "simulated": SIMULATED}, "runner 'pooling' needs a model that CPUs of this machine"),
        ({"generation_config": "hf", "model": "m"}, "expected generation_config to be auto or vllm, got 'hf'"),
        ({"log_format": "xml", "model": "m"}, "expected log_format to be text or json, got 'xml'"),
        ({"log_level": "trace", "model": "m"}, "expected log_level to be debug, info, warning or error, got 'trace'"),
        ({"dtype": "int8", "model": "m"}, "expected dtype to be auto, float32, bfloat16 or float16, got 'int8'"),
        ({"device": "cuda:x", "model": "m"}, "expected device to be cpu, cuda, or cuda:N"),
        ({"devices": "1", "model": "m"}, "devices '1' need device 'cuda', got 'cpu'"),
        ({"device": "cuda", "devices": "0,1", "model": "m"}, "a device for each of 1 workers, got devices '0,1'"),
        (
            {"device": "cuda", "devices": "MIG-1", "model": "m"},
            "numbers or UUIDs .* of whole devices .*, got 'MIG-1': a slice .* CUDA_VISIBLE_DEVICES",
        ),
        (
            {"device": "cuda", "devices": "1,1", "tensor_parallel_size": 2, "model": "m"},
            "device 1 is twice in devices, which NCCL refuses: .* or collectives 'gloo'",
        ),
        ({"collectives": "nccl", "model": "m"}, "'nccl' need CUDA devices"),
        ({"mm_encoder_tp_mode": "rank", "model": "m"}, "mm_encoder_tp_mode to be weights, data or store, got 'rank'"),
        (
            {"mm_encoder_tp_mode": "store", "encoder_cache_nbytes": 0, "model": "m"},
            "needs a store of encodings: .* is 0",
        ),
        (
            {"encoder_cache_nbytes": -1, "model": "m"},
            r"encoder_cache_nbytes \(--encoder-cache-gb\) to be a whole number from 0 to",
        ),
        ({"speed": 1, "model": "m"}, "speed"),
    ],
)
def test_invalid_option_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_seconds": -1}, r"expected step_seconds \(--step-ms\) to be a number from 0 to 3600, got -1"),
        ({"vocabulary": 0}, "expected vocabulary to be a whole number from 1 to"),
        ({"end_id": 32_000}, r"expected end_id to be below vocabulary \(32000\), got 32000"),
        ({"end_one_in": 0}, "expected end_one_in to be a whole number from 1 to"),
    ],
)
def test_a_simulated_device_that_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SimulatedDevice(**options)


def nodes(**options: Any) -> Nodes:
    return Nodes(**{"count": 3, "address": "10.0.0.1", **options})


def test_groups_of_other_nodes_are_numbered_after_the_home_node() -> None:
    home = EngineConfig(simulated=SIMULATED, data_parallel_size=2, nodes=nodes())
    assert (home.is_headless, home.remote_groups, home.all_groups) == (False, 4, 6)
    assert [home.node_of(group) for group in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("device", "devices", "expected"),
    [
        ("cpu", "", ["cpu"] * 4),
        ("cuda:3", "", ["cuda:3", "cuda:4", "cuda:5", "cuda:6"]),
        ("cuda", "5, GPU-00112233,2,5", ["cuda:5", "cuda:GPU-00112233", "cuda:2", "cuda:5"]),
    ],
)
def test_devices_are_those_of_the_list_in_turn(device: str, devices: str, expected: list[str]) -> None:
    config = EngineConfig(
        model="m", device=device, devices=devices, data_parallel_size=2, tensor_parallel_size=2, collectives="gloo"
    )
    assert [config.device_of(group, worker) for group in range(2) for worker in range(2)] == expected


def test_a_node_without_servers_reaches_no_groups_but_its_own() -> None:
    config = EngineConfig(simulated=SIMULATED, data_parallel_size=2, nodes=nodes(rank=1))
    assert (config.is_headless, config.remote_groups, config.all_groups) == (True, 0, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": 1}, r"expected count \(--nnodes\) to be a whole number from 2 to 16, got 1"),
        ({"rank": 3}, r"expected rank \(--node-rank\) from 0 to 2, got 3"),
        ({"port": 0}, r"expected port \(--master-port\) to be a whole number from 1 to 65535, got 0"),
        ({"address": ""}, "expected address"),
        (
            {"tls_cert": "a.pem", "tls_ca": "ca.pem"},
            "needs all of tls_cert, tls_key and tls_ca .* got 'a.pem', '', 'ca",
        ),
    ],
)
def test_nodes_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        nodes(**options)


def test_groups_of_all_nodes_count_against_the_lanes_of_a_server() -> None:
    with pytest.raises(ValueError, match=r"at most 63, as each .*, got 64"):
        EngineConfig(simulated=SIMULATED, data_parallel_size=16, output_processors=1, nodes=nodes(count=2))


# ── the workers of a group on several nodes ──────────────────────────────────────────────────────────────────────────
def spread(rank: int, **options: Any) -> EngineConfig:
    where = nodes(rank=rank, tensor_parallel_over_nodes=True)
    return EngineConfig(**{"model": "m", "data_parallel_size": 2, "tensor_parallel_size": 6, "nodes": where, **options})


def test_ranks_over_nodes_are_divided_evenly_and_cores_are_at_home() -> None:
    home, other = spread(0), spread(2)
    assert (home.ranks, home.ranks_of(1), other.ranks) == (range(2), range(2, 4), range(4, 6))
    assert (home.has_cores, list(home.rank_nodes), home.all_groups, home.node_of(1)) == (True, [1, 2], 2, 0)
    assert (other.has_cores, list(other.rank_nodes), other.all_groups) == (False, [], 2)


@pytest.mark.parametrize(("is_over_nodes", "size"), [(False, 2), (True, 6)])
def test_devices_are_counted_on_each_node(is_over_nodes: bool, size: int) -> None:
    for rank in range(3):
        where = nodes(rank=rank, tensor_parallel_over_nodes=is_over_nodes)
        config = spread(rank, device="cuda", tensor_parallel_size=size, nodes=where)
        devices = [config.device_of(group, worker) for group in range(2) for worker in config.ranks]
        assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_ranks_over_nodes_share_no_store_of_encodings() -> None:
    assert spread(0, store_nbytes=1 << 20).encoder_tp_mode == "weights"
    assert EngineConfig(model="m", store_nbytes=1 << 20).encoder_tp_mode == "store"
    assert EngineConfig(model="m", store_nbytes=1 << 20, device="cuda").encoder_tp_mode == "data"
    with pytest.raises(ValueError, match="needs all workers of an engine on one node"):
        spread(0, store_nbytes=1 << 20, mm_encoder_tp_mode="store")


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a multiple of the number of nodes \(3\) .*, got 4"):
        spread(0, tensor_parallel_size=4)
    with pytest.raises(TypeError, match="tensor_parallel_over_nodes to be True or False"):
        nodes(tensor_parallel_over_nodes=1)
