"""Counters of the server processes: a row of shared memory for each, so any process can report all rows.

A restarted server continues the row.
"""

from __future__ import annotations

import functools

from penstock import lowlevel
from penstock.engine._native import TokenCounters
from penstock.engine.cluster.counter import (
    FIRST_TOKEN_SECONDS,
    LENGTHS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    WORD_NBYTES,
    CounterRow,
    CounterSet,
    Row,
    counter,
    gauge,
    histogram,
    state,
)
from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.media.image_messages import WAYS
from penstock.engine.media.media_budget import STAGES
from penstock.tensor import ScopeStats

ROUTES = ("chat", "completions", "embeddings", "score", "rerank", "tokenize", "models", "responses", "messages")
STATUSES = (200, 400, 401, 404, 413, 422, 429, 499, 500, 503, 504)  # 499: the client has gone
FINISHED_REASONS = ("stop", "length", "abort", "error")  # as vLLM names them
# How the tensors of prompts travel: the name in metrics, and the field of `ScopeStats`.
ITEM_FIELDS = {
    "hit": "hits",
    "put": "puts",
    **{how: how for how in ("inline_small", "inline_full", "inline_without_store", "inline_too_large")},
}
VIDEO_ENDS = ("decoded", "refused", "timeout", "died", "cancelled")  # of a decoder's process
BY_STAGE = {"stage": STAGES}


class Served(CounterRow, scope="engine"):
    """Counters of one engine's work for one server process. A sequence is one of the n samples of a prompt."""

    PROMPT_TOKENS = counter(
        "vllm:prompt_tokens", "prompt tokens of sequences that have their first token, cached ones included", "load"
    )
    PROMPT_TOKENS_CACHED = counter(
        "vllm:prompt_tokens_cached",
        "tokens of them that the prefix cache had",
        "divided by `vllm:prompt_tokens_total`: the share that is not computed",
    )
    GENERATION_TOKENS = counter("vllm:generation_tokens", "generated tokens", "its rate is the throughput")
    FINISHED = counter(
        "vllm:request_success",
        "sequences that have ended, by `finished_reason`: `stop`, `length`, `abort` (the client disconnected), `error` "
        "(an engine gave up, or the request could not be resumed)",
        "errors",
        labels={"finished_reason": FINISHED_REASONS},
    )
    TOOL_CALLS = counter("penstock_tool_calls", "tool calls in answers that have ended")
    FIRST_TOKEN = histogram(
        "vllm:time_to_first_token_seconds",
        "from a request's arrival in the server to the first token",
        "grows with `vllm:request_queue_time_seconds`: queueing; without: long prompts",
        bounds=FIRST_TOKEN_SECONDS,
    )
    INTER_TOKEN = histogram(
        "vllm:inter_token_latency_seconds",
        "from one token of a sequence to the next",
        "about the time of a step",
        bounds=TOKEN_SECONDS,
    )
    PER_OUTPUT_TOKEN = histogram(
        "vllm:request_time_per_output_token_seconds",
        "the mean time between tokens of each sequence that has ended; 0 for a sequence of one token",
        bounds=TOKEN_SECONDS,
    )
    REQUEST = histogram(
        "vllm:e2e_request_latency_seconds",
        "from a request's arrival in the server to its last token",
        bounds=REQUEST_SECONDS,
    )

    PROMPT_LENGTHS = histogram(
        "vllm:request_prompt_tokens",
        "tokens in the prompt of each sequence that has ended",
        bounds=LENGTHS,
        unit=1,
    )
    GENERATED_LENGTHS = histogram(
        "vllm:request_generation_tokens",
        "tokens of each answer that has ended",
        bounds=LENGTHS,
        unit=1,
    )
    LONGEST_LENGTHS = histogram(
        "vllm:request_max_num_generation_tokens",
        "tokens of the longest of the `n` answers of each prompt, when all have ended",
        bounds=LENGTHS,
        unit=1,
    )

    def __init__(self, words: Row) -> None:
        super().__init__(words[: self.WORDS])
        self.migration = MigrationCounters(words[self.WORDS :])

    @functools.cached_property
    def token_counters(self) -> TokenCounters:
        """Returns the counters of tokens after the first one, for native code."""
        spec = self.INTER_TOKEN.spec
        return TokenCounters(self.words, self.GENERATION_TOKENS, self.INTER_TOKEN, spec.bounds)


