"""`/metrics`: names, types, labels and buckets are vLLM's where the meaning is, and each number is the one counted."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock import Inbox, Missing, Ring, Scope, Store, content_key
from penstock.engine.cluster.counter import CounterRow, histogram
from penstock.engine.cluster.migration_counters import MIGRATION_CAUSES, MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.media.media_budget import MediaScope
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.server.http import grafana
from penstock.server.http.endpoint import Admission
from penstock.server.http.metrics import Metrics
from penstock.server.http.segment_metrics import SegmentMetrics
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, Served, ServerCounters
from penstock.tensor import ScopeStats

SERVERS, ENGINES, NAME = 3, 2, "a model"
LABELS = {"model_name", "engine"}
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560 inf"
TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 inf"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 inf"
STEP = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 inf"
LENGTHS = (  # vLLM has those up to the length of the model
    "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000 1000000 inf"
)
# What vLLM has, by its source (v1/metrics/loggers.py): name, type, and of a histogram its buckets.
VLLM = (
    ("num_requests_running", "gauge", ""),
    ("num_requests_waiting", "gauge", ""),
    ("kv_cache_usage_perc", "gauge", ""),
    ("prefix_cache_queries", "counter", ""),
    ("prefix_cache_hits", "counter", ""),
    ("num_preemptions", "counter", ""),
    ("prompt_tokens", "counter", ""),
    ("generation_tokens", "counter", ""),
    ("request_success", "counter", ""),
    ("time_to_first_token_seconds", "histogram", FIRST),
    ("inter_token_latency_seconds", "histogram", TOKEN),
    ("request_time_per_output_token_seconds", "histogram", TOKEN),
    ("e2e_request_latency_seconds", "histogram", REQUEST),
    ("request_queue_time_seconds", "histogram", REQUEST),
    ("request_prefill_time_seconds", "histogram", REQUEST),
    ("request_decode_time_seconds", "histogram", REQUEST),
    ("request_inference_time_seconds", "histogram", REQUEST),
    ("iteration_tokens_total", "histogram", STEP),
    ("prompt_tokens_cached", "counter", ""),
    ("request_prompt_tokens", "histogram", LENGTHS),
    ("request_generation_tokens", "histogram", LENGTHS),
    ("request_max_num_generation_tokens", "histogram", LENGTHS),
    ("mm_cache_queries", "counter", ""),
    ("mm_cache_hits", "counter", ""),
)
OF_ALL_ENGINES = {"mm_cache_queries", "mm_cache_hits"}  # images are looked up before a request has an engine
BLAME = ("penstock_trials", "penstock_trials_refused", "penstock_convictions", "penstock_quarantined_requests")
# Name, type and labels of each other metric. Dashboards of users have them: none may change.
OURS = {
    "penstock_adapters_running": ("gauge", {"engine"}),
    "penstock_grammar_compile_seconds": ("counter", {"engine"}),
    "penstock_grammar_mask_seconds": ("counter", {"engine"}),
    "penstock_grammar_masks": ("counter", {"engine"}),
    "penstock_grammars_compiled": ("counter", {"engine"}),
    "penstock_grammars_open": ("gauge", {"engine"}),
    "penstock_requests_with_adapter": ("gauge", {"engine"}),
    "penstock_tool_calls": ("counter", {"engine"}),
    "penstock_convictions": ("counter", set()),
    "penstock_encodings": ("counter", {"engine"}),
    "penstock_encodings_found": ("counter", {"engine"}),
    "penstock_encodings_unshared": ("counter", {"engine"}),
    "penstock_engine_busy_seconds": ("counter", {"engine"}),
    "penstock_engine_core_seconds": ("counter", {"engine"}),
    "penstock_engine_idle_seconds": ("counter", {"engine"}),
    "penstock_engine_incarnation": ("gauge", {"engine"}),
    "penstock_engine_link_resumptions": ("counter", {"engine"}),
    "penstock_engine_steps": ("counter", {"engine"}),
    "penstock_items": ("counter", {"how", "server"}),
    "penstock_kept_tokens": ("gauge", {"engine"}),
    "penstock_kv_adopted_blocks": ("gauge", {"engine"}),
    "penstock_kv_discards": ("counter", {"engine", "reason"}),
    "penstock_media_bytes": ("gauge", {"server", "stage"}),
    "penstock_media_limit_bytes": ("gauge", {"server", "stage"}),
    "penstock_media_waiting": ("gauge", {"server", "stage"}),
    "penstock_migration_pause_seconds": ("histogram", {"engine"}),
    "penstock_migrations": ("counter", {"cause", "engine"}),
    "penstock_new_requests_waiting": ("gauge", {"server"}),
    "penstock_open_requests": ("gauge", {"server"}),
    "penstock_quarantined_requests": ("counter", set()),
    "penstock_queue_timeouts": ("counter", {"server"}),
    "penstock_requests": ("counter", {"route", "server", "status"}),
    "penstock_requests_given_up": ("counter", {"engine"}),
    "penstock_requests_waiting_to_resume": ("gauge", {"engine"}),
    "penstock_resumed_tokens": ("counter", {"engine", "way"}),
    "penstock_process_starts": ("counter", {"engine", "way"}),
    "penstock_suspects": ("gauge", {"engine"}),
    "penstock_trials": ("counter", set()),
    "penstock_trials_refused": ("counter", set()),
    "penstock_video_decoder_seconds": ("counter", {"server"}),
    "penstock_videos": ("counter", {"end", "server"}),
    "penstock_device_images": ("counter", {"server", "way"}),
    "penstock_videos_decoding": ("gauge", {"server"}),
    "penstock_videos_waiting": ("gauge", {"server"}),
}
CONFIG = EngineConfig(simulated=SimulatedDevice(), data_parallel_size=ENGINES)
CACHE_OPTIONS = {"block_size", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override"}
OF_SEGMENTS = {
    "vllm:cache_config_info": ("gauge", {"engine"} | CACHE_OPTIONS),
    "penstock_channel_behind_records": ("gauge", {"channel", "end"}),
    "penstock_channel_bytes": ("counter", {"channel", "end"}),
    "penstock_channel_exhaustions": ("counter", {"channel", "end"}),
    "penstock_channel_longest_wait_seconds": ("gauge", {"channel", "end"}),
    "penstock_channel_parks": ("counter", {"channel", "end"}),
    "penstock_channel_records": ("counter", {"channel", "end"}),
    "penstock_channel_spills": ("counter", {"channel", "end"}),
    "penstock_memory_bytes": ("gauge", {"kind"}),
    "penstock_store_bytes": ("gauge", {"kind"}),
    "penstock_store_evictions": ("counter", set()),
    "penstock_store_fills_awaited": ("counter", set()),
    "penstock_store_hits": ("counter", set()),
    "penstock_store_leases": ("gauge", set()),
    "penstock_store_misses": ("counter", set()),
    "penstock_store_puts": ("counter", set()),
    "penstock_store_values": ("gauge", set()),
}


class Pages:
    """The tally and the board of a server that is not there."""

    def __init__(self) -> None:
        self._tally, self._board = ServerCounters.create(SERVERS, ENGINES), StatusBoard.create(ENGINES)
        self.tally, self.board = (
            ServerCounters(self._tally, SERVERS, writable=True),
            StatusBoard(self._board, writable=True),
        )

    def families(self) -> dict[str, Metric]:
        text = Metrics(ServerCounters(self._tally, SERVERS), StatusBoard(self._board), NAME).text().decode()
        return {item.name: item for item in text_string_to_metric_families(text)}

    def number(self, name: str, **labels: Any) -> float:
        """Of the samples that have these labels, and others."""
        expected = {(key, str(value)) for key, value in labels.items()}
        samples = [sample for family in self.families().values() for sample in family.samples if sample.name == name]
        assert samples, f"no {name}"
        return sum(sample.value for sample in samples if expected <= sample.labels.items())


@pytest.fixture
def pages() -> Iterator[Pages]:
    result = Pages()
    yield result
    result.board.close()
    vars(result).clear()


def shape_of(family: Metric) -> tuple[str, set[str], list[float]]:
    """Type, labels and buckets."""
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
    return family.type, labels, sorted(bounds)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("name", "kind", "buckets"), VLLM, ids=[name for name, *_ in VLLM])
def test_a_metric_of_vllm_has_its_type_labels_and_buckets(pages: Pages, name: str, kind: str, buckets: str) -> None:
    labels = LABELS | {"finished_reason"} if name == "request_success" else LABELS
    labels = labels - {"engine"} if name in OF_ALL_ENGINES else labels
    assert shape_of(pages.families()[f"vllm:{name}"]) == (kind, labels, [float(word) for word in buckets.split()])


def test_metrics_are_those_of_vllm_and_ours(pages: Pages) -> None:
    row = pages.tally.rows[0]
    row[ProcessCounters.ANSWERED.at["chat", "200"]] += 1
    result = pages.families()
    assert result.keys() == {f"vllm:{name}" for name, *_ in VLLM} | OURS.keys()
    assert {name: shape_of(result[name])[:2] for name in OURS} == OURS


def test_reasons_are_those_of_vllm(pages: Pages) -> None:
    reasons = {sample.labels["finished_reason"] for sample in pages.families()["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


def families_of_segments() -> dict[str, Metric]:
    with Store(1 << 20) as store, Ring(bytes) as ring, ring.open_sender(), ring.open_receiver():
        return {family.name: family for family in SegmentMetrics([ring], store, CONFIG, os.getpid()).collect()}


def test_metrics_of_segments_have_their_types_and_labels() -> None:
    assert {name: shape_of(family)[:2] for name, family in families_of_segments().items()} == OF_SEGMENTS


def test_every_query_of_the_grafana_dashboard_is_of_metrics_that_there_are(pages: Pages) -> None:
    row = pages.tally.rows[0]
    row[ProcessCounters.ANSWERED.at["chat", "200"]] += 1
    families = {**pages.families(), **families_of_segments()}
    there = {sample.name for family in families.values() for sample in family.samples}
    dashboard = json.loads(grafana.encoded())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [*expressions, *(item["query"] for item in dashboard["templating"]["list"] if item["type"] == "query")]
    assert len(expressions) > 12
    for query in queries:
        named = set(re.findall(r"\b(?:vllm:|penstock_)\w+", query))
        assert named and named <= there, f"{query}: {named - there}"
    used = {name for query in queries for name in re.findall(r"\b(?:vllm:|penstock_)\w+", query)}
    shown = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in used}
    assert shown == families.keys(), "a metric that no panel shows"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["title"] for panel in dashboard["panels"])


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_metrics_add_up_the_counts_of_all_servers_by_engine(pages: Pages) -> None:
    for number, row in enumerate(pages.tally.rows, 1):
        served = row.engines[1]
        served[Served.PROMPT_TOKENS] += number
        served[Served.GENERATION_TOKENS] += 10 * number
        served[Served.FINISHED.at["length"]] += number
        Served.FIRST_TOKEN.observe(served.words, 0.003)
        Served.INTER_TOKEN.observe(served.words, 1000.0, number)
        Served.REQUEST.observe(served.words, 0.3)  # a bound belongs to its own bucket
    where = {"model_name": NAME, "engine": 1}
    assert pages.number("vllm:prompt_tokens_total", **where) == 6
    assert pages.number("vllm:generation_tokens_total", **where) == 60
    assert pages.number("vllm:request_success_total", finished_reason="length", **where) == 6
    assert pages.number("vllm:request_success_total", finished_reason="stop", **where) == 0
    name = "vllm:time_to_first_token_seconds"
    assert [pages.number(f"{name}_bucket", le=le, **where) for le in ("0.001", "0.005", "+Inf")] == [0, 3, 3]
    assert pages.number(f"{name}_sum", **where) == pytest.approx(0.009)
    name = "vllm:inter_token_latency_seconds"
    assert [pages.number(f"{name}_bucket", le=le, **where) for le in ("80.0", "+Inf")] == [0, 6]
    assert (pages.number(f"{name}_count", **where), pages.number(f"{name}_sum", **where)) == (6, 6000)
    assert pages.number("vllm:e2e_request_latency_seconds_bucket", le="0.3", **where) == 3
    assert all(pages.number(f"vllm:{text}", engine=0) == 0 for text in ("prompt_tokens_total", "request_success_total"))


def test_metrics_show_the_status_board_of_each_core(pages: Pages) -> None:
    row = pages.board.row(1)
    words = {
        StatusBoard.SERVING: 2, StatusBoard.RUNNING: 5, StatusBoard.WAITING: 3,
        StatusBoard.BLOCKS: 100, StatusBoard.FREE_BLOCKS: 75,
        StatusBoard.PREFIX_QUERIES: 50, StatusBoard.PREFIX_HITS: 16, StatusBoard.PREEMPTIONS: 4, StatusBoard.STEPS: 9,
        StatusBoard.OWN_NS: 1_500_000_000,
    }  # fmt: skip
    for word, number in words.items():
        row[word] = number
    StatusBoard.QUEUE_TIMES.observe(row, 0.4, 2)
    where = {"model_name": NAME, "engine": 1}
    for name, number in (
        ("num_requests_running", 5), ("num_requests_waiting", 3), ("kv_cache_usage_perc", 0.25),
        ("prefix_cache_queries_total", 50), ("prefix_cache_hits_total", 16), ("num_preemptions_total", 4),
        ("request_queue_time_seconds_count", 2), ("request_queue_time_seconds_sum", 0.8),
    ):  # fmt: skip
        assert pages.number(f"vllm:{name}", **where) == pytest.approx(number), name
        assert pages.number(f"vllm:{name}", engine=0) == 0, name
    assert pages.number("penstock_engine_core_seconds_total", engine=1) == 1.5
    assert pages.number("penstock_engine_incarnation", engine=1) == 2


def test_lengths_are_counted_in_tokens(pages: Pages) -> None:
    """A sum in nanoseconds would overflow 64 bits within weeks."""
    words = pages.tally.rows[2].engines[0].words
    Served.PROMPT_LENGTHS.observe(words, 10**12, 10**3)
    Served.PROMPT_LENGTHS.observe(words, 7)
    name, where = "vllm:request_prompt_tokens", {"model_name": NAME, "engine": 0}
    assert pages.number(f"{name}_sum", **where) == pytest.approx(1e15 + 7, abs=1)
    assert [pages.number(f"{name}_bucket", le=le, **where) for le in ("5.0", "10.0", "+Inf")] == [0, 1, 1001]


def test_media_look_ups_are_all_items_and_hits_those_found(pages: Pages) -> None:
    for row in pages.tally.rows:
        row.count_items(ScopeStats(hits=2, puts=3, inline_small=1))
    assert pages.number("vllm:mm_cache_queries_total", model_name=NAME) == 18
    assert pages.number("vllm:mm_cache_hits_total", model_name=NAME) == 6


def test_answers_are_counted_by_server_route_and_status(pages: Pages) -> None:
    for server, row in enumerate(pages.tally.rows):
        row[ProcessCounters.ANSWERED.at["chat", "200"]] += 3 + server
        Admission(ServerOptions(), row).count("chat", 418)
        row[ProcessCounters.OPEN] = 7
    assert pages.number("penstock_requests_total", server=1, route="chat", status=200) == 4
    assert pages.number("penstock_requests_total", server=0, route="chat", status=400) == 1
    assert pages.number("penstock_open_requests", server=1) == 7


def test_new_requests_are_counted_by_server(pages: Pages) -> None:
    for server, row in enumerate(pages.tally.rows):
        row.queue[QueueCounters.WAITING] = 3 + server
        row.queue[QueueCounters.TIMEOUTS] += 5
    assert pages.number("penstock_new_requests_waiting", server=1) == 4
    assert pages.number("penstock_queue_timeouts_total", server=1) == 5
    for row in pages.tally.rows:
        row.clear_gauges()
    assert pages.number("penstock_new_requests_waiting", server=1) == 0
    assert pages.number("penstock_queue_timeouts_total", server=1) == 5


def test_trials_and_convictions_are_added_up_over_servers_and_engines(pages: Pages) -> None:
    words = ("TRIALS", "TRIALS_REFUSED", "CONVICTIONS", "QUARANTINED")
    for number, word in enumerate(words, 1):
        for row in pages.tally.rows:
            for served in row.engines:
                served.migration[getattr(MigrationCounters, word)] += number
    places = sum(len(row.engines) for row in pages.tally.rows)
    assert [pages.number(f"{name}_total") for name in BLAME] == [number * places for number in range(1, 5)]


def test_migrations_are_added_up_for_the_engine_that_lost_the_requests(pages: Pages) -> None:
    for number, row in enumerate(pages.tally.rows, 1):
        counters = row.engines[1].migration
        counters[MigrationCounters.WAITING] = number
        counters[MigrationCounters.KEPT_TOKENS] = 100 * number
        counters[MigrationCounters.GIVEN_UP] += 1
        counters[MigrationCounters.MIGRATIONS.at["failed"]] += 1
        counters[MigrationCounters.MIGRATIONS.at["output"]] += 1
        MigrationCounters.PAUSE.observe(counters.words, 0.25)
    assert pages.number("penstock_requests_waiting_to_resume", engine=1) == 6
    assert pages.number("penstock_kept_tokens", engine=1) == 600
    assert pages.number("penstock_requests_given_up_total", engine=1) == 3
    numbers = {cause: pages.number("penstock_migrations_total", engine=1, cause=cause) for cause in MIGRATION_CAUSES}
    assert numbers == {"died": 0, "failed": 3, "planned": 0, "unknown": 0, "output": 3}
    name = "penstock_migration_pause_seconds"
    assert [pages.number(f"{name}_bucket", le=le, engine=1) for le in ("0.2", "0.3", "+Inf")] == [0, 3, 3]
    assert pages.number("penstock_migrations_total", engine=0) == pages.number(f"{name}_count", engine=0) == 0
    for row in pages.tally.rows:
        row.clear_gauges()
    assert pages.number("penstock_kept_tokens") == pages.number("penstock_requests_waiting_to_resume") == 0
    assert pages.number("penstock_requests_given_up_total", engine=1) == 3


def test_rows_and_engines_do_not_touch_each_other(pages: Pages) -> None:
    answered = ProcessCounters.ANSWERED.at["models", "504"]
    for row in pages.tally.rows:
        row[ProcessCounters.FAILED_STARTS] = row[answered] = 1
        for engine in row.engines:
            for word in range(Served.WORDS):
                engine[word] += 1
    words = [
        item for row in pages.tally.rows for engine in row.engines for item in (engine[w] for w in range(Served.WORDS))
    ]
    assert set(words) == {1}
    assert all(row[ProcessCounters.FAILED_STARTS] == row[answered] == 1 for row in pages.tally.rows)


def test_histogram_counts_values_above_its_last_bound() -> None:
    class Waits(CounterRow, scope="server"):
        WAITS = histogram("waits", "", bounds=(1.0, 2.0))

    row = Waits(memoryview(bytearray(8 * 6)).cast("Q")[1:5])
    for seconds in (0.0, 1.0, 1.5, 2.5, 9.0):
        Waits.WAITS.observe(row.words, seconds)
    assert Waits.WORDS == 4 and Waits.WAITS.counts(row.words) == [2, 1, 2] and Waits.WAITS.sum_of(row.words) == 14.0


# ── channels and store ───────────────────────────────────────────────────────────────────────────────────────────────
def test_channels_and_store_are_reported_as_their_segments_count() -> None:
    with Store(1 << 20, name="images") as store, Ring(bytes, name="results 0", max_peers=4) as ring:
        key = content_key(b"image")
        lease = store.put(b"x" * 1000, key=key)
        store.get(key).release()
        with pytest.raises(Missing):
            store.get(content_key(b"another"))
        with ring.open_sender() as sender, ring.open_receiver() as receiver:
            for record in (b"one", b"three", b"x" * (1 << 19)):
                sender.send(record)
            receiver.receive()
            registry = CollectorRegistry()
            registry.register(SegmentMetrics([ring], store, CONFIG, os.getpid()))
            numbers = {
                (sample.name, *sample.labels.values()): sample.value
                for family in registry.collect()
                for sample in family.samples
            }
        lease.release()
    for name, end, number in (
        ("records_total", "sender 0", 3),
        ("bytes_total", "sender 0", 8 + (1 << 19)),
        ("spills_total", "sender 0", 1),
        ("exhaustions_total", "sender 0", 0),
        ("records_total", "receiver 0", 1),
        ("behind_records", "receiver 0", 2),
    ):
        assert numbers[f"penstock_channel_{name}", "results 0", end] == number, name
    assert ("penstock_channel_behind_records", "results 0", "sender 0") not in numbers
    for name, number in (("values", 1), ("leases", 1), ("hits_total", 1), ("misses_total", 1), ("puts_total", 1)):
        assert numbers[(f"penstock_store_{name}",)] == number, name
    assert numbers["penstock_store_bytes", "size"] == 1 << 20


def test_an_end_that_no_process_has_taken_is_not_reported() -> None:
    with Inbox(bytes, senders=3, name="inbox 0") as inbox, inbox.open_sender(1):
        registry = CollectorRegistry()
        registry.register(SegmentMetrics([inbox], None, CONFIG, os.getpid()))
        samples = [sample for family in registry.collect() for sample in family.samples]
        ends = {sample.labels["end"] for sample in samples if "end" in sample.labels}
    assert ends == {"sender 1"}


def test_items_are_counted_by_how_they_travel(pages: Pages) -> None:
    scope = Scope()
    scope.put(b"small")
    scope.put(bytes(1 << 20))
    pages.tally.rows[1].count_items(scope.stats())
    pages.tally.rows[1].count_items(ScopeStats(hits=2))
    for how, number in (("hit", 2), ("put", 0), ("inline_small", 1), ("inline_without_store", 1), ("inline_full", 0)):
        assert pages.number("penstock_items_total", server=1, how=how) == number
    assert pages.number("penstock_items_total", server=0) == 0


def test_media_in_flight_are_counted_by_stage_until_their_process_ends(pages: Pages) -> None:
    row = pages.tally.rows[2]
    row[ProcessCounters.MEDIA_LIMITS + 1] = 500
    row.set_media(0, 100, 2)
    row.set_media(2, 300, 1)
    row.set_decoders(2, 5)
    for name, stage, number in (
        ("penstock_media_bytes", "bodies", 100),
        ("penstock_media_waiting", "bodies", 2),
        ("penstock_media_bytes", "files", 0),
        ("penstock_media_limit_bytes", "files", 500),
        ("penstock_media_bytes", "decoded", 300),
        ("penstock_media_waiting", "decoded", 1),
    ):
        assert pages.number(name, server=2, stage=stage) == number, (name, stage)
    assert pages.number("penstock_videos_decoding", server=2) == 2
    assert pages.number("penstock_videos_waiting", server=2) == 5
    row.clear_gauges()
    assert pages.number("penstock_media_bytes", server=2, stage="decoded") == 0
    assert pages.number("penstock_media_waiting", server=2, stage="bodies") == 0
    assert pages.number("penstock_videos_waiting", server=2) == 0
    assert pages.number("penstock_media_limit_bytes", server=2, stage="files") == 500


def test_videos_are_counted_by_how_their_decoders_ended(pages: Pages) -> None:
    row = pages.tally.rows[0]
    for end, seconds in (("decoded", 0.5), ("decoded", 1.0), ("timeout", 30.0)):
        row.count_video(end, seconds)
    assert pages.number("penstock_videos_total", server=0, end="decoded") == 2
    assert pages.number("penstock_videos_total", server=0, end="timeout") == 1
    assert pages.number("penstock_videos_total", server=0, end="died") == 0
    assert pages.number("penstock_video_decoder_seconds_total", server=0) == 31.5


def test_a_value_that_another_process_has_stored_counts_as_put(pages: Pages) -> None:
    with Store(1 << 20) as store, MediaScope(store) as scope:
        for number in range(3):
            scope.add(store.put({"a": number}))
        scope.puts_elsewhere += 1
        pages.tally.rows[0].count_items(scope.stats())
    assert pages.number("penstock_items_total", server=0, how="hit") == 2
    assert pages.number("penstock_items_total", server=0, how="put") == 1


def test_device_images_are_counted_by_their_way(pages: Pages) -> None:
    for way in ("device", "device", "store"):
        pages.tally.rows[0].count_device_image(way)
    for way, count in (("device", 2), ("peer", 0), ("store", 1)):
        assert pages.number("penstock_device_images_total", server=0, way=way) == count
