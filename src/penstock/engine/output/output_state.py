"""What the servers get for what the core tells: the state of an output processor, without the process.

The core says which sample has which slot, which ids are its, and when it ends by an id or its length.
`output_processor` receives and sends the messages; a stop string ends a sample here first, and the core by an `Abort`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.output.detokenizer import StopStringFilter, Vocabulary, char_bloom, load_vocabulary
from penstock.engine.output.logprobs_json import LogprobsWriter
from penstock.engine.output.sse_chunks import MIDDLE, ChunkWriter
from penstock.engine.protocol.columns import Index, LogprobRows
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import (
    Abort,
    Delta,
    Finished,
    FinishReason,
    Ints,
    Requests,
    Slots,
    Started,
    Tokens,
)
from penstock.errors import DecodeError

NO_SLOTS: Index = np.zeros(0, np.intp)
ALONE, PLAIN, WRAPPED = 0, 1, 2  # how a row gets its text: by itself; or with all the others, from the tables


class SampleEnd(NamedTuple):
    reason: FinishReason
    stop: int | str | None = None


class FinishedWithoutToken(NamedTuple):
    """A sample that ended without another id."""

    server: int
    request: int
    sample: int
    cached: int
    reason: FinishReason


class Outputs(NamedTuple):
    """At most one Delta for each server; and for the core, the samples that have ended by their text."""

    deltas: list[tuple[int, Delta]]
    aborts: list[Abort]


class OutputState:
    """Tokens in, answers out. Each sample that starts gets exactly one end. Arrays are by slot."""

    def __init__(self, vocabulary: Vocabulary, slots: int) -> None:
        self._vocabulary = vocabulary
        self._likely = LogprobsWriter(vocabulary)
        self._is_open = np.zeros(slots, np.bool_)
        self._servers = np.zeros(slots, np.uint16)
        self._requests = np.zeros(slots, np.int32)
        self._samples = np.zeros(slots, np.uint16)
        self._cached = np.zeros(slots, np.int32)
        self._generated = np.zeros(slots, np.int32)
        self._bases = np.zeros(slots, np.int32)  # where the table begins in which its ids are looked up
        self._kinds = np.zeros(slots, np.uint8)
        self._firsts = np.zeros(slots, np.uint64)  # mask of the characters that a stop string of it begins with
        self._started: list[Started | None] = [None] * slots  # None: not open
        self._texts: list[StopStringFilter | None] = [None] * slots  # None: nothing is held back
        self._wrappings: list[ChunkWriter | None] = [None] * slots
        self._slots = NO_SLOTS  # of the last message with ids

    @classmethod
    def of(cls, config: EngineConfig) -> OutputState:
        return cls(load_vocabulary(config), config.max_num_seqs)

    def forget_server(self, server: int) -> Requests:
        """Drops a server that takes nothing: it gets no more answers. Returns its requests that were open."""
        there = np.flatnonzero((self._servers == server) & self._is_open)
        for slot in there.tolist():
            self._end(slot)
        requests: Requests = np.unique(self._requests[there])
        return requests

    # ── samples ──
    def _start(self, one: Started) -> None:
        slot, params, vocabulary = one.slot, one.params, self._vocabulary
        self._is_open[slot] = True
        self._generated[slot] = 0
        self._servers[slot], self._requests[slot], self._samples[slot] = one.server, one.request, one.sample
        self._cached[slot] = one.cached
        table = vocabulary.SKIP_SPECIAL if params.skip_special_tokens else vocabulary.KEEP_SPECIAL
        self._bases[slot] = (table if params.detokenize else vocabulary.NO_TEXT) * vocabulary.stride
        self._firsts[slot] = char_bloom("".join(stop[0] for stop in params.stop))
        self._started[slot] = one
        self._texts[slot] = None
        self._wrappings[slot] = None if one.chunk_format is None else ChunkWriter(one.chunk_format, one.sample)
        self._choose_kind(slot)

    def _choose_kind(self, slot: int) -> None:
        wrapping = self._wrappings[slot]
        if self._texts[slot] is not None:
            self._kinds[slot] = ALONE
        elif wrapping is None:
            self._kinds[slot] = PLAIN
        else:
            self._kinds[slot] = WRAPPED if wrapping.has_begun else ALONE

    def _finish(self, slot: int, reason: FinishReason) -> list[FinishedWithoutToken]:
        """Ends a sample without another token. Returns nothing of one that a stop string has ended."""
        one = self._started[slot]
        if one is None:
            return []
        self._end(slot)
        return [FinishedWithoutToken(one.server, one.request, one.sample, one.cached, reason)]

    def _end(self, slot: int) -> None:
        self._is_open[slot] = False
        self._started[slot] = self._texts[slot] = self._wrappings[slot] = None

    # ── tokens ──
    def take(self, tokens: Tokens) -> Outputs:
        """Raises DecodeError where the columns do not fit each other."""
        silent: list[FinishedWithoutToken] = []
        for slot in tokens.aborted:
            silent += self._finish(slot, FinishReason.ABORT)
        for started in tokens.started:
            self._start(started)
        if tokens.slots is not None:
            self._slots = tokens.slots.astype(np.intp)
        slots = self._slots if tokens.ids.size else NO_SLOTS
        if tokens.ids.shape != slots.shape:
            raise DecodeError(f"expected {slots.size} numbers, got a shape of {tokens.ids.shape} at $.ids")
        rows = DeltaBuilder(slots, tokens.ids, LogprobRows.read(tokens.logprobs, slots.size))
        is_open = self._is_open[slots]
        if not is_open.all():  # a stop string has ended the others, and the core did not know yet
            rows = rows.of(np.flatnonzero(is_open))
        self._generated[rows.slots] += 1
        found = {slot: row for row, slot in enumerate(rows.slots.tolist())} if tokens.ended else {}
        for end in tokens.ended:
            row = found.get(end.slot)
            if row is None:
                silent += self._finish(end.slot, end.reason)
            else:
                rows.ends[row] = SampleEnd(end.reason, end.stop)
        halted = self._write(rows)
        deltas = self._deltas(rows, silent)
        aborts = self._aborts(rows.slots[halted]) if halted else []
        for row in rows.ends:
            self._end(int(rows.slots[row]))
        return Outputs(deltas, aborts)

    def _aborts(self, slots: Index) -> list[Abort]:
        servers = self._servers[slots]
        return [
            Abort(int(server), self._requests[its], self._samples[its])
            for server in np.unique(servers)
            for its in (slots[servers == server],)
        ]

    def _write(self, rows: DeltaBuilder) -> list[int]:
        """Writes every row's text. Returns the rows that end by it and by no id; `rows.ends` then has every end."""
        vocabulary, slots = self._vocabulary, rows.slots
        places = vocabulary.rows(rows.ids, self._bases[slots])
        kinds = self._kinds[slots]
        is_found = vocabulary.is_whole[places] & (self._firsts[slots] & vocabulary.masks[places] == 0)
        is_found[list(rows.ends)] = False
        is_easy = is_found & (kinds != ALONE)
        is_wrapped = kinds == WRAPPED
        told: dict[int, bytes] = {}
        if rows.logprobs is not None:
            told = self._likely.told(rows.logprobs, [self._wrappings[slot] for slot in slots.tolist()])
            rows.wrapped = list(told)
        if is_wrapped.any():
            is_easy &= ~is_wrapped | vocabulary.is_seen[places]
            rows.texts = self._wrapped_texts(slots, places, is_wrapped & is_easy, told)
        else:
            texts = vocabulary.texts
            rows.texts = [texts[place] for place in places.tolist()]
        halted: list[int] = []
        for row in np.flatnonzero(~is_easy).tolist():
            slot, end = int(slots[row]), rows.ends.get(row)
            if is_found[row] and self._texts[slot] is None:
                shown, stop = vocabulary.texts[places[row]].decode(), None
            else:
                shown, stop = self._write_one(slot, int(rows.ids[row]), end)
            if stop is not None:
                if end is None:
                    halted.append(row)
                end = rows.ends[row] = SampleEnd(FinishReason.STOP, stop)
            wrapping = self._wrappings[slot]
            if wrapping is None:
                rows.texts[row] = shown.encode()
            else:
                rows.texts[row] = wrapping.piece(shown, told.get(row), None if end is None else end.reason)
            self._choose_kind(slot)
        return halted

    def _wrapped_texts(
        self, slots: Index, places: Ints, is_wrapped: npt.NDArray[np.bool_], told: dict[int, bytes]
    ) -> list[bytes]:
        texts, table, wrappings = self._vocabulary.texts, self._vocabulary.quoted, self._wrappings
        rows = zip(slots.tolist(), places.tolist(), is_wrapped.tolist(), strict=True)
        if not told:
            return [
                wrapping.front + table[place] + wrapping.back
                if wraps and (wrapping := wrappings[slot]) is not None
                else texts[place]
                for slot, place, wraps in rows
            ]
        written = []
        for row, (slot, place, wraps) in enumerate(rows):
            wrapping = wrappings[slot]
            if not wraps or wrapping is None:
                written.append(texts[place])
                continue
            likely = told.get(row, b"null")
            written.append(b"".join((wrapping.front, table[place], wrapping.told, likely, MIDDLE)))
            if not wrapping.is_chat:
                wrapping.offset += len(texts[place].decode())
        return written

    def _write_one(self, slot: int, one: int, end: SampleEnd | None) -> tuple[str, str | None]:
        """What of a sample's text may be shown now, and the stop string that has ended it."""
        started = self._started[slot]
        assert started is not None, "its slot is open"
        params = started.params
        if not params.detokenize:
            return "", None
        text = self._texts[slot]
        if text is None:
            stream = self._vocabulary.stream(started.context, params.skip_special_tokens)
            text = StopStringFilter(stream, params.stop, params.include_stop_str_in_output)
        may_stop = bool(self._generated[slot] > params.min_tokens)
        # The id by which a sample ends is no more a part of its text than a stop string is.
        is_silent = end is not None and end.reason == FinishReason.STOP and not params.include_stop_str_in_output
        shown = "" if is_silent else text.take(one, may_stop)
        if end is not None and text.stop is None:
            shown += text.end(may_stop)
        self._texts[slot] = text if text.is_waiting or not self._vocabulary.is_table else None
        return shown, text.stop

    # ── columns ──
    def _deltas(self, rows: DeltaBuilder, silent: list[FinishedWithoutToken]) -> list[tuple[int, Delta]]:
        servers = self._servers[rows.slots]
        wanted = {row.server for row in silent}
        if servers.size:
            wanted.update([int(servers[0])] if (servers == servers[0]).all() else np.unique(servers).tolist())
        deltas = []
        for server in sorted(wanted):
            where = np.flatnonzero(servers == server)
            its = rows if where.size == servers.size else rows.of(where)
            columns = self._requests[its.slots], self._samples[its.slots], self._cached[its.slots]
            deltas.append((server, its.delta(*columns, [row for row in silent if row.server == server])))
        return deltas