ENGINE_WORDS = Served.WORDS + MigrationCounters.WORDS  # of each engine, in the row of a server process


class ProcessCounters(CounterRow, scope="server"):
    """The row of one server process, as in `row[ProcessCounters.OPEN] += 1`."""

    PID = state()
    SERVING = state()  # 1: accepts connections; 2: drains, and answers only open requests
    FAILED_STARTS = state()  # consecutive ends of the server before service. Written by the launcher
    OPEN = gauge(
        "penstock_open_requests",
        "HTTP requests that a `server` process is answering",
        "near `--max-open-requests`: clients are being refused",
    )
    ANSWERED = counter(
        "penstock_requests",
        "HTTP answers, by `server`, `route` and `status`; 499: the client had gone",
        "errors: 429 too many open, 503 no engine or a request that could not be resumed, 500 a bug, or a request that "
        "made its engine fail",
        labels={"route": ROUTES, "status": tuple(map(str, STATUSES))},
    )
    ITEMS = counter(
        "penstock_items",
        "images, videos and embeddings of prompts, by `server` and `how`: `hit` (the store had it), `put`, or inline: "
        "`inline_small`, `inline_without_store`, `inline_full` (no room in time), `inline_too_large`",
        "`inline_full` grows: more `--mm-processor-cache-gb`",
        labels={"how": tuple(ITEM_FIELDS)},
    )
    MM_QUERIES = counter(
        "vllm:mm_cache_queries",
        "images, videos and embeddings that were looked up in the store",
        is_total=True,
        value=lambda row: sum(row[word] for word in ProcessCounters.ITEMS.at.values()),
    )
    MM_HITS = counter(
        "vllm:mm_cache_hits",
        "those that the store had",
        "divided by `vllm:mm_cache_queries_total`: the hit rate",
        is_total=True,
        value=lambda row: row[ProcessCounters.ITEMS.at["hit"]],
    )
    MEDIA_NBYTES = gauge(
        "penstock_media_bytes",
        "bytes of images, videos and long bodies that a `server` holds, by `stage`: `bodies` (as they are received, "
        "twice their length), `files` (read or fetched), `decoded` (pixels and tensors, while they are made)",
        "at `penstock_media_limit_bytes`: others wait",
        labels=BY_STAGE,
    )
    MEDIA_LIMITS = gauge(
        "penstock_media_limit_bytes",
        "the maximum of each `stage`: a quarter, a quarter and half of `--media-mb-in-flight`",
        labels=BY_STAGE,
        is_kept=True,
    )
    MEDIA_WAITING = gauge(
        "penstock_media_waiting",
        "bodies, images and videos that wait for room in `penstock_media_bytes`, by `stage`",
        "above 0 for long: more `--media-mb-in-flight`",
        labels=BY_STAGE,
    )
    DECODING = gauge(
        "penstock_videos_decoding",
        "videos that a `server` is decoding, each in a process of its own, those included that wait for bytes",
        "at `--max-concurrent-videos`: others wait",
    )
    DECODER_WAITING = gauge(
        "penstock_videos_waiting",
        "videos that wait for a decoder process",
        "above 0 for long: more `--max-concurrent-videos`, where processors are idle",
    )
    VIDEOS = counter(
        "penstock_videos",
        "videos that had a decoder, by its `end`: `decoded`, `refused` (a limit, or a file that cannot be read), "
        "`timeout` (killed after `--video-decode-timeout`), `died`, `cancelled` (the client had gone)",
        "`died`, `timeout`: damaged or hostile files, or too little memory",
        labels={"end": VIDEO_ENDS},
    )
    VIDEO_NS = counter(
        "penstock_video_decoder_seconds",
        "seconds of decoder processes, waits for bytes included",
        "divided by the videos: what one takes",
        unit=1e9,
    )

    DEVICE_IMAGES = counter(
        "penstock_device_images",
        "images that a media process has processed on a device, by the `way` of their tensors to workers: `device` "
        "(in its memory, for its own workers), `peer` (there, and workers on other devices copy them), `store` (other "
        "workers do not reach the device, or its memory had no room)",
        "`store` grows with workers that reach each other: more `--mm-processor-cache-gb`",
        labels={"way": WAYS},
    )

    def __init__(self, words: Row) -> None:
        super().__init__(words[: self.WORDS])
        engines = self.WORDS + QueueCounters.WORDS
        self.queue = QueueCounters(words[self.WORDS : engines])
        begins = range(engines, len(words), ENGINE_WORDS)
        self.engines = [Served(words[begin : begin + ENGINE_WORDS]) for begin in begins]

    @classmethod
    def total_words(cls, engines: int) -> int:
        return cls.WORDS + QueueCounters.WORDS + engines * ENGINE_WORDS

    def count_items(self, stats: ScopeStats) -> None:
        """Counts how the values of a prompt travel."""
        for how, field in ITEM_FIELDS.items():
            self.words[self.ITEMS.at[how]] += getattr(stats, field)

    def count_device_image(self, way: str) -> None:
        self.words[self.DEVICE_IMAGES.at[way]] += 1

    def set_media(self, stage: int, held: int, waiting: int) -> None:
        self.words[self.MEDIA_NBYTES + stage] = held
        self.words[self.MEDIA_WAITING + stage] = waiting

    def set_decoders(self, busy: int, waiting: int) -> None:
        self.words[self.DECODING] = busy
        self.words[self.DECODER_WAITING] = waiting

    def count_video(self, end: str, seconds: float) -> None:
        self.words[self.VIDEOS.at[end]] += 1
        self.words[self.VIDEO_NS] += round(seconds * 1e9)

    def clear_gauges(self) -> None:
        """Clears the open requests of a process that has ended."""
        super().clear_gauges()
        self.queue.clear_gauges()
        for served in self.engines:
            served.migration.clear_gauges()


