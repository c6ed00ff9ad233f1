"""The state of an output processor: turns the core's `Tokens` into a `Delta` for each server, without any process.

The core says which sample has which slot, which ids it gets, and when it ends by an id or its length.
`output_processor` receives and sends the messages; a stop string ends a sample here first, and the core by an `Abort`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.engine._native import TableWriter
from penstock.engine.output.delta_builder import DeltaBuilder, FinishedWithoutToken, HeldOutput, HeldOutputs, SampleEnd
from penstock.engine.output.logprobs_json import LogprobsWriter
from penstock.engine.protocol.columns import Index, LogprobRows
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import (
    Abort,
    Began,
    ChunkFormat,
    Delta,
    FinishReason,
    Ints,
    PromptLogprobs,
    Requests,
    Started,
    Style,
    Tokens,
)
from penstock.engine.text.answer_parser import AnswerParser
from penstock.engine.text.answer_text import UNKNOWN, Piece
from penstock.engine.text.detokenizer import StopStringFilter, Vocabulary, char_bloom, load_vocabulary
from penstock.engine.text.sse_chunks import MIDDLE, ChunkWriter
from penstock.errors import DecodeError

NO_IDS: Ints = np.zeros(0, np.int32)
NO_SLOTS: Index = np.zeros(0, np.intp)
ALONE, PLAIN, WRAPPED = 0, 1, 2  # how a row gets text: alone; or from the tables, without a chunk or in a chunk


class Outputs(NamedTuple):
    """One Delta with rows, at most, for each server; for the core, the samples ended by a stop string."""

    deltas: list[tuple[int, Delta]]
    aborts: list[Abort]


class OutputState:
    """Turns tokens into answers. Each sample that starts gets exactly one end. Arrays are by slot."""

    def __init__(self, vocabulary: Vocabulary, slots: int, interval: int = 1) -> None:
        """`interval`: see `EngineConfig.stream_interval`."""
        self._vocabulary = vocabulary
        self._interval = interval
        self._logprobs_writer = LogprobsWriter(vocabulary)
        self._is_open = np.zeros(slots, np.bool_)
        self._servers = np.zeros(slots, np.uint16)
        self._requests = np.zeros(slots, np.int32)
        self._samples = np.zeros(slots, np.uint16)
        self._generated = np.zeros(slots, np.int32)
        self._bases = np.zeros(slots, np.int32)  # first row of the vocabulary in the slot's table
        self._kinds = np.zeros(slots, np.uint8)
        self._firsts = np.zeros(slots, np.uint64)  # mask of the first characters of the stop strings
        self._marks = np.zeros(slots, np.uint64)  # mask of the first characters of the marks that a parser looks for
        self._reasoning = np.zeros(slots, np.int32)  # ids of the reasoning, once it has ended
        self._cached: dict[int, int] = {}  # cached tokens of the prompt, until the first id has come
        self._started: list[Started | None] = [None] * slots  # None: not open
        self._texts: list[StopStringFilter | None] = [None] * slots  # None: nothing is held back
        self._writers: list[ChunkWriter | None] = [None] * slots
        self._parsers: dict[int, AnswerParser] = {}  # of samples with an answer format
        self._choices: dict[int, tuple[int, int]] = {}  # their kinds and marks
        self._held = HeldOutputs()
        self._slots = NO_SLOTS  # of the last message with ids
        self._frames: list[tuple[bytes, ...] | None] = [None] * slots  # see `TableWriter`
        self._table_writer = TableWriter(
            texts=vocabulary.texts,
            quoted=vocabulary.quoted,
            is_whole=vocabulary.is_whole,
            masks=vocabulary.masks,
            frames=self._frames,
            bases=self._bases,
            firsts=self._firsts,
            marks=self._marks,
            servers=self._servers,
            requests=self._requests,
            samples=self._samples,
            generated=self._generated,
        )

    @classmethod
    def of(cls, config: EngineConfig, vocabulary: Vocabulary | None = None) -> OutputState:
        return cls(vocabulary or load_vocabulary(config), config.max_num_seqs, config.stream_interval)

    def forget_server(self, server: int) -> Requests:
        """Drops a server that reads nothing: it gets no more answers. Returns its open requests."""
        open_slots = np.flatnonzero((self._servers == server) & self._is_open)
        for slot in open_slots.tolist():
            self._end(slot)
        requests: Requests = np.unique(self._requests[open_slots])
        return requests

    # ── samples ──
    def _start(self, started: Started) -> None:
        slot, params, vocabulary = started.slot, started.params, self._vocabulary
        self._is_open[slot] = True
        self._generated[slot] = len(started.generated)
        self._servers[slot], self._requests[slot], self._samples[slot] = started.server, started.request, started.sample
        if started.cached:
            self._cached[slot] = started.cached
        table = vocabulary.SKIP_SPECIAL if params.skip_special_tokens else vocabulary.KEEP_SPECIAL
        self._bases[slot] = (table if params.detokenize else vocabulary.NO_TEXT) * vocabulary.stride
        self._firsts[slot] = char_bloom("".join(stop[0] for stop in params.stop))
        self._started[slot] = started
        self._texts[slot] = self._writers[slot] = None
        self._marks[slot] = self._reasoning[slot] = 0
        if started.chunk_format is not None:
            self._choose_writer(slot, started.chunk_format, started.sample)
        if started.generated:
            self._replay(slot, started)
        self._choose_kind(slot)

    def _choose_writer(self, slot: int, chunk_format: ChunkFormat, sample: int) -> None:
        answer = chunk_format.answer
        if chunk_format.style != Style.TEXT:
            self._writers[slot] = ChunkWriter(chunk_format, sample)
        elif answer is not None:  # the server parses the text: only the reasoning matters here
            answer = None if answer.reasoning is None else replace(answer, tools=None)
        if answer is not None:
            self._parsers[slot] = AnswerParser(answer, sample)

    def _replay(self, slot: int, started: Started) -> None:
        """Brings a resumed sample to its state after the ids that it has generated: their text has been delivered.

        `_write_one` decodes what it has decoded then. The other texts are from the table, and only their length counts.
        """
        vocabulary, writer, parser = self._vocabulary, self._writers[slot], self._parsers.get(slot)
        ids = np.array(started.generated, np.int32)
        places = vocabulary.rows(ids, self._bases[slot])
        has_table_text = vocabulary.has_table_text(places, self._firsts[slot])
        # Chunks with log-probabilities or ids are written also for an id without text.
        has_written = started.params.logprobs is not None or (writer is not None and writer.has_ids)
        length = at = 0
        for first in range(ids.size) if parser is not None else np.flatnonzero(~has_table_text).tolist():
            at = max(at, first)
            while at < ids.size and (at == first or self._texts[slot] is not None):
                self._generated[slot] = at + 1
                if has_table_text[at] and self._texts[slot] is None:
                    shown = vocabulary.texts[places[at]].decode()
                else:
                    shown = self._write_one(slot, started.generated[at], None)[0]
                has_table_text[at] = False
                length += len(shown)
                if parser is not None:
                    has_written |= bool(self._parse(slot, parser, shown, None))
                at += 1
        self._generated[slot] = ids.size
        if writer is not None:
            length += sum(len(vocabulary.texts[place].decode()) for place in places[has_table_text].tolist())
            writer.resume(0 if parser is not None else length, has_written)

    def _choose_kind(self, slot: int) -> None:
        writer, parser = self._writers[slot], self._parsers.get(slot)
        if self._texts[slot] is not None or self._interval > 1 or (parser is not None and parser.run is UNKNOWN):
            kind = ALONE
        elif writer is None:
            kind = PLAIN
        else:
            kind = WRAPPED if writer.has_begun and writer.is_plain else ALONE
        if parser is not None and writer is not None:
            writer.choose_frames(parser.run, parser.calls - 1)
        self._frames[slot] = None if kind == ALONE else () if writer is None else writer.frame
        if parser is None:
            self._kinds[slot] = kind
            return
        choice = kind, parser.firsts
        if self._choices.get(slot) != choice:  # numpy's cells cost more than the comparison
            self._choices[slot] = choice
            self._kinds[slot], self._marks[slot] = choice

    def _parse(self, slot: int, parser: AnswerParser, shown: str, end: SampleEnd | None) -> list[Piece]:
        """Parses text of an id. Returns the pieces that are certain now."""
        pieces = parser.feed(shown) if shown else []
        if end is not None:
            pieces += parser.finish()
        if parser.has_reasoned and not self._reasoning[slot] and (end is not None or not parser.is_reasoning):
            self._reasoning[slot] = self._generated[slot]
        return pieces

    def _finish(self, slot: int, reason: FinishReason) -> list[FinishedWithoutToken]:
        """Ends a sample without another token. Returns nothing of one that a stop string has ended."""
        started = self._started[slot]
        if started is None:
            return []
        held = self._held.take(slot)
        written = self._written(slot, "".join(held.texts), held.pieces, held.ids)
        self._end(slot)
        return [FinishedWithoutToken(started.server, started.request, started.sample, reason, held.ids, written)]

    def _end(self, slot: int) -> None:
        self._is_open[slot] = False
        self._cached.pop(slot, None)
        self._parsers.pop(slot, None)
        self._choices.pop(slot, None)
        self._held.take(slot)
        self._started[slot] = self._texts[slot] = self._writers[slot] = self._frames[slot] = None

    # ── tokens ──
    def process(self, tokens: Tokens) -> Outputs:
        """Returns the answers to a message. Raises DecodeError unless its columns fit each other."""
        without_token: list[FinishedWithoutToken] = []
        for slot in tokens.aborted:
            self._end(slot)  # its server has been answered, or has sent the abort
        for started in tokens.started:
            self._start(started)
        if tokens.slots is not None:
            self._slots = tokens.slots.astype(np.intp)
        slots = self._slots if tokens.ids.size else NO_SLOTS
        if tokens.ids.shape != slots.shape:
            raise DecodeError(f"expected {slots.size} numbers, got a shape of {tokens.ids.shape} at $.ids")
        if slots.size and (answers := self._process_table_texts(slots, tokens)) is not None:
            return answers
        logprobs = None if tokens.logprobs is None else LogprobRows.read(tokens.logprobs, slots.size)
        rows = DeltaBuilder(slots, tokens.ids, logprobs)
        is_open = self._is_open[slots]
        if not is_open.all():  # a stop string has ended the others before the core knew
            rows = rows.of(np.flatnonzero(is_open))
        self._generated[rows.slots] += 1
        row_of_slot = {slot: row for row, slot in enumerate(rows.slots.tolist())} if tokens.ended else {}
        for end in tokens.ended:
            row = row_of_slot.get(end.slot)
            if row is None:
                without_token += self._finish(end.slot, end.reason)
            else:
                rows.ends[row] = SampleEnd(end.reason, end.stop)
        stopped = self._write(rows)
        aborts = self._aborts(rows.slots[stopped]) if stopped else []
        if rows.waiting:
            rows = rows.of(np.delete(np.arange(rows.slots.size), rows.waiting))
        deltas = self._prompt_deltas(tokens.prompt_logprobs) + self._deltas(rows, without_token)
        for row in rows.ends:
            self._end(int(rows.slots[row]))
        return Outputs(deltas, aborts)

    def _process_table_texts(self, slots: Index, tokens: Tokens) -> Outputs | None:
        """Answers a message for one server; None, and no change, if a row gets more than a text of the tables."""
        if tokens.ended or tokens.logprobs is not None or tokens.prompt_logprobs or self._cached:
            return None
        written = self._table_writer.write(slots, tokens.ids)
        if written is None:
            return None
        server, numbers, text, of_samples = written
        samples = None if of_samples is None else np.frombuffer(of_samples, np.uint16)
        return Outputs([(server, Delta(slots.size, np.frombuffer(numbers, np.int32), text, samples=samples))], [])

    def _aborts(self, slots: Index) -> list[Abort]:
        servers, aborts = self._servers[slots], []
        for server in np.unique(servers).tolist():
            own_slots = slots[servers == server]
            aborts.append(Abort(server, self._requests[own_slots], self._samples[own_slots]))
        return aborts

    def _write(self, rows: DeltaBuilder) -> list[int]:
        """Writes every row's text. Returns the rows that only a stop string ends; `rows.ends` then has every end."""
        vocabulary, slots = self._vocabulary, rows.slots
        places = vocabulary.rows(rows.ids, self._bases[slots])
        kinds = self._kinds[slots]
        has_table_text = vocabulary.has_table_text(places, self._firsts[slots])
        has_table_text[list(rows.ends)] = False
        is_from_table = has_table_text & (kinds != ALONE)
        if self._parsers:
            is_from_table &= vocabulary.masks[places] & self._marks[slots] == 0
        is_wrapped = kinds == WRAPPED
        logprobs: dict[int, bytes] = {}
        if rows.logprobs is not None:
            logprobs = self._logprobs_writer.write(rows.logprobs, [self._writers[slot] for slot in slots.tolist()])
            rows.wrapped = list(logprobs)
        if is_wrapped.any():
            is_from_table &= ~is_wrapped | vocabulary.is_seen[places]
            rows.texts = self._wrapped_texts(slots, places, is_wrapped & is_from_table, logprobs)
        else:
            texts = vocabulary.texts
            rows.texts = [texts[place] for place in places.tolist()]
        stopped: list[int] = []
        for row in np.flatnonzero(~is_from_table).tolist():
            slot, end = int(slots[row]), rows.ends.get(row)
            if has_table_text[row] and self._texts[slot] is None:
                shown, stop = vocabulary.texts[places[row]].decode(), None
            else:
                shown, stop = self._write_one(slot, int(rows.ids[row]), end)
            if stop is not None:
                if end is None:
                    stopped.append(row)
                rows.ends[row] = SampleEnd(FinishReason.STOP, stop)
            self._write_row(rows, row, shown, logprobs.get(row))
        return stopped

    def _write_row(self, rows: DeltaBuilder, row: int, shown: str, logprobs: bytes | None) -> None:
        """Writes the text of a row alone, unless the text is held back."""
        slot, end = int(rows.slots[row]), rows.ends.get(row)
        parser = self._parsers.get(slot)
        pieces = [] if parser is None else self._parse(slot, parser, shown, end)
        if end is not None and parser is not None:
            rows.ends[row] = end._replace(reasoning=int(self._reasoning[slot]), calls=parser.calls)
        if self._interval > 1:
            self._held.hold(slot, HeldOutput([int(rows.ids[row])], [shown], pieces))
            if end is None and not self._is_due(slot):
                rows.waiting.append(row)
                return
            held = self._held.take(slot)
            if len(held.ids) > 1:
                rows.earlier[row] = held.ids[:-1]
            shown, pieces = "".join(held.texts), held.pieces
        ids = [*rows.earlier.get(row, ()), int(rows.ids[row])]
        rows.texts[row] = self._written(slot, shown, pieces, ids, logprobs, None if end is None else end.reason)
        self._choose_kind(slot)

    def _written(
        self,
        slot: int,
        text: str,
        pieces: list[Piece],
        ids: list[int],
        logprobs: bytes | None = None,
        reason: FinishReason | None = None,
    ) -> bytes:
        """Returns the bytes for a text of a sample: alone, or in a chunk."""
        parser, writer, generated = self._parsers.get(slot), self._writers[slot], int(self._generated[slot])
        if writer is None:
            return text.encode()
        if parser is None:
            return writer.chunk(text, logprobs, reason, ids, generated)
        return writer.parsed_chunk(pieces, logprobs, reason, ids, generated, has_calls=parser.calls > 0)

    def _is_due(self, slot: int) -> bool:
        started = self._started[slot]
        assert started is not None, "its slot is open"
        if started.params.logprobs is not None:
            return True
        # By the number of tokens of the sample: a resumed sample goes on with equal events.
        return (int(self._generated[slot]) - 1) % self._interval == 0

    def _wrapped_texts(
        self, slots: Index, places: Ints, is_wrapped: npt.NDArray[np.bool_], logprobs: dict[int, bytes]
    ) -> list[bytes]:
        texts, table, writers = self._vocabulary.texts, self._vocabulary.quoted, self._writers
        rows = zip(slots.tolist(), places.tolist(), is_wrapped.tolist(), strict=True)
        if not logprobs:
            return [
                table[place].join(writer.frame)
                if is_written and (writer := writers[slot]) is not None
                else texts[place]
                for slot, place, is_written in rows
            ]
        written = []
        for row, (slot, place, is_written) in enumerate(rows):
            writer = writers[slot]
            if not is_written or writer is None:
                written.append(texts[place])
                continue
            row_logprobs = logprobs.get(row, b"null")
            written.append(table[place].join(writer.logprobs_frame) + row_logprobs + MIDDLE)
            if not writer.is_chat:
                writer.offset += len(texts[place].decode())
        return written

    def _write_one(self, slot: int, token_id: int, end: SampleEnd | None) -> tuple[str, str | None]:
        """Returns the text of a sample that may be shown now, and the stop string that has ended it."""
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
        # The id that ends a sample is no part of its text, as a stop string is none.
        is_silent = end is not None and end.reason == FinishReason.STOP and not params.include_stop_str_in_output
        shown = "" if is_silent else text.add(token_id, may_stop)
        if end is not None and text.stop is None:
            shown += text.end(may_stop)
        self._texts[slot] = text if text.is_waiting or not self._vocabulary.is_table else None
        return shown, text.stop

    # ── columns ──
    def _deltas(self, rows: DeltaBuilder, without_token: list[FinishedWithoutToken]) -> list[tuple[int, Delta]]:
        rows_of_server = self._rows_of_server(rows)
        deltas = []
        for server in sorted({*rows_of_server, *(row.server for row in without_token)}):
            own_rows = rows_of_server.get(server) or rows.of(NO_SLOTS)
            columns = self._requests[own_rows.slots], self._samples[own_rows.slots]
            began = self._began(own_rows.slots) if self._cached else None
            ended = [row for row in without_token if row.server == server]
            deltas.append((server, own_rows.delta(*columns, ended, began)))
        return deltas

    def _rows_of_server(self, rows: DeltaBuilder) -> dict[int, DeltaBuilder]:
        servers = self._servers[rows.slots]
        if servers.size and (servers == servers[0]).all():
            return {int(servers[0]): rows}
        return {server: rows.of(np.flatnonzero(servers == server)) for server in np.unique(servers).tolist()}

    def _prompt_deltas(self, prompts: tuple[PromptLogprobs, ...]) -> list[tuple[int, Delta]]:
        """Returns a Delta without rows for each entry of an open sample."""
        deltas = []
        for entry in prompts:
            slot = entry.number
            if self._is_open[slot]:
                of_request = replace(entry, number=int(self._requests[slot]))
                deltas.append((int(self._servers[slot]), Delta(0, NO_IDS, b"", prompt_logprobs=(of_request,))))
        return deltas

    def _began(self, slots: Index) -> Began | None:
        """Returns the rows with the first id of a sample, if the cache had tokens of its prompt."""
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._cached]
        if not rows:
            return None
        return Began(np.array(rows, np.uint16), np.array([self._cached.pop(int(slots[row])) for row in rows], np.int32))
