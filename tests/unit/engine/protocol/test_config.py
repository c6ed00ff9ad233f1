"""What a cluster is told: every option is checked where it enters."""

from typing import Any

import pytest

from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice

SIMULATED = SimulatedDevice()


def test_what_is_not_said_has_a_default_that_works() -> None:
    config = EngineConfig(simulated=SIMULATED)
    assert (config.data_parallel_size, config.tensor_parallel_size, config.output_processors) == (1, 1, 1)
    assert EngineConfig(simulated=SIMULATED, max_model_len=33, block_size=16).max_blocks_per_request == 3


def test_what_is_said_stays_as_it_is() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        EngineConfig(simulated=SIMULATED).max_num_seqs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "expected model, a directory, or simulated"),
        ({"max_num_seqs": 0, "model": "m"}, "max_num_seqs is between 1 and 65535, not 0"),
        ({"max_num_seqs": 2.5, "model": "m"}, "max_num_seqs is a whole number, not 2.5"),
        ({"max_num_seqs": True, "model": "m"}, "max_num_seqs is a whole number, not True"),
        ({"api_server_count": 33, "model": "m"}, "api_server_count is between 1 and 32, not 33"),
        ({"output_processors": -1, "model": "m"}, "output_processors is between 0 and 8, not -1"),
        (
            {"data_parallel_size": 16, "output_processors": 3, "model": "m"},
            "at most 63, as each .*: not 64",
        ),
        ({"step_timeout": "1", "model": "m"}, "step_timeout is a number, not '1'"),
        ({"step_timeout": float("nan"), "model": "m"}, "step_timeout is between 0 and 1000000.0, not nan"),
        ({"async_scheduling": 1, "model": "m"}, "async_scheduling is True or False, not 1"),
        ({"enforce_eager": "no", "model": "m"}, "enforce_eager is True or False, not 'no'"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63, "model": "m"},
            r"max_num_batched_tokens is at least max_num_seqs \(64\), not 63",
        ),
        ({"num_gpu_blocks_override": 0, "model": "m"}, "num_gpu_blocks_override is between 1 and"),
        ({"threads": 0, "model": "m"}, "threads is between 1 and"),
        ({"migration_limit": -1, "model": "m"}, "migration_limit is between 0 and"),
        ({"migration_timeout": "x", "model": "m"}, "migration_timeout is a number, not 'x'"),
        ({"queue_timeout": -0.1, "model": "m"}, "queue_timeout is between 0 and 1000000.0, not -0.1"),
        ({"queue_timeout": float("nan"), "model": "m"}, "queue_timeout is between 0 and 1000000.0, not nan"),
        ({"queue_timeout": float("inf"), "model": "m"}, "queue_timeout is between 0 and 1000000.0, not inf"),
        ({"queue_timeout": 1000000.1, "model": "m"}, "queue_timeout is between 0 and 1000000.0, not 1000000.1"),
        ({"migration_max_seq_len": 0, "model": "m"}, "migration_max_seq_len is between 1 and"),
        ({"end_ids": (3, -1), "model": "m"}, "end_ids are numbers of tokens, not -1"),
        ({"generation_config": "hf", "model": "m"}, "generation_config is 'auto' or 'vllm', not 'hf'"),
        ({"log_format": "xml", "model": "m"}, "log_format is 'text' or 'json', not 'xml'"),
        ({"log_level": "trace", "model": "m"}, "log_level is debug, info, warning, error, not 'trace'"),
        ({"dtype": "int8", "model": "m"}, "dtype is auto, float32, bfloat16, float16, not 'int8'"),
        ({"device": "cuda:x", "model": "m"}, "device is cpu, cuda, or cuda:N"),
        ({"mm_encoder_tp_mode": "rank", "model": "m"}, "mm_encoder_tp_mode is weights, data, store, not 'rank'"),
        (
            {"mm_encoder_tp_mode": "store", "encoder_cache_nbytes": 0, "model": "m"},
            "needs a store of encodings: .* is 0",
        ),
        ({"encoder_cache_nbytes": -1, "model": "m"}, "encoder_cache_nbytes is between 0 and"),
        ({"speed": 1, "model": "m"}, "speed"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_seconds": -1}, "step_seconds is between 0 and 3600, not -1"),
        ({"vocabulary": 0}, "vocabulary is between 1 and"),
        ({"end_id": 32_000}, "end_id is between 0 and 31999, not 32000"),
        ({"end_one_in": 0}, "end_one_in is between 1 and"),
    ],
)
def test_a_simulated_device_that_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SimulatedDevice(**options)


def nodes(**options: Any) -> Nodes:
    return Nodes(**{"count": 3, "address": "10.0.0.1", **options})


def test_groups_of_other_nodes_have_the_numbers_after_those_of_the_home_node() -> None:
    home = EngineConfig(simulated=SIMULATED, data_parallel_size=2, nodes=nodes())
    assert (home.is_headless, home.remote_groups, home.all_groups) == (False, 4, 6)
    assert [home.node_of(group) for group in range(6)] == [0, 0, 1, 1, 2, 2]


def test_devices_are_counted_on_each_node() -> None:
    for rank in range(3):
        config = EngineConfig(
            model="m", device="cuda", data_parallel_size=2, tensor_parallel_size=2, nodes=nodes(rank=rank)
        )
        devices = [config.device_of(group, worker) for group in range(2) for worker in range(2)]
        assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_node_without_servers_reaches_no_groups_but_its_own() -> None:
    config = EngineConfig(simulated=SIMULATED, data_parallel_size=2, nodes=nodes(rank=1))
    assert (config.is_headless, config.remote_groups, config.all_groups) == (True, 0, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": 1}, "count is between 2 and 16, not 1"),
        ({"rank": 3}, "rank is between 0 and 2, not 3"),
        ({"port": 0}, "port is between 1 and 65535, not 0"),
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
    with pytest.raises(ValueError, match=r"at most 63, as each .*: not 64"):
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


def test_devices_of_ranks_over_nodes_are_counted_on_each_node() -> None:
    for rank in range(3):
        config = spread(rank, device="cuda")
        devices = [config.device_of(group, worker) for group in range(2) for worker in config.ranks]
        assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_ranks_over_nodes_share_no_store_of_encodings() -> None:
    assert spread(0, store_nbytes=1 << 20).encoder_tp_mode == "weights"
    assert EngineConfig(model="m", store_nbytes=1 << 20).encoder_tp_mode == "store"
    with pytest.raises(ValueError, match="needs all workers of an engine on one node"):
        spread(0, store_nbytes=1 << 20, mm_encoder_tp_mode="store")


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a multiple of the number of nodes \(3\) .*, not 4"):
        spread(0, tensor_parallel_size=4)
    with pytest.raises(TypeError, match="tensor_parallel_over_nodes is True or False"):
        nodes(tensor_parallel_over_nodes=1)