class ServerCounters:
    def __init__(self, segment: lowlevel.Segment, servers: int, *, writable: bool = False) -> None:
        words: Row = segment.view(writable=writable).cast("Q")
        size = len(words) // servers
        self.rows = [ProcessCounters(words[begin : begin + size]) for begin in range(0, servers * size, size)]

    @staticmethod
    def create(servers: int, engines: int = 1) -> lowlevel.Segment:
        return lowlevel.Segment.create(servers * ProcessCounters.total_words(engines) * WORD_NBYTES, name="tally")


PARTS: dict[str, tuple[type[CounterSet], ...]] = {  # of reports: what an engine counts, servers of it, and each server
    "engines": (StatusBoard,),
    "served": (Served, MigrationCounters),
    "servers": (ProcessCounters, QueueCounters),
}


def counter_rows(board: StatusBoard, tally: ServerCounters) -> dict[type[CounterSet], list[list[Row]]]:
    """Returns the rows of each kind, by engine or by server process. Numbers of rows that stand together add up."""
    engines, servers = range(len(board.rows)), tally.rows
    return {
        StatusBoard: [[row] for row in board.rows],
        Served: [[server.engines[engine].words for server in servers] for engine in engines],
        MigrationCounters: [[server.engines[engine].migration.words for server in servers] for engine in engines],
        ProcessCounters: [[server.words] for server in servers],
        QueueCounters: [[server.queue.words] for server in servers],
    }