class DeltaBuilder:
    """Of samples that got an id each. A row's text and end are said later."""

    def __init__(self, slots: Index, ids: Ints, logprobs: LogprobRows | None) -> None:
        self.slots = slots
        self.ids = ids
        self.logprobs = logprobs
        self.texts: list[bytes] = []
        self.ends: dict[int, SampleEnd] = {}
        self.wrapped: list[int] = []  # rows with log-probabilities in their texts

    def of(self, rows: Index) -> DeltaBuilder:
        """These rows alone."""
        its = DeltaBuilder(self.slots[rows], self.ids[rows], None if self.logprobs is None else self.logprobs.of(rows))
        numbers = rows.tolist()
        if self.texts:
            its.texts = [self.texts[row] for row in numbers]
        if self.ends or self.wrapped:
            new = {row: number for number, row in enumerate(numbers)}
            its.ends = {new[row]: end for row, end in self.ends.items() if row in new}
            its.wrapped = [new[row] for row in self.wrapped if row in new]
        return its

    def delta(self, requests: Requests, samples: Slots, cached: Ints, silent: list[FinishedWithoutToken]) -> Delta:
        """With the columns of these rows; those of the silent ones come after them."""
        size = self.slots.size
        lengths = np.fromiter(map(len, self.texts), np.int32, size)
        counts = None
        if silent:
            none = np.zeros(len(silent), np.int32)
            requests = np.concatenate([requests, np.array([row.request for row in silent], np.int32)])
            lengths = np.concatenate([lengths, none])
            samples = np.concatenate([samples, np.array([row.sample for row in silent], np.uint16)])
            counts = np.concatenate([np.ones(size, np.uint16), none.astype(np.uint16)])
        return Delta(
            size + len(silent),
            np.concatenate([requests, lengths, self.ids]),
            b"".join(self.texts),
            counts,
            samples if samples.any() else None,
            self._finished(cached, silent) if self.ends or silent else None,
            None if self.logprobs is None else self.logprobs.columns(self.wrapped),
        )

    def _finished(self, cached: Ints, silent: list[FinishedWithoutToken]) -> Finished:
        size, ended = self.slots.size, list(self.ends)
        reasons = [*(end.reason for end in self.ends.values()), *(row.reason for row in silent)]
        stops = (*(end.stop for end in self.ends.values()), *[None] * len(silent))
        its_cached = np.concatenate([cached[ended], np.array([row.cached for row in silent], np.int32)])
        return Finished(
            np.array([*ended, *range(size, size + len(silent))], np.uint16),
            np.array(reasons, np.uint8),
            stops if any(stop is not None for stop in stops) else None,
            its_cached if its_cached.any() else None,
        )
