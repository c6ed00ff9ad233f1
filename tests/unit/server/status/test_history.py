"""The history of a server: points and events in shared memory, without a server around them."""

import logging
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from penstock.engine.cluster import logs
from penstock.engine.cluster.counter import FIRST_TOKEN_SECONDS
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status import history as subject
from penstock.server.status.counters import ProcessCounters, Served, ServerCounters
from penstock.server.status.history import EventRecorder, Point, ServerHistory
from penstock.server.status.history_recorder import WINDOW, HistoryRecorder, PointBuilder, quantile

SERVERS = 2


def histories() -> tuple[ServerHistory, ServerHistory]:
    """Returns the history of a writer, and that of a reader."""
    segment = ServerHistory.create(SERVERS)
    return ServerHistory(segment, SERVERS, writable=True), ServerHistory(segment, SERVERS)


@pytest.fixture
def info() -> Iterator[None]:
    level = logs.LOGGER.level
    logs.LOGGER.setLevel(logging.INFO)
    yield
    logs.LOGGER.setLevel(level)


def point(time: float) -> Point:
    return Point(*[time] * len(Point._fields))


def test_history_keeps_the_last_points_in_their_order() -> None:
    writer, reader = histories()
    for second in range(subject.POINTS + 10):
        writer.add(point(float(second)))
    view = reader.view()
    assert [row[0] for row in view.points] == list(range(10, subject.POINTS + 10))
    assert [row[0] for row in reader.view(subject.POINTS + 6.5).points] == [907, 908, 909]
    assert view.fields == Point._fields and len(view.points[0]) == len(view.fields)


def test_history_without_a_figure_is_null_as_its_document_says() -> None:
    writer, reader = histories()
    writer.add(point(1.0)._replace(ttft_p50=math.nan))
    assert b",null," in msgspec.json.encode(reader.view())
    points = msgspec.json.schema(subject.HistoryView)["$defs"]["HistoryView"]["properties"]["points"]
    assert {"type": "null"} in points["items"]["items"]["anyOf"]


def test_history_takes_less_than_a_mebibyte_for_any_number_of_servers() -> None:
    for servers in (1, 3, 8, 64, 500):
        assert ServerHistory.create(servers).nbytes < 1 << 20


def test_history_and_its_recorder_take_less_than_a_mebibyte() -> None:
    """Of the launcher of 64 engines and 8 servers, shared and private memory, with all points of a window."""
    engines, servers = 64, 8
    page = ServerHistory.create(servers)
    history = ServerHistory(page, servers, writable=True)
    board = StatusBoard(StatusBoard.create(engines), writable=True)
    tally = ServerCounters(ServerCounters.create(servers, engines), servers, writable=True)
    tracemalloc.start()
    try:
        builder = PointBuilder(board, tally)
        for second in range(WINDOW + 2):
            for row in board.rows:
                StatusBoard.QUEUE_TIMES.observe(row, second / 4, 1_000_000)  # numbers that Python does not share
            history.add(builder.build(float(second), Counter()))
        private_nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 50_000 < private_nbytes and page.nbytes + private_nbytes < 1 << 20


def test_history_passes_over_a_record_that_is_being_written() -> None:
    writer, reader = histories()
    for second in (1, 2, 3):
        writer.add(point(float(second)))
    writer._points._memory[2 * writer._points._size + 40] ^= 1  # the second point
    assert [row[0] for row in reader.view().points] == [1, 3]


def test_history_of_a_writer_goes_on_in_its_next_life() -> None:
    segment = ServerHistory.create(SERVERS)
    writer, reader = (ServerHistory(segment, SERVERS, writable=writable) for writable in (True, False))
    writer.add(point(1.0))
    ServerHistory(segment, SERVERS, writable=True).add(point(2.0))
    assert [row[0] for row in reader.view().points] == [1, 2]


def test_events_are_recorded_with_cause_and_effect(info: None) -> None:
    writer, reader = histories()
    with EventRecorder(writer.events[0], "launcher"), EventRecorder(writer.events[2], "server 1"):
        logs.event("process ended", logging.ERROR, child="worker 0.0 #1", child_pid=7, how="killed by SIGKILL")
        logs.event("process ended", child="core 0.0 #1", child_pid=8, how="killed by SIGKILL")  # by its launcher
        logs.event("worker ready", blocks=3)
    logs.event("group lost", unit="group 0", incarnation=1, cause="outside")  # the log is not recorded any more
    events = reader.view().events
    assert [event.process for event in events] == ["launcher", "server 1"]
    assert {(event.kind, event.name, event.text) for event in events} == {
        ("death", "process ended", "worker 0.0 #1 (pid 7) killed by SIGKILL")
    }
    assert msgspec.json.decode(msgspec.json.encode(reader.view(events[-1].time)))["events"] == []


def test_events_are_cut_and_have_no_control_characters(info: None) -> None:
    writer, reader = histories()
    with EventRecorder(writer.events[1], "server 0"):
        logs.event("request is in quarantine", logging.WARNING, request_id="\x1b[31m" + "é" * 500)
    (event,) = reader.view().events
    assert event.text.startswith("?[31m") and 390 < len(event.text.encode()) <= subject.MAX_TEXT


@pytest.mark.parametrize("name", subject.RECORDED)
def test_events_are_recorded_without_some_of_their_fields(name: str, info: None) -> None:
    writer, reader = histories()
    with EventRecorder(writer.events[0], "launcher"):
        logs.event(name, logging.ERROR, away=1.0, pause=1.0, longest=1.0, seconds=1.0)
    assert [event.name for event in reader.view().events] == [name]


