"""Moments of a server, taken by others: of pages, channels and stores that are there, without a server around them."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.inspect import add_lost_groups
from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import Stop
from penstock.lowlevel import Pool
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, Served, ServerCounters
from penstock.server.status.history import ServerHistory
from penstock.server.status.server_info import ServerInfo
from penstock.server.status.snapshot import ProcessView
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader
from penstock.tools.inspect import private_nbytes_of
from penstock.tools.inspect.segments import PAGE_KIND
from penstock.tools.top.source import LocalSource, choose, servers_here

URL = "http://127.0.0.1:1"
KEY = b"k" * 32


class Laid:
    """What a launcher has open: no process of the server runs."""

    def __init__(self, **options: object) -> None:
        config = EngineConfig(simulated=SimulatedDevice(), store_nbytes=1 << 20, **options)  # type: ignore[arg-type]
        self.cluster = Cluster.open(config)
        self.history_page = ServerHistory.create(config.api_server_count)
        self.tally_page = ServerCounters.create(config.api_server_count, 2)
        self.server_info_page = ServerInfo.publish(config, ServerOptions(served_model_name=("a\x1b[31mb",)), URL)
        self.board = StatusBoard(self.cluster.board, writable=True)
        self.tally = ServerCounters(self.tally_page, config.api_server_count, writable=True)


@pytest.fixture
def laid() -> Iterator[Laid]:
    result = Laid(api_server_count=2, tensor_parallel_size=2)
    yield result
    result.board.close()
    result.cluster.close()
    vars(result).clear()  # pytest holds the object until it has looked what is left
    gc.collect()


def looked(process_view: ProcessView) -> tuple[str, str, int]:
    return process_view.title, process_view.state, process_view.incarnation


def test_numbers_of_the_board_and_the_tally_are_those_that_were_written(laid: Laid) -> None:
    row = laid.board.row(0)
    row[StatusBoard.OPEN], row[StatusBoard.WAITING], row[StatusBoard.BLOCKS], row[StatusBoard.FREE_BLOCKS] = (
        9,
        4,
        100,
        60,
    )
    row[StatusBoard.RUNNING] = 6
    row[StatusBoard.SAMPLED], row[StatusBoard.COMPUTED], row[StatusBoard.PREEMPTIONS] = 1000, 2000, 3
    server = laid.tally.rows[1]
    server[ProcessCounters.OPEN] = 5
    server[ProcessCounters.ANSWERED.at["chat", "200"]] += 7
    server[ProcessCounters.ANSWERED.at["chat", "429"]] += 2
    for engine, tokens in zip(server.engines, (10, 20), strict=True):
        Served.FIRST_TOKEN.observe(engine.words, 0.25)
        engine[Served.PROMPT_TOKENS] += tokens
        engine[Served.GENERATION_TOKENS] += 1
    moment = SnapshotReader(os.getpid()).take()
    (engine,) = moment.engines
    load = ("open_in_engine", "num_requests_waiting", "num_requests_running", "blocks", "free_blocks")
    assert [engine[key] for key in load] == [9, 4, 6, 100, 60]
    tokens = ("sampled_tokens", "computed_tokens", "num_preemptions", "kv_cache_usage_perc")
    assert [engine[key] for key in tokens] == [1000, 2000, 3, 0.4]
    answered = {key: number for key, number in moment.servers[1].counters.items() if key.startswith("requests")}
    assert answered == {"requests": 9, "requests.chat.200": 7, "requests.chat.429": 2}
    assert (moment.servers[1]["open_requests"], moment.total("open_requests")) == (5, 5)
    (served,) = moment.served
    first = "time_to_first_token_seconds"
    counts = (f"{first}_count", f"{first}_sum", "prompt_tokens", "generation_tokens")
    assert [served[key] for key in counts] == [1, 0.25, 10, 1]
    assert moment.server_info.url == URL and not moment.is_draining


def test_a_process_starts_serves_dies_and_comes_again(laid: Laid) -> None:
    watch = SnapshotReader(os.getpid())
    assert [looked(process) for process in watch.take().processes][1:] == [
        (title, "starting", 0)
        for title in ("core 0.0", "worker 0.0", "worker 0.1", "output 0.0", "server 0", "server 1")
    ]
    laid.board.live(1, ProcessEntry(1, os.getpid()))
    worker = watch.take().processes[2]
    assert (
        looked(worker) == ("worker 0.0", "starting", 1) and worker.private_nbytes > 1 << 20 and worker.cpu_seconds > 0
    )
    laid.board.row(0)[StatusBoard.SERVING] = 1
    assert looked(watch.take().processes[2]) == ("worker 0.0", "serves", 1)
    laid.board.live(1, ProcessEntry(1, 0))
    assert looked(watch.take().processes[2]) == ("worker 0.0", "gone", 1)
    laid.board.live(1, ProcessEntry(2, os.getpid()))
    assert looked(watch.take().processes[2]) == ("worker 0.0", "starting", 2)
    laid.board.live(4, ProcessEntry(3, os.getpid()))
    row = laid.tally.rows[0]
    row[ProcessCounters.SERVING], row[ProcessCounters.PID] = 1, 1  # of the server before this one
    assert looked(watch.take().processes[5]) == ("server 0", "starting", 3)
    row[ProcessCounters.PID] = os.getpid()
    assert looked(watch.take().processes[5]) == ("server 0", "serves", 3)
    laid.board.drain()
    assert looked(watch.take().processes[5]) == ("server 0", "draining", 3) and watch.take().is_draining


def test_waiting_requests_are_new_ones_and_those_of_a_lost_group(laid: Laid) -> None:
    watch = SnapshotReader(os.getpid())
    assert watch.waiting_requests() == 0
    for row, new in zip(laid.tally.rows, (1, 2), strict=True):
        row.queue[QueueCounters.WAITING] = new
        row.engines[0].migration[MigrationCounters.WAITING] = 10
    assert watch.waiting_requests() == 23
    assert [server["new_requests_waiting"] for server in watch.take().servers] == [1, 2]


def test_group_is_coming_back_from_its_loss_until_it_serves(laid: Laid) -> None:
    watch = SnapshotReader(os.getpid())
    assert watch.take().coming_back == {}, "it has never served"
    laid.board.row(0)[StatusBoard.SERVING] = 1
    for row, waiting in zip(laid.tally.rows, (3, 4), strict=True):
        row.engines[0].migration[MigrationCounters.WAITING] = waiting
        row.engines[0].migration[MigrationCounters.MIGRATIONS.at["failed"]] += 1
        row.engines[0].migration[MigrationCounters.GIVEN_UP] += 2
        row.engines[0].migration[MigrationCounters.KEPT_TOKENS] = 50
    moment = watch.take()
    assert moment.coming_back == {}
    counts = ("requests_waiting_to_resume", "migrations", "migrations.failed", "requests_given_up", "kept_tokens")
    assert [moment.served[0][key] for key in counts] == [7, 2, 2, 4, 100]
    laid.board.row(0)[StatusBoard.SERVING] = 0
    assert watch.take().coming_back == {0: 7}
    for row in laid.tally.rows:
        row.clear_gauges()
    assert watch.take().coming_back == {}
    laid.board.live(0, ProcessEntry(2, os.getpid()))  # its core starts again
    assert watch.take().coming_back == {0: 0}
    laid.tally.rows[0].engines[0].migration[MigrationCounters.WAITING] = 1
    idle = {"level": "idle", "kind": "wait", "text": "x waits", "pids": []}
    result = {"verdict": [idle], "segments": [{"kind": PAGE_KIND}]}
    add_lost_groups(result, os.getpid())
    text = "group 0 is coming back: 1 request to resume"
    assert result["verdict"] == [{"level": "note", "kind": "group", "text": text, "pids": []}, idle]


def test_memory_that_is_shared_is_counted_once_and_in_no_process(laid: Laid) -> None:
    assert laid.cluster.store is not None
    laid.board.live(1, ProcessEntry(1, os.getpid()))
    moment = SnapshotReader(os.getpid()).take()
    assert moment.processes[2].private_nbytes is not None and moment.processes[1].private_nbytes is None
    assert (
        laid.cluster.store.segment_nbytes + laid.cluster.board.nbytes + laid.tally_page.nbytes
        < moment.shared_nbytes
        < 64 << 20
    )


def test_private_memory_does_not_count_shared_segments() -> None:
    most = 64 << 20
    grown = []
    while not grown or not (grown[-1][0] < most // 4 and grown[-1][1] > most * 3 // 4):
        assert len(grown) < 5, f"by shared and by private pages: {grown}"  # other threads allocate and free, too
        with Pool.create(most) as pool, pool.take(most - (1 << 20)) as lease:
            before = private_nbytes_of(os.getpid())
            np.frombuffer(lease, np.uint8)[:] = 1  # this process has all its pages
            shared = private_nbytes_of(os.getpid())
            own = np.ones(most, np.uint8)
            after = private_nbytes_of(os.getpid())
        assert before is not None and shared is not None and after is not None and own.all()
        grown.append((shared - before, after - shared))
    assert private_nbytes_of(1 << 22) is None, "there is no such process"


def test_channels_and_store_have_counts_and_the_slowest_receiver(laid: Laid) -> None:
    assert laid.cluster.store is not None
    before = {channel.name: channel for channel in SnapshotReader(os.getpid()).take().channels}
    assert set(before) == {"inbox 0", "steps 0", "results 0", "tokens 0.0", "deltas 0", "deltas 1"}
    group = laid.cluster.groups[0]
    with laid.cluster.store.put({"x": b"y" * 5000}, key=KEY):
        sender, receiver = group.inbox.open_sender(0, name="me"), group.inbox.open_receiver(name="core 0.0 #1")
        sender.send(Stop("x"))
        moment = SnapshotReader(os.getpid()).take()
        sender.close()
        receiver.close()
    inbox = next(channel for channel in moment.channels if channel.name == "inbox 0")
    assert (inbox.kind, inbox.records, inbox.behind, inbox.slowest) == ("inbox", 1, 1, "core 0.0 #1")
    assert inbox.nbytes > 0 and inbox.behind_nbytes > 0
    (store,) = moment.stores
    assert (store.keys, store.held_keys, store.puts, store.nbytes) == (1, 1, 1, 1 << 20)
    assert store.kept_nbytes > 5000 and [holder.blocks for holder in store.holders] == [1]


def test_looking_leaves_nothing_behind_and_joins_nothing(laid: Laid) -> None:
    def standing() -> tuple[list[str], int, int]:
        peers = [peer.name for group in laid.cluster.groups for peer in group.steps.peers()]
        return peers, len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:penstock")

    watch = SnapshotReader(os.getpid())
    watch.take()
    before = standing()
    for _ in range(5):
        watch.take()
    assert standing() == before


def test_local_server_is_found_by_pid_name_url_or_no_argument(laid: Laid) -> None:
    here = {pid: value for pid, value in servers_here().items() if pid == os.getpid()}
    assert [item.url for item in here.values()] == [URL]
    for target in (None, os.getpid(), "a?[31mb", URL):
        assert choose(target, here) == os.getpid()
    with pytest.raises(NoServer, match=r"(?s)no server 'other', but\n.*127\.0\.0\.1:1"):
        choose("other", here)
    with pytest.raises(NoServer, match="which of these servers"):
        choose(None, {**here, 1: here[os.getpid()]})
    with pytest.raises(NoServer, match="no penstock server"):
        choose(None, {})


def test_a_process_that_is_no_server_is_refused() -> None:
    with pytest.raises(NoServer, match="is no penstock server"):
        SnapshotReader(os.getpid())
    with pytest.raises(NoServer, match="there is no process"):
        SnapshotReader(1 << 30)


def test_a_server_that_closes_its_pages_is_gone(laid: Laid) -> None:
    local = LocalSource(os.getpid(), 5.0)
    assert local.look().rates is None and local.look().rates is not None
    del laid.server_info_page
    gc.collect()
    for _ in range(2):  # it is looked for again
        with pytest.raises(NoServer):
            local.look()
    laid.server_info_page = ServerInfo.publish(laid.cluster.config, ServerOptions(), URL)
    assert local.look().rates is None  # of another server, there are no rates yet
