"""Tokens, latencies and ends of an answer, for the metrics and for the log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from penstock.engine._native import TokenCounters
from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream
from penstock.server.chat.request_reporter import Report, RequestReport
from penstock.server.status.counters import ProcessCounters, Served


class _Times:
    """Times of one sequence: of its first and its last token, and numbers of tokens: of the first chunk, and later."""

    __slots__ = ("engine", "first", "first_tokens", "last", "later_tokens")

    def __init__(self, engine: Served, now: float, tokens: int) -> None:
        self.engine = engine
        self.first = self.last = now
        self.first_tokens, self.later_tokens = tokens, 0

    @property
    def mean(self) -> float:
        """Returns the mean seconds from a token to the next; 0 for a single token."""
        return (self.last - self.first) / max(self.later_tokens, 1)


class LatencyRecorder:
    """Records tokens, latencies and ends of an answer, for each of its sequences and by engine, as vLLM does.

    Times are those at which chunks are passed on: they include the delay of a client that reads slowly.
    """

    def __init__(self, row: ProcessCounters, began: float, report: Report | None = None) -> None:
        """`report`: takes the report of the request when it ends."""
        self._report = report
        self._row = row
        self._began = began
        self._times: dict[tuple[OutputStream, int], _Times] = {}  # by sample of a stream
        self._reasons: set[str] = set()
        self._ended: dict[OutputStream, int] = {}  # samples of each stream
        self._longest: dict[OutputStream, int] = {}  # tokens of a sample of each stream

    def chunk(self, stream: OutputStream, chunk: OutputChunk) -> None:
        now, many = time.monotonic(), len(chunk.ids)
        key = stream, chunk.sample
        times = self._times.get(key)
        if times is not None and many:
            times.engine.words[Served.GENERATION_TOKENS] += many
            Served.INTER_TOKEN.observe(times.engine.words, (now - times.last) / many, many)
            times.last = now
            times.later_tokens += many
        elif many:
            engine = self._row.engines[stream.group]
            times = self._times[key] = _Times(engine, now, many)
            engine.words[Served.GENERATION_TOKENS] += many
            Served.FIRST_TOKEN.observe(engine.words, now - self._began)
            engine[Served.PROMPT_TOKENS] += stream.prompt_tokens
            engine[Served.PROMPT_TOKENS_CACHED] += stream.cached_tokens
        if chunk.reason is not None:
            engine = self._row.engines[stream.group]
            self._ended[stream] = self._ended.get(stream, 0) + 1
            Served.REQUEST.observe(engine.words, now - self._began)
            Served.PER_OUTPUT_TOKEN.observe(engine.words, times.mean if times is not None else 0.0)
            self._count_lengths(stream, engine, 0 if times is None else times.first_tokens + times.later_tokens)
            reason = chunk.reason.name.lower()
            self._reasons.add(reason)
            engine.words[Served.FINISHED.at[reason]] += 1
            self.count_calls(stream, chunk.calls)

    def socket_counters(self, stream: OutputStream) -> tuple[TokenCounters, float] | None:
        """Returns the counters of a stream's tokens, and when the last token was passed on. None: there was none."""
        times = self._times.get((stream, 0))
        return None if times is None else (times.engine.token_counters, times.last)

    def count_sent(self, stream: OutputStream, tokens: int, last: float) -> None:
        """Notes tokens that `socket_counters` have counted."""
        times = self._times[stream, 0]
        times.last = last
        times.later_tokens += tokens

    def count_calls(self, stream: OutputStream, calls: int) -> None:
        """Counts the tool calls of an answer that the server has parsed. Chunks have the number otherwise."""
        self._row.engines[stream.group][Served.TOOL_CALLS] += calls

    def _count_lengths(self, stream: OutputStream, engine: Served, tokens: int) -> None:
        longest = self._longest[stream] = max(self._longest.get(stream, 0), tokens)
        Served.PROMPT_LENGTHS.observe(engine.words, stream.prompt_tokens)
        Served.GENERATED_LENGTHS.observe(engine.words, tokens)
        if self._ended[stream] == stream.samples:
            Served.LONGEST_LENGTHS.observe(engine.words, longest)

    @contextlib.contextmanager
    def watching(self, streams: Mapping[int, OutputStream]) -> Iterator[None]:
        """Counts the sequences that do not end in the block, by an error of the engine or because the client left."""
        reason = ""
        try:
            yield
        except EngineError as error:
            reason = "error"
            if error.status >= 500:
                self._give_up(streams, "error")
            raise
        except BaseException:
            reason = "abort"
            self._give_up(streams, "abort")
            raise
        finally:
            if self._report is not None:
                self._report(self._reported(streams.values(), reason))

    def _reported(self, open_streams: Collection[OutputStream], reason: str) -> RequestReport:
        """`reason`: of the end; "": each sample has its own."""
        first = min((times.first for times in self._times.values()), default=None)
        return RequestReport(
            prompt_tokens=sum(stream.prompt_tokens for stream in open_streams),
            cached_tokens=sum(stream.cached_tokens for stream in open_streams),
            completion_tokens=sum(stream.completion_tokens for stream in open_streams),
            first_token_s=None if first is None else round(first - self._began, 6),
            seconds=round(time.monotonic() - self._began, 6),
            reason=reason or "+".join(sorted(self._reasons)),
        )

    def _give_up(self, streams: Mapping[int, OutputStream], reason: str) -> None:
        for stream in streams.values():
            ended = self._ended.get(stream, 0)
            self._row.engines[stream.group].words[Served.FINISHED.at[reason]] += stream.samples - ended