def test_quantiles_lie_within_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 10, 0, 0], 0.5) == 1.5
    assert quantile(bounds, [5, 0, 5, 0], 0.5) == 1.0
    assert quantile(bounds, [5, 0, 5, 0], 0.99) == pytest.approx(3.96)
    assert quantile(bounds, [1, 0, 0, 9], 0.9) == 4.0, "the last bound"
    assert math.isnan(quantile(bounds, [0, 0, 0, 0], 0.5))


def test_quantiles_are_close_to_those_of_the_values(seed: int) -> None:
    values = np.random.default_rng(seed).uniform(0.0, 2.5, 20_000)
    counts = np.histogram(values, [0.0, *FIRST_TOKEN_SECONDS, math.inf])[0].tolist()
    for share in (0.5, 0.95, 0.99):
        assert quantile(FIRST_TOKEN_SECONDS, counts, share) == pytest.approx(np.quantile(values, share), rel=0.05)


class Counted:
    """The pages that points are built of."""

    def __init__(self) -> None:
        self.board = StatusBoard(StatusBoard.create(2), writable=True)
        self.tally = ServerCounters(ServerCounters.create(SERVERS, 2), SERVERS, writable=True)
        self.rows = self.board.rows


def test_points_have_rates_of_all_engines_and_servers() -> None:
    counted, refusals = Counted(), Counter[str]()
    builder = PointBuilder(counted.board, counted.tally)
    builder.build(100.0, refusals)
    for row in counted.rows:
        row[StatusBoard.SAMPLED], row[StatusBoard.STEPS], row[StatusBoard.BUSY_NS] = 100, 10, 50_000_000
        row[StatusBoard.BLOCKS], row[StatusBoard.FREE_BLOCKS], row[StatusBoard.RUNNING] = 10, 5, 3
    for server in counted.tally.rows:
        server[ProcessCounters.ANSWERED.at["chat", "429"]] += 4
        server[ProcessCounters.ANSWERED.at["chat", "200"]] += 6
        Served.FIRST_TOKEN.observe(server.engines[0].words, 0.3, 10)
    result = builder.build(102.0, refusals)
    assert (result.generated, result.running, result.kv, result.device) == (100.0, 6.0, 0.5, 0.005)
    assert (result.answered, result.refused, refusals) == (10.0, 4.0, {"429": 8})
    assert 0.25 < result.ttft_p50 < result.ttft_p99 <= 0.5 and math.isnan(result.itl_p50)
    counted.rows[0][StatusBoard.SAMPLED] = 40  # the engine was started again
    assert builder.build(103.0, refusals).generated == 40.0


def test_latencies_of_a_point_are_of_the_minute_before() -> None:
    counted = Counted()
    builder = PointBuilder(counted.board, counted.tally)
    words = counted.tally.rows[0].engines[1].words
    builder.build(0.0, Counter())
    Served.INTER_TOKEN.observe(words, 70.0, 100)
    medians = [builder.build(float(second), Counter()).itl_p50 for second in range(1, WINDOW + 2)]
    assert medians[0] > 40 and medians[WINDOW - 1] > 40 and math.isnan(medians[WINDOW])


def test_points_have_the_parts_of_the_first_tokens_time() -> None:
    """Queue, prefill and the pauses of lost requests; an engine that was started again counts from 0."""
    counted = Counted()
    builder = PointBuilder(counted.board, counted.tally)
    builder.build(100.0, Counter())
    for row in counted.rows:
        StatusBoard.QUEUE_TIMES.observe(row, 2.0, 20)
        StatusBoard.PREFILL_TIMES.observe(row, 0.4, 20)
    MigrationCounters.PAUSE.observe(counted.tally.rows[1].engines[0].migration.words, 3.0)
    result = builder.build(101.0, Counter())
    assert (result.queue, result.prefill, result.pause) == pytest.approx((2.0, 0.4, 3.0))
    counted.board.begin(0)
    StatusBoard.QUEUE_TIMES.observe(counted.rows[0], 50.0, 40)
    assert builder.build(102.0, Counter()).queue == pytest.approx((40 * 2.0 + 40 * 50.0) / 80)


def test_recorder_reports_the_return_of_an_engine(info: None) -> None:
    writer, reader = histories()
    counted = Counted()
    recorder = HistoryRecorder(writer, counted.board, counted.tally)
    with EventRecorder(writer.events[0], "launcher"):
        for now, incarnation in ((1.0, 0), (2.0, 1), (3.0, 0), (4.0, 0), (6.5, 2), (7.0, 2)):
            counted.rows[1][StatusBoard.SERVING] = incarnation
            recorder.watch_engines(now)
    assert [event.text for event in reader.view().events] == ["engine 1 #2, away for 3.5 s"]


def test_recorder_joins_refusals_of_some_seconds(info: None) -> None:
    writer, reader = histories()
    counted = Counted()
    recorder = HistoryRecorder(writer, counted.board, counted.tally)
    with EventRecorder(writer.events[0], "launcher"):
        for now in range(100, 125):
            recorder._refusals.update({"429": 2})
            recorder.report_refusals(float(now))
    assert [event.text for event in reader.view().events] == ["2 x 429 in 10 s", "20 x 429 in 10 s", "20 x 429 in 10 s"]
