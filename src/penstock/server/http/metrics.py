"""`/metrics`: the counters of all server processes and the status board, in Prometheus' format.

A metric that vLLM also has carries vLLM's name, type, labels and buckets; others are called `penstock_…`. Cores,
workers of rank 0 and servers do the counting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from penstock.engine.cluster.histogram import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, Bounds, Histogram
from penstock.engine.cluster.migration_counters import (
    MIGRATION_CAUSES,
    PAUSE_SECONDS,
    MigrationCounters,
    QueueCounters,
)
from penstock.engine.cluster.status_board import Row as EngineRow
from penstock.engine.cluster.status_board import StatusBoard, queue_times_of
from penstock.server.media.media_budget import STAGES
from penstock.server.status.counters import (
    FINISHED_REASONS,
    ITEM_FIELDS,
    ROUTES,
    STATUSES,
    VIDEO_ENDS,
    ProcessCounters,
    Served,
    ServerCounters,
)

OF_MEDIA = (
    ("media_bytes", "Bytes of images, videos and long bodies that are held", ProcessCounters.MEDIA_NBYTES),
    ("media_limit_bytes", "Maximum of these bytes", ProcessCounters.MEDIA_LIMITS),
    ("media_waiting", "Images, videos and bodies that wait for bytes", ProcessCounters.MEDIA_WAITING),
)
OF_DECODERS = (
    ("videos_decoding", "Videos that are being decoded", ProcessCounters.DECODING),
    ("videos_waiting", "Videos that wait for a decoder", ProcessCounters.DECODER_WAITING),
)
LABELS = ("model_name", "engine")  # as vLLM has them
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds from a request to the first token", "first_token", FIRST_TOKEN_SECONDS),
    ("inter_token_latency_seconds", "Seconds from a token to the next", "inter_token", TOKEN_SECONDS),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds from a token of a finished sequence to the next",
        "per_output_token",
        TOKEN_SECONDS,
    ),
    ("e2e_request_latency_seconds", "Seconds from a request to its last token", "request", REQUEST_SECONDS),
)
COUNTED_BY_SERVERS = (
    ("prompt_tokens", "Prompt tokens of sequences that have their first token", Served.PROMPT_TOKENS),
    ("generation_tokens", "Generated tokens", Served.GENERATION_TOKENS),
)
COUNTED_BY_CORES = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", StatusBoard.PREFIX_QUERIES),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache had", StatusBoard.PREFIX_HITS),
    ("num_preemptions", "Preemptions", StatusBoard.PREEMPTIONS),
)
OF_AN_ENGINE = (
    ("steps", "Steps since the engine was started", StatusBoard.STEPS, 1.0),
    ("core_seconds", "Seconds that the core itself spent on them", StatusBoard.OWN_NS, 1e9),
    ("busy_seconds", "Seconds in which the device ran", StatusBoard.BUSY_NS, 1e9),
    ("idle_seconds", "Seconds in which the device did not run though a request was open", StatusBoard.IDLE_NS, 1e9),
    ("link_resumptions", "Lost connections to other nodes that were made again", StatusBoard.LINK_RESUMPTIONS, 1.0),
)
GAUGES_OF_MIGRATION = (
    ("requests_waiting_to_resume", "Requests that the engine lost and no engine runs yet", MigrationCounters.WAITING),
    ("kept_tokens", "Tokens of open requests, which servers keep to resume them", MigrationCounters.KEPT_TOKENS),
)
COUNTED_OF_BLAME = (
    (
        "trials",
        "Failures of an engine while one request ran alone",
        MigrationCounters.TRIALS,
    ),
    ("trials_refused", "Suspects of a client that had had all of its trials", MigrationCounters.TRIALS_REFUSED),
    ("convictions", "Requests that have made an engine fail twice while they ran alone", MigrationCounters.CONVICTIONS),
    ("quarantined_requests", "Requests that were refused as they equal a convicted one", MigrationCounters.QUARANTINED),
)
ENCODINGS = (
    ("encodings", "Images that the vision encoder has encoded", StatusBoard.ENCODINGS),
    ("encodings_found", "Encodings of images that were found in the store", StatusBoard.ENCODINGS_FOUND),
    ("encodings_unshared", "Encodings of images that could not be put into the store", StatusBoard.ENCODINGS_UNSHARED),
)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics(Collector):
    def __init__(
        self, tally: ServerCounters, board: StatusBoard, model_name: str, segments: Collector | None = None
    ) -> None:
        """`model_name`: the first name by which clients call the model; `segments`: metrics of channels and store."""
        self._servers = tally.rows
        self._engines = board.rows
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if segments is not None:
            self._registry.register(segments)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Family]:
        yield from self._as_vllm_names_them()
        yield from self._of_servers()
        yield from self._of_media()
        yield from self._of_engines()
        yield from self._of_migration()
        yield from self._of_blame()

    def _labels(self, engine: int) -> list[str]:
        return [self._model_name, str(engine)]

    def _served(self, engine: int) -> list[Served]:
        return [row.engines[engine] for row in self._servers]

    # ── vllm:… ──
    def _as_vllm_names_them(self) -> Iterator[Family]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences that run in a batch", labels=LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait for a batch", labels=LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", labels=LABELS)
        for engine, row in enumerate(self._engines):
            labels = self._labels(engine)
            running.add_metric(labels, row[StatusBoard.RUNNING])
            waiting.add_metric(labels, row[StatusBoard.WAITING])
            usage.add_metric(labels, _share_in_use(row))
        yield from (running, waiting, usage)
        for name, text, word in COUNTED_BY_CORES:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine, row in enumerate(self._engines):
                counter.add_metric(self._labels(engine), row[word])
            yield counter
        for name, text, word in COUNTED_BY_SERVERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine in range(len(self._engines)):
                counter.add_metric(self._labels(engine), sum(served[word] for served in self._served(engine)))
            yield counter
        yield self._finished()
        for name, text, attribute, bounds in HISTOGRAMS:
            histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine in range(len(self._engines)):
                parts = [getattr(served, attribute) for served in self._served(engine)]
                _add(histogram, self._labels(engine), parts, bounds)
            yield histogram
        queue = HistogramMetricFamily(
            "vllm:request_queue_time_seconds",
            "Seconds from a request's arrival in the core to its batch",
            labels=LABELS,
        )
        for engine, row in enumerate(self._engines):
            _add(queue, self._labels(engine), [queue_times_of(row)], REQUEST_SECONDS)
        yield queue

    def _finished(self) -> CounterMetricFamily:
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished sequences by reason", labels=[*LABELS, "finished_reason"]
        )
        for engine in range(len(self._engines)):
            for number, reason in enumerate(FINISHED_REASONS):
                many = sum(served[Served.FINISHED + number] for served in self._served(engine))
                finished.add_metric([*self._labels(engine), reason], many)
        return finished

    # ── penstock_… ──
    def _of_servers(self) -> Iterator[Family]:
        requests = CounterMetricFamily(
            "penstock_requests", "HTTP answers by route and status", labels=["server", "route", "status"]
        )
        is_open = GaugeMetricFamily("penstock_open_requests", "HTTP requests being answered", labels=["server"])
        waiting = GaugeMetricFamily(
            "penstock_new_requests_waiting", "New requests that wait for an engine that serves", labels=["server"]
        )
        timeouts = CounterMetricFamily(
            "penstock_queue_timeouts", "New requests refused as no engine has served in time", labels=["server"]
        )
        for server, row in enumerate(self._servers):
            is_open.add_metric([str(server)], row[ProcessCounters.OPEN])
            waiting.add_metric([str(server)], row.queue[QueueCounters.WAITING])
            timeouts.add_metric([str(server)], row.queue[QueueCounters.TIMEOUTS])
            for route in ROUTES:
                for status in STATUSES:
                    many = row[row.answered(route, status)]
                    if many:
                        requests.add_metric([str(server), route, str(status)], many)
        items = CounterMetricFamily(
            "penstock_items", "Images, videos and embeddings of prompts by how they travel", labels=["server", "how"]
        )
        for server, row in enumerate(self._servers):
            for number, how in enumerate(ITEM_FIELDS):
                items.add_metric([str(server), how], row[ProcessCounters.ITEMS + number])
        yield from (requests, is_open, waiting, timeouts, items)

    def _of_media(self) -> Iterator[Family]:
        for name, text, word in OF_MEDIA:
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=["server", "stage"])
            for server, row in enumerate(self._servers):
                for number, stage in enumerate(STAGES):
                    gauge.add_metric([str(server), stage], row[word + number])
            yield gauge
        for name, text, word in OF_DECODERS:
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=["server"])
            for server, row in enumerate(self._servers):
                gauge.add_metric([str(server)], row[word])
            yield gauge
        videos = CounterMetricFamily(
            "penstock_videos", "Videos that had a decoder, by how it ended", labels=["server", "end"]
        )
        seconds = CounterMetricFamily("penstock_video_decoder_seconds", "Seconds of decoders", labels=["server"])
        for server, row in enumerate(self._servers):
            seconds.add_metric([str(server)], row[ProcessCounters.VIDEO_NS] / 1e9)
            for number, end in enumerate(VIDEO_ENDS):
                videos.add_metric([str(server), end], row[ProcessCounters.VIDEOS + number])
        yield from (videos, seconds)

    def _of_engines(self) -> Iterator[Family]:
        incarnation = GaugeMetricFamily(
            "penstock_engine_incarnation", "How often the engine was started; 0: it does not serve", labels=["engine"]
        )
        for engine, row in enumerate(self._engines):
            incarnation.add_metric([str(engine)], row[StatusBoard.SERVING])
        yield incarnation
        for name, text, word, unit in OF_AN_ENGINE:
            counter = CounterMetricFamily(f"penstock_engine_{name}", text, labels=["engine"])
            for engine, row in enumerate(self._engines):
                counter.add_metric([str(engine)], row[word] / unit)
            yield counter
        for name, text, word in ENCODINGS:
            counter = CounterMetricFamily(f"penstock_{name}", text, labels=["engine"])
            for engine, row in enumerate(self._engines):
                counter.add_metric([str(engine)], row[word])
            yield counter

    def _of_migration(self) -> Iterator[Family]:
        """Yields what clients count of requests that their engine has lost."""
        counters = [[served.migration for served in self._served(engine)] for engine in range(len(self._engines))]
        for name, text, word in GAUGES_OF_MIGRATION:
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=["engine"])
            for engine, parts in enumerate(counters):
                gauge.add_metric([str(engine)], sum(part[word] for part in parts))
            yield gauge
        migrations = CounterMetricFamily(
            "penstock_migrations", "Requests that the engine lost and that were resumed", labels=["engine", "cause"]
        )
        given_up = CounterMetricFamily(
            "penstock_requests_given_up", "Requests that the engine lost and that ended so", labels=["engine"]
        )
        pause = HistogramMetricFamily(
            "penstock_migration_pause_seconds",
            "Seconds from a loss to the next token",
            labels=["engine"],
        )
        for engine, parts in enumerate(counters):
            for at, cause in enumerate(MIGRATION_CAUSES, MigrationCounters.MIGRATIONS):
                migrations.add_metric([str(engine), cause], sum(part[at] for part in parts))
            given_up.add_metric([str(engine)], sum(part[MigrationCounters.GIVEN_UP] for part in parts))
            _add(pause, [str(engine)], [part.pause for part in parts], PAUSE_SECONDS)
        yield from (migrations, given_up, pause)

    def _of_blame(self) -> Iterator[Family]:
        suspects = GaugeMetricFamily(
            "penstock_suspects", "Open requests that may have made an engine fail", labels=["engine"]
        )
        for engine, row in enumerate(self._engines):
            suspects.add_metric([str(engine)], row[StatusBoard.SUSPECTS])
        yield suspects
        counters = [served.migration for engine in range(len(self._engines)) for served in self._served(engine)]
        for name, text, word in COUNTED_OF_BLAME:
            family = CounterMetricFamily(f"penstock_{name}", text)
            family.add_metric([], sum(part[word] for part in counters))
            yield family


def _share_in_use(row: EngineRow) -> float:
    """Returns the share of KV-cache blocks in use; 0 if the engine does not serve, as it has no cache then."""
    blocks = row[StatusBoard.BLOCKS]
    return 1 - row[StatusBoard.FREE_BLOCKS] / blocks if blocks else 0.0


def _add(family: HistogramMetricFamily, labels: list[str], parts: Sequence[Histogram], bounds: Bounds) -> None:
    """Adds a histogram: the sum of the histograms of all server processes."""
    counts = map(sum, zip(*(part.counts for part in parts), strict=True))
    buckets = list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
    family.add_metric(labels, buckets, sum(part.seconds for part in parts))
