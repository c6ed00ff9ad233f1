"""Topology of a cluster: the end of each process, the names of processes, and their logs."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time

import msgspec
import pytest
from msgspec.structs import replace

from penstock.engine.cluster import logs
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId, all_processes
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.launcher.launcher import STOP_TIMEOUT, Launcher, Run
from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice
from penstock.engine.protocol.messages import Stop
from tests.support.loops import in_a_loop

CONFIG = EngineConfig(
    simulated=SimulatedDevice(), api_server_count=3, data_parallel_size=2, tensor_parallel_size=2, output_processors=2
)


def test_lanes_are_distinct_and_each_inbox_has_a_spare_lane() -> None:
    cluster = Cluster.open(CONFIG)
    lanes = [*range(3), *map(cluster.worker_lane, range(2)), *map(cluster.output_lane, range(2)), cluster.launcher_lane]
    assert lanes == list(range(cluster.groups[0].inbox.senders))
    deltas = [cluster.delta_lane(group, output) for group in range(2) for output in (None, 0, 1)]
    assert deltas == list(range(cluster.servers[0].senders - 1))
    assert cluster.groups[1].steps.receivers == 2 and len(cluster.groups[1].tokens) == 2
    cluster.close()


def test_kv_files_are_for_the_core_and_the_workers_of_their_group() -> None:
    config = replace(CONFIG, simulated=None, model="any")
    cluster = Cluster.open(config)
    for member in all_processes(config):
        own = {member.group} if member.kind in ("core", "worker") else set()
        files = cluster.for_member(member)
        assert {group for group in range(2) if files.kv_files_of(group) is not None} == own, member
    cluster.close()


def test_home_node_has_inbox_and_answer_lane_for_each_remote_group() -> None:
    config = replace(CONFIG, nodes=Nodes(count=2, address="10.0.0.1"))
    cluster = Cluster.open(config)
    assert [inbox.name for inbox in cluster.inboxes] == [f"inbox {group}" for group in range(4)]
    assert cluster.inboxes[:2] == tuple(group.inbox for group in cluster.groups) and len(cluster.groups) == 2
    deltas = [cluster.delta_lane(group, output) for group in range(4) for output in (None, 0, 1)]
    assert deltas == list(range(cluster.servers[0].senders - 1))
    bridges = [member for member in all_processes(config) if member.kind == "bridge"]
    assert bridges == [ProcessId("bridge", group, 0, 1) for group in (2, 3)]
    assert len(StatusBoard(cluster.board).rows) == 4
    cluster.close()


def test_headless_node_has_server_inboxes_for_each_of_its_groups() -> None:
    config = replace(CONFIG, nodes=Nodes(count=2, rank=1, address="10.0.0.1"))
    cluster = Cluster.open(config)
    assert cluster.inboxes == tuple(group.inbox for group in cluster.groups)
    first, second = cluster.servers_of(0), cluster.servers_of(1)
    assert len(first) == len(second) == 3 and not set(map(id, first)) & set(map(id, second))
    for group in range(2):
        lanes = [cluster.delta_lane(group, output) for output in (None, 0, 1)]
        assert lanes == list(range(first[0].senders - 1))
    kinds = [member.kind for member in all_processes(config)]
    assert kinds.count("uplink") == 2 and "server" not in kinds
    cluster.close()


def test_remote_rank_has_a_home_lane_and_its_node_a_step_receiver() -> None:
    at_home = Nodes(count=2, address="10.0.0.1", tensor_parallel_over_nodes=True)
    config = replace(CONFIG, tensor_parallel_size=4, nodes=at_home)
    engine, other = Cluster.open(config), Cluster.open(replace(config, nodes=replace(at_home, rank=1)))
    lanes = [*range(3), *map(engine.worker_lane, range(4)), *map(engine.output_lane, range(2)), engine.launcher_lane]
    assert lanes == list(range(engine.groups[0].inbox.senders))
    receivers = [*map(engine.steps_receiver, engine.config.ranks), engine.remote_steps_receiver(1)]
    assert receivers == list(range(engine.groups[0].steps.receivers)) == [0, 1, 2]
    assert (
        [other.worker_lane(rank) for rank in other.config.ranks]
        == [0, 1]
        == list(range(other.groups[0].inbox.senders - 1))
    )
    assert [other.steps_receiver(rank) for rank in other.config.ranks] == list(range(other.groups[0].steps.receivers))
    kinds = [(member.kind, member.index) for member in all_processes(other.config) if member.group == 0]
    assert kinds == [("remote_core", 0), ("worker", 2), ("worker", 3)]
    assert ProcessId("remote_ranks", 0, 1, 1) in all_processes(engine.config) and not other.servers
    engine.close()
    other.close()


def test_process_id_is_parsed_from_its_own_names_alone() -> None:
    member = ProcessId("worker", 15, 7, 1_000_000)
    assert ProcessId.of(str(member)) == member and len(str(member)) <= 31
    for name in ("", "core", "core 1 2", "core 1.x #1", "python3.11"):
        assert ProcessId.of(name) is None


def record(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "it happened", (), None)
    record.fields = fields
    return record


def test_a_line_has_the_process_and_the_event_as_text_and_as_json() -> None:
    text = logs.TextFormatter("core 0.0 #1").format(record(group=0, why='a "b"\nc', share=1 / 3, empty=""))
    assert "\n" not in text and 'process="core 0.0 #1" pid=' in text
    assert text.endswith('event="it happened" group=0 why="a \\"b\\"\\nc" share=0.333333 empty=""')
    line = json.loads(logs.JsonFormatter("core 0.0 #1").format(record(group=0, error=ValueError("x"))))
    assert (line["event"], line["level"], line["group"], line["error"]) == ("it happened", "warning", 0, "x")


@pytest.mark.parametrize(("level", "names"), [("debug", ["a", "b", "c"]), ("info", ["b", "c"]), ("error", ["c"])])
def test_events_below_the_level_are_not_logged(level: str, names: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("launcher", "json", level)
    for name, number in (("a", logging.DEBUG), ("b", logging.INFO), ("c", logging.ERROR)):
        logs.event(name, number)
    logs.configure("launcher", "json")
    assert [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()] == names


def test_end_ids_are_those_that_the_model_names_and_those_that_were_given(tmp_path: object) -> None:
    config = EngineConfig(simulated=SimulatedDevice(end_id=5), end_ids=(9,))
    assert with_model_defaults(config).end_ids == (5, 9) == with_model_defaults(with_model_defaults(config)).end_ids


@pytest.mark.parametrize(
    ("files", "end_ids"),
    [
        ({"generation_config.json": '{"eos_token_id": [3, 4]}', "config.json": '{"eos_token_id": 1}'}, (3, 4)),
        ({"generation_config.json": "{}", "config.json": '{"eos_token_id": 1}'}, (1,)),
        ({"config.json": '{"text_config": {"eos_token_id": 2}}'}, (2,)),
        ({"config.json": '{"text_config": null}'}, ()),
        ({}, ()),
    ],
)
def test_end_ids_stand_in_the_models_files(tmp_path, files: dict[str, str], end_ids: tuple[int, ...]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert with_model_defaults(EngineConfig(model=str(tmp_path))).end_ids == end_ids


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"text_config": [1]}', "Expected `object`, got `array`"),
        ('{"eos_token_id": "</s>"}', "Expected `int | array`, got `str`"),
        ('{"eos_token_id": [1, null]}', "Expected `int`, got `null`"),
        ('{"text_config": {"max_position_embeddings": 1.5}}', "Expected `int`, got `float`"),
    ],
)
def test_a_models_file_that_says_something_else_is_refused_by_its_path(tmp_path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is invalid: .*" + re.escape(why)):
        with_model_defaults(EngineConfig(model=str(tmp_path)))


def test_nothing_is_longer_than_the_model_knows(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 1024}}')
    config = EngineConfig(model=str(tmp_path))
    assert with_model_defaults(config).max_model_len == 1024
    assert with_model_defaults(msgspec.structs.replace(config, max_model_len=100)).max_model_len == 100
    (tmp_path / "config.json").write_text("{}")
    assert with_model_defaults(config).max_model_len == config.max_model_len


def test_core_stopped_before_its_workers_are_ready_ends_without_failure() -> None:
    cluster = Cluster.open(EngineConfig(simulated=SimulatedDevice(), max_model_len=1024))
    with (
        contextlib.closing(cluster),
        cluster.groups[0].inbox.open_sender(cluster.launcher_lane, name="launcher") as launcher,
    ):
        launcher.send(Stop("the cluster ends"), 1)
        core = EngineCore(cluster, ProcessId("core", 0, 0, 1))
        core.run()
        assert StatusBoard(cluster.board).row(0)[StatusBoard.SERVING] == 0
        core.close()


# ── ended while it loads ─────────────────────────────────────────────────────────────────────────────────────────────
def load(cluster: Cluster, me: ProcessId) -> None:
    """A worker that takes long to load its model."""
    time.sleep(600)


class Loading(Launcher):
    """A cluster of groups that do not serve, but for the first `served` of them."""

    def __init__(self, config: EngineConfig, served: int = 0) -> None:
        self._to_serve = served
        super().__init__(config)

    def _parts_of_group(self) -> list[tuple[str, int, Run]]:
        self._to_serve -= 1
        parts = super()._parts_of_group()
        return (
            parts if self._to_serve >= 0 else [(*part[:2], load if part[0] == "worker" else part[2]) for part in parts]
        )


def test_stop_kills_a_loading_group_and_lets_a_serving_group_end(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        config = EngineConfig(simulated=SimulatedDevice(), data_parallel_size=2, output_processors=1, log_format="json")
        launcher = Loading(config, served=1)
        launcher.start()
        while not all(unit.children for unit in launcher.units):
            await asyncio.sleep(0.01)
        pids = [child.pid for unit in launcher.units for child in unit.children.values()]
        while not launcher.board.row(0)[StatusBoard.SERVING]:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        assert await launcher.stop() == []  # the processes that had to be killed
        assert time.monotonic() - began < STOP_TIMEOUT / 2
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    logs.configure("launcher", "json")
    asyncio.run(scene())
    lines = map(json.loads, capfd.readouterr().err.splitlines())
    ends = [line for line in lines if line["event"] == "process ended"]
    assert len(ends) == 6
    # One that hears of the death of another before it is killed itself says so.
    ends = [end for end in ends if not end["how"].startswith("PeerDied: ")]
    hows = {group: {end["how"] for end in ends if f" {group}." in end["child"]} for group in range(2)}
    assert hows == {0: {"exited with status 0"}, 1: {"killed by SIGKILL"}}
    assert {end["level"] for end in ends} == {"info"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@in_a_loop
async def test_cluster_stopped_while_it_loads_ends_without_a_failure(number: int) -> None:
    launcher = Loading(CONFIG)
    running = asyncio.ensure_future(launcher.run())
    while not all(unit.children for unit in launcher.units):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, STOP_TIMEOUT / 2)
    assert time.monotonic() - began < STOP_TIMEOUT / 2 and not launcher.has_failed
