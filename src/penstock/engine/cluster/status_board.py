"""The status board: a page of shared memory with the load of each core and the live process of each place.

Cores and workers of rank 0 write load, the launcher writes processes. Servers and tools from outside read the page.

Each number is one aligned word of 8 bytes with one writer, and no two words are read as one. So there is nothing to
lock: a process that dies while writing has written its word, or has not. `Segment` keeps the page nameless, and the
client interprets the numbers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from penstock import lowlevel
from penstock.engine._native import record_fatal_signals
from penstock.engine.cluster.histogram import REQUEST_SECONDS, Histogram, words_of
from penstock.engine.cluster.process_end import SignalRecord

WORD_NBYTES = 8
ROW_WORDS = 48  # six cache lines: rank 0 and the launcher (FAILED_STARTS) write the second, the core the others
LIFE_SHIFT = 22  # of a process's word: incarnation (32 bits), life (10), pid (22, as Linux gives)
MAX_PID, MAX_LIFE = (1 << LIFE_SHIFT) - 1, (1 << 10) - 1
OUTPUT_WORDS = 8  # a cache line for each output processor, which writes the number of messages that it has delivered
Row: TypeAlias = "memoryview[int]"  # the numbers of one group, by their places: `row[StatusBoard.OPEN]`


class StatusBoard:
    """Reads and, if `writable`, writes the page."""

    # Words of the cluster's row.
    DRAINING = 0
    GROUPS = 1
    MEMBERS = 2  # places of processes; two words each, behind the groups' rows and those of output processors
    OUTPUTS = 3  # output processors of all groups; a row each, behind the groups' rows
    MIGRATIONS_BEGUN = 4  # planned ones; the launcher restarts the groups one after the other
    MIGRATIONS_ENDED = 5
    MIGRATIONS_FAILED = 6  # those of them that did not bring all groups back
    SERVED = 7  # 1: a group has served, and was lost or restarted; it is started again however often that fails
    TRIAL_GROUP = 8  # the group that failed by itself last: suspects are tried in it. Its number + 1; 0: none has
    # Words of a group's row, the core's.
    SERVING = 0  # the incarnation of the group that takes requests; 0: none. Cleared by the launcher when it has died
    OPEN = 1  # requests
    WAITING = 2  # sequences that do not run: queued, or preempted
    FREE_BLOCKS = 3
    STEPS = 4  # sent, in this incarnation
    OWN_NS = 5  # what the core spent on them, not counting where it waited
    BLOCKS = 6  # of the cache
    PREEMPTIONS = 7  # in this incarnation
    # Words of a group's row, rank 0's.
    BUSY_NS = 8  # time in which the device ran a step: as a simulated device says, else as rank 0 sees it
    IDLE_NS = 9  # time in which it ran none, though there were requests to be continued
    COMPUTED = 10  # tokens of prompts
    SAMPLED = 11  # tokens of answers
    # The launcher's, which writes it when all of the group have ended.
    FAILED_STARTS = 12  # in a row: how often the group has ended before it served
    # Rank 0's again, of all ranks, in this incarnation.
    ENCODINGS = 13  # images that the vision encoder has encoded, on each rank that did
    ENCODINGS_FOUND = 14  # of images, in the store
    ENCODINGS_UNSHARED = 15  # that are not in the store, as it had no room, or another engine took too long
    # The core's again.
    RUNNING = 16  # sequences in the batch
    PREFIX_QUERIES = 17  # tokens of prompts that were looked up in the prefix cache, in this incarnation
    PREFIX_HITS = 18  # those of them that it had
    # The core's, or that of the bridge to it, written before SERVING: requests go on in a group of the same model only.
    MODEL = 22  # `ModelFingerprint.word`; 0: of a simulated device
    # The uplink's, on a node without servers.
    LINKED = 20  # 1: the group is linked to the home node. Cleared by the launcher when the uplink has ended
    # On a node that has workers only: of the process in the core's place.
    RENDEZVOUS = 21  # the port at which the ranks of this incarnation meet; 0: not linked to the home node yet
    # On the home node, of the process that has the link of the group.
    LINK_RESUMPTIONS = 23  # connections to other nodes that were lost and made again, in this incarnation
    # The core's again.
    ABSENT_OUTPUTS = 19  # a bit for each output processor that has died, until its next life receives
    SUSPECTS = 24  # requests that may have made a group fail, and are not cleared
    QUEUE_TIMES = 25  # from here on: a histogram of how long sequences waited, from their arrival in the core

    def __init__(self, segment: lowlevel.Segment, *, writable: bool = False) -> None:
        self._words: memoryview[int] = segment.view(writable=writable).cast("Q")

    @staticmethod
    def create(groups: int, members: int = 0, outputs: int = 0) -> lowlevel.Segment:
        words_of_rows = (1 + groups) * ROW_WORDS + outputs * OUTPUT_WORDS
        page = lowlevel.Segment.create((words_of_rows + 2 * members) * WORD_NBYTES, name="board")
        words = page.view(writable=True).cast("Q")
        words[StatusBoard.GROUPS], words[StatusBoard.MEMBERS], words[StatusBoard.OUTPUTS] = groups, members, outputs
        return page

    @property
    def is_draining(self) -> bool:
        return self._words[self.DRAINING] != 0

    def drain(self) -> None:
        """Tells servers to accept no more requests."""
        self._words[self.DRAINING] = 1

    def row(self, group: int) -> Row:
        begin = (1 + group) * ROW_WORDS
        return self._words[begin : begin + ROW_WORDS]

    def begin(self, group: int) -> None:
        """Clears the row of a group that restarts, or has ended."""
        row = self.row(group)
        for word in range(ROW_WORDS):
            row[word] = 0

    @property
    def rows(self) -> list[Row]:
        """Returns the rows of all groups."""
        return [self.row(group) for group in range(self._words[self.GROUPS])]

    @property
    def cluster(self) -> Row:
        """Returns the cluster's row."""
        return self._words[:ROW_WORDS]

    @property
    def _outputs_at(self) -> int:
        return (1 + self._words[self.GROUPS]) * ROW_WORDS

    def output_row(self, place: int) -> Row:
        """Returns the row of an output processor: its first word is the number of messages that it has answered."""
        begin = self._outputs_at + place * OUTPUT_WORDS
        return self._words[begin : begin + OUTPUT_WORDS]

    @property
    def _members_at(self) -> int:
        return self._outputs_at + self._words[self.OUTPUTS] * OUTPUT_WORDS

    @property
    def members(self) -> list[ProcessEntry]:
        """Returns the process of each place, in the order of `all_processes` (topology.py)."""
        begin = self._members_at
        return [ProcessEntry.of(word) for word in self._words[begin : begin + self._words[self.MEMBERS]]]

    def live(self, place: int, process: ProcessEntry) -> None:
        self._words[self._members_at + place] = process.word

    # ── the signal that has ended the process of a place: a word behind the words of all places ──
    def _signal_at(self, place: int) -> int:
        return self._members_at + self._words[self.MEMBERS] + place

    def record_fatal_signals(self, place: int) -> None:
        """Lets the calling process record the signal that ends it. The board stays mapped until then."""
        record_fatal_signals(np.frombuffer(self._words, np.uint64), self._signal_at(place))

    def take_signal_record(self, place: int) -> SignalRecord:
        """Returns the record of a process that has ended, and clears it for the next process."""
        at = self._signal_at(place)
        word, self._words[at] = self._words[at], 0
        return SignalRecord.of(word)

    def close(self) -> None:
        self._words.release()


def queue_times_of(row: Row) -> Histogram:
    return Histogram(row, StatusBoard.QUEUE_TIMES, REQUEST_SECONDS)


assert StatusBoard.QUEUE_TIMES + words_of(REQUEST_SECONDS) <= ROW_WORDS


class ProcessEntry(NamedTuple):
    """The process in a place: parts of one word, so that no reader mixes an incarnation with another one's pid."""

    incarnation: int  # 0: no process has been started
    pid: int  # below 2**22; 0: it has ended, and the next has not been started
    life: int = 0  # within the incarnation; MAX_LIFE: or later

    @classmethod
    def of(cls, word: int) -> ProcessEntry:
        return cls(word >> 32, word & MAX_PID, word >> LIFE_SHIFT & MAX_LIFE)

    @property
    def word(self) -> int:
        return self.incarnation << 32 | min(self.life, MAX_LIFE) << LIFE_SHIFT | self.pid
