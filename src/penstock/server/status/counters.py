"""Counters of the server processes: a row of shared memory for each, so any process can report those of all.

Each number is one word with one writer, as on the status board; a restarted server continues with its row. `metrics`
writes them for Prometheus.
"""

from __future__ import annotations

from typing import Any

from penstock import lowlevel
from penstock.engine.cluster.histogram import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, Histogram, words_of
from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.server.media.media_budget import STAGES
from penstock.tensor import ScopeStats

ROUTES = ("chat", "completions", "tokenize", "models")
STATUSES = (200, 400, 401, 404, 413, 422, 429, 499, 500, 503, 504)  # 499: the client has gone
FINISHED_REASONS = ("stop", "length", "abort", "error")  # as vLLM names them
# How the tensors of prompts travel, as metrics name it, and the field of `ScopeStats`.
ITEM_FIELDS = {
    "hit": "hits",
    "put": "puts",
    **{how: how for how in ("inline_small", "inline_full", "inline_without_store", "inline_too_large")},
}
VIDEO_ENDS = ("decoded", "refused", "timeout", "died", "cancelled")  # of a decoder's process
WORD_NBYTES = 8


class Served:
    """Counters of one engine's work for one server process. A sequence is one of the n samples of a prompt."""

    PROMPT_TOKENS = 0  # of sequences that have their first token
    GENERATION_TOKENS = 1
    FINISHED = 2  # sequences, by FINISHED_REASONS
    _HISTOGRAMS = FINISHED + len(FINISHED_REASONS)
    _BOUNDS = (FIRST_TOKEN_SECONDS, TOKEN_SECONDS, TOKEN_SECONDS, REQUEST_SECONDS)
    _MIGRATION = _HISTOGRAMS + sum(map(words_of, _BOUNDS))
    WORDS = _MIGRATION + MigrationCounters.WORDS

    def __init__(self, words: Any) -> None:
        self._words = words
        histograms, begin = [], self._HISTOGRAMS
        for bounds in self._BOUNDS:
            histograms.append(Histogram(words, begin, bounds))
            begin += words_of(bounds)
        self.first_token, self.inter_token, self.per_output_token, self.request = histograms
        self.migration = MigrationCounters(words[self._MIGRATION : self.WORDS])

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def count_tokens(self, tokens: int) -> None:
        self._words[self.GENERATION_TOKENS] += tokens

    def finish(self, reason: str, sequences: int = 1) -> None:
        self._words[self.FINISHED + FINISHED_REASONS.index(reason)] += sequences


class ProcessCounters:
    """The row of one server process, as in `row[ProcessCounters.OPEN] += 1`."""

    PID = 0
    SERVING = 1  # 1: it accepts connections; 2: it drains, and answers only open requests
    OPEN = 2  # requests
    FAILED_STARTS = 3  # in a row: how often this server has ended before it served. Written by the launcher
    MEDIA_NBYTES = 4  # from here on: bytes that are held, by STAGES of the media budget
    MEDIA_WAITING = MEDIA_NBYTES + len(STAGES)  # from here on: waits for bytes
    MEDIA_LIMITS = MEDIA_WAITING + len(STAGES)  # from here on: bytes that may be held
    DECODING = MEDIA_LIMITS + len(STAGES)  # videos, each in a process
    DECODER_WAITING = DECODING + 1  # videos that wait for a process
    VIDEO_NS = DECODER_WAITING + 1  # of these processes
    VIDEOS = VIDEO_NS + 1  # from here on: by VIDEO_ENDS
    ANSWERED = VIDEOS + len(VIDEO_ENDS)  # from here on: answers by route and status
    ITEMS = ANSWERED + len(ROUTES) * len(STATUSES)  # from here on: values of prompts, by ITEM_FIELDS
    _QUEUE = ITEMS + len(ITEM_FIELDS)  # from here on: new requests
    ENGINES = _QUEUE + QueueCounters.WORDS  # from here on: `Served` of each engine

    def __init__(self, words: Any) -> None:
        self._words = words
        self.queue = QueueCounters(words[self._QUEUE : self.ENGINES])
        begins = range(self.ENGINES, len(words), Served.WORDS)
        self.engines = [Served(words[begin : begin + Served.WORDS]) for begin in begins]

    @staticmethod
    def words(engines: int) -> int:
        return ProcessCounters.ENGINES + engines * Served.WORDS

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def count_items(self, stats: ScopeStats, put: int = 0) -> None:
        """Counts how the values of a prompt travel. `put`: hits of values that decoders put there for it."""
        stats.hits -= put
        stats.puts += put
        for number, field in enumerate(ITEM_FIELDS.values()):
            self._words[self.ITEMS + number] += getattr(stats, field)

    def set_media(self, stage: int, held: int, waiting: int) -> None:
        self._words[self.MEDIA_NBYTES + stage] = held
        self._words[self.MEDIA_WAITING + stage] = waiting

    def set_decoders(self, busy: int, waiting: int) -> None:
        self._words[self.DECODING] = busy
        self._words[self.DECODER_WAITING] = waiting

    def count_video(self, end: str, seconds: float) -> None:
        self._words[self.VIDEOS + VIDEO_ENDS.index(end)] += 1
        self._words[self.VIDEO_NS] += round(seconds * 1e9)

    def clear_gauges(self) -> None:
        """Forgets what was open in a process that has ended."""
        self[self.OPEN] = self.queue[QueueCounters.WAITING] = 0
        self.set_decoders(0, 0)
        for stage in range(len(STAGES)):
            self.set_media(stage, 0, 0)
        for served in self.engines:
            served.migration.clear_gauges()

    def answered(self, route: str, status: int) -> int:
        """Returns the word that counts answers of this route and status."""
        known = status if status in STATUSES else 500 if status >= 500 else 400
        return self.ANSWERED + ROUTES.index(route) * len(STATUSES) + STATUSES.index(known)


class ServerCounters:
    def __init__(self, segment: lowlevel.Segment, servers: int, *, writable: bool = False) -> None:
        words: Any = segment.view(writable=writable).cast("Q")
        size = len(words) // servers
        self.rows = [ProcessCounters(words[begin : begin + size]) for begin in range(0, servers * size, size)]

    @staticmethod
    def create(servers: int, engines: int = 1) -> lowlevel.Segment:
        return lowlevel.Segment.create(servers * ProcessCounters.words(engines) * WORD_NBYTES, name="tally")
