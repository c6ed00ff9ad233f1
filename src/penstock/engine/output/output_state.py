"""What the servers get for what a step has sampled: the state of an output processor, without the process.

It applies the steps as a worker does, up to the one with the newest result, so each id has its sample.
`output_processor` receives and sends the messages; the core frees the slot of a sample that has ended.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.output.delta_builder import DeltaBuilder, FinishedWithoutToken, LogprobRows, SampleEnd
from penstock.engine.output.detokenizer import StopStringFilter, Vocabulary, char_bloom
from penstock.engine.output.logprobs_json import LogprobsWriter
from penstock.engine.output.sse_chunks import MIDDLE, ChunkWriter
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import (
    Announce,
    Delta,
    FinishReason,
    Halt,
    Ints,
    Requests,
    SamplingParams,
    Step,
    StepDone,
    Style,
)
from penstock.engine.protocol.stop_conditions import StopConditions

ALONE, PLAIN, WRAPPED = 0, 1, 2  # how a row gets its text: by itself; or with all the others, from the tables


class Outputs(NamedTuple):
    """At most one Delta for each server; and the samples of which the core does not know that they have ended."""

    deltas: list[tuple[int, Delta]]
    halt: Halt | None


class OutputState:
    """Steps in, and each one's result: answers out. Each sample that joined gets exactly one end."""

    def __init__(
        self, vocabulary: Vocabulary, max_model_len: int, eos_ids: Collection[int], share: int = 0, shares: int = 1
    ) -> None:
        """Handles the requests with `request % shares == share`."""
        self._vocabulary = vocabulary
        self._likely = LogprobsWriter(vocabulary)
        self._max_model_len, self._eos_ids = max_model_len, frozenset(eos_ids)
        self._share, self._shares = share, shares
        self._announced: dict[tuple[int, int], tuple[Announce, int]] = {}  # and how many of its samples have joined
        self.begin(1, 1)

    def begin(self, slots: int, blocks: int, block_size: int = 16) -> None:
        """With an empty batch, as the core has it."""
        self.schedule = BatchState(slots, blocks, block_size)
        self._endings = StopConditions(slots, self._max_model_len, self._eos_ids)
        self._births = np.zeros(slots, np.int64)
        self._cached = np.zeros(slots, np.int32)
        self._bases = np.zeros(slots, np.int32)  # where the table begins in which its ids are looked up
        self._kinds = np.zeros(slots, np.uint8)
        self._firsts = np.zeros(slots, np.uint64)  # mask of the characters that a stop string of it begins with
        self._who = [(0, 0, 0)] * slots  # server, request, sample
        self._texts: list[StopStringFilter | None] = [None] * slots  # None: nothing is held back
        self._wrappings: list[ChunkWriter | None] = [None] * slots
        self._aborted: list[FinishedWithoutToken] = []

    # ── what servers wish ──
    def announce(self, announce: Announce) -> None:
        """How a request is to be answered: it counts if it is heard of before the first id. PLAIN takes back what was
        announced before, of a request that will not come."""
        self._announced.pop((announce.server, announce.request), None)
        if announce.style == Style.PLAIN:
            return
        schedule = self.schedule
        is_its = (schedule.requests == announce.request) & (schedule.servers == announce.server) & self._is_open
        there: list[int] = np.flatnonzero(is_its).tolist()
        for slot in there:
            if self._endings.generated[slot] == 0:
                self._wrap(slot, announce)
        if not there or len(there) < self._params(there[0]).n:
            self._announced[announce.server, announce.request] = announce, len(there)

    def forget_announcements(self, server: int) -> None:
        """It has died, and what it announced does not come. Those of its requests that did leave when the core says
        so: by the order of the steps, they cannot be taken for those of the next one with this number."""
        for key in [key for key in self._announced if key[0] == server]:
            del self._announced[key]

    def forget_server(self, server: int) -> Requests:
        """Drops a server that died or takes nothing: nothing reads its answers. Returns its requests that were open."""
        self.forget_announcements(server)
        self._aborted = [row for row in self._aborted if row.server != server]
        there = np.flatnonzero((self.schedule.servers == server) & self._is_open)
        for slot in there.tolist():
            self._end(slot)
        requests: Requests = np.unique(self.schedule.requests[there])
        return requests

    @property
    def _is_open(self) -> npt.NDArray[np.bool_]:
        return ~self._endings.has_ended

    def _params(self, slot: int) -> SamplingParams:
        params = self.schedule.params[slot]
        assert params is not None, "an open slot has parameters"
        return params

    # ── the schedule ──
    def apply(self, step: Step, /) -> None:
        self.schedule.apply(step)
        if step.left is not None:
            for slot in step.left.tolist():
                self._leave(slot)
        if step.joined is not None:
            slots = step.joined.slots.tolist()
            cached = [0] * len(slots) if step.joined.computed is None else step.joined.computed.tolist()
            parents = slots if step.joined.parents is None else step.joined.parents.tolist()
            for slot, computed, parent in zip(slots, cached, parents, strict=True):
                self._join(slot, step.number, computed if parent == slot else int(self._cached[parent]))

    def _join(self, slot: int, birth: int, cached: int) -> None:
        schedule, vocabulary = self.schedule, self._vocabulary
        self._cached[slot] = cached
        server, request = int(schedule.servers[slot]), int(schedule.requests[slot])
        if request % self._shares != self._share:
            return
        params = self._params(slot)
        self._endings.join(slot, params, schedule.prompts[slot].size)
        self._births[slot] = birth
        self._who[slot] = server, request, int(schedule.samples[slot])
        table = vocabulary.SKIP_SPECIAL if params.skip_special_tokens else vocabulary.KEEP_SPECIAL
        self._bases[slot] = (table if params.detokenize else vocabulary.NO_TEXT) * vocabulary.stride
        self._texts[slot] = self._wrappings[slot] = None
        self._firsts[slot] = char_bloom("".join(stop[0] for stop in params.stop))
        found = self._announced.get((server, request))
        if found is None:
            self._choose_kind(slot)
            return
        announce, joined = found
        self._wrap(slot, announce)
        if joined + 1 < params.n:
            self._announced[server, request] = announce, joined + 1
        else:
            del self._announced[server, request]

    def _text(self, slot: int, params: SamplingParams) -> StopStringFilter:
        stream = self._vocabulary.stream(self.schedule.prompts[slot], params.skip_special_tokens)
        return StopStringFilter(stream, params.stop, params.include_stop_str_in_output)

    def _wrap(self, slot: int, announce: Announce) -> None:
        self._wrappings[slot] = ChunkWriter(announce, self._who[slot][2])
        self._choose_kind(slot)

    def _choose_kind(self, slot: int) -> None:
        wrapping = self._wrappings[slot]
        if self._texts[slot] is not None:
            self._kinds[slot] = ALONE
        elif wrapping is None:
            self._kinds[slot] = PLAIN
        else:
            self._kinds[slot] = WRAPPED if wrapping.has_begun else ALONE

    def _leave(self, slot: int) -> None:
        if not self._endings.has_ended[slot]:  # aborted: any other end was in a result, and we have had that
            self._aborted.append(self._silent(slot, FinishReason.ABORT))
            self._announced.pop(self._who[slot][:2], None)
        self._endings.leave(slot)

    def _silent(self, slot: int, reason: FinishReason) -> FinishedWithoutToken:
        self._end(slot)
        server, request, sample = self._who[slot]
        return FinishedWithoutToken(server, request, sample, int(self._cached[slot]), reason)

    def _end(self, slot: int) -> None:
        self._endings.end(slot)
        self._texts[slot] = self._wrappings[slot] = None

    # ── results ──
    def done(self, done: StepDone) -> Outputs:
        """Of the step that was applied last. Raises DecodeError where it does not fit that step."""
        schedule = self.schedule
        done.require_fit(schedule.sampled.size)
        slots = schedule.sampled
        rows = DeltaBuilder(slots, done.ids, LogprobRows.read(done.logprobs, slots.size))
        silent = [*self._aborted, *self._fail(done)]
        self._aborted = []
        is_open = self._is_open[slots]
        if not is_open.all():
            rows = rows.of(np.flatnonzero(is_open))
        ended = self._endings.check(rows.slots, rows.ids)
        for row, reason, stop in zip(ended.rows.tolist(), ended.reasons.tolist(), ended.stops, strict=True):
            rows.ends[row] = SampleEnd(FinishReason(reason), stop)
        halted = self._write(rows)
        deltas = self._deltas(rows, silent)
        for row in rows.ends:
            self._end(int(rows.slots[row]))
        if not halted:
            return Outputs(deltas, None)
        return Outputs(deltas, Halt(np.array(halted, np.uint16), self._births[halted]))

    def _fail(self, done: StepDone) -> list[FinishedWithoutToken]:
        """They end, and what was sampled for them means nothing."""
        rows = []
        for slot, why in done.failures():
            if slot < self.schedule.slots and not self._endings.has_ended[slot]:
                rows.append(self._silent(slot, why))
        return rows

    def _write(self, rows: DeltaBuilder) -> list[int]:
        """Writes every row's text. Returns the slots that end by it and by no id; `rows.ends` then has every end."""
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
                    halted.append(slot)
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
        params = self._params(slot)
        if not params.detokenize:
            return "", None
        text = self._texts[slot] or self._text(slot, params)
        may_stop = self._endings.may_stop(slot)
        # The id by which a sample ends is no more a part of its text than a stop string is.
        is_silent = end is not None and end.reason == FinishReason.STOP and not params.include_stop_str_in_output
        shown = "" if is_silent else text.take(one, may_stop)
        if end is not None and text.stop is None:
            shown += text.end(may_stop)
        self._texts[slot] = text if text.is_waiting or not self._vocabulary.is_table else None
        return shown, text.stop

    # ── columns ──
    def _deltas(self, rows: DeltaBuilder, silent: list[FinishedWithoutToken]) -> list[tuple[int, Delta]]:
        schedule = self.schedule
        servers = schedule.servers[rows.slots]
        wanted = {row.server for row in silent}
        if servers.size:
            wanted.update([int(servers[0])] if (servers == servers[0]).all() else np.unique(servers).tolist())
        deltas = []
        for server in sorted(wanted):
            where = np.flatnonzero(servers == server)
            its = rows if where.size == servers.size else rows.of(where)
            columns = schedule.requests[its.slots], schedule.samples[its.slots], self._cached[its.slots]
            deltas.append((server, its.delta(*columns, [row for row in silent if row.server == server])))
        return deltas
