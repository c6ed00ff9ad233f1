"""The status board: a page of shared memory with the load of each core and the live process of each place.

Cores and workers of rank 0 write load, the launcher writes processes. Servers and tools from outside read the page.

There is nothing to lock: a process that dies while writing has written its word, or has not. `Segment` keeps the page
nameless, and the client interprets the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock import lowlevel
from penstock.engine._native import record_fatal_signals
from penstock.engine.cluster.counter import (
    LINE_WORDS,
    REQUEST_SECONDS,
    STEP_TOKENS,
    WORD_NBYTES,
    CounterSet,
    Row,
    counter,
    gauge,
    histogram,
    state,
)
from penstock.engine.cluster.process_end import SignalRecord

LIFE_SHIFT = 22  # of a process's word: incarnation (32 bits), life (10), pid (22, as Linux gives)
MAX_PID, MAX_LIFE = (1 << LIFE_SHIFT) - 1, (1 << 10) - 1
OUTPUT_WORDS = LINE_WORDS  # of an output processor, which writes the number of messages that it has delivered
# Owners of words in a group's row. PLACE: the core; on a node without it, or beside it, the process of its link.
CORE, PLACE, RANK_0, LAUNCHER = "core", "place", "rank 0", "launcher"
SINCE_START = "since the engine was started"
KV_DISCARD_REASONS = FAILED, MEMORY, CHANGED, DAMAGED = "failed", "memory", "changed", "damaged"


def _share_in_use(row: Row) -> float:
    """Returns 0 if the engine does not serve, as it has no cache then."""
    blocks = row[StatusBoard.BLOCKS]
    return 1 - row[StatusBoard.FREE_BLOCKS] / blocks if blocks else 0.0


class StatusBoard(CounterSet, scope="engine"):
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
    # Words of a group's row. Each node has its own of these, as a number of another node means something else here.
    SERVING = gauge(  # the incarnation that takes requests. Cleared by the launcher when it has died
        "penstock_engine_incarnation",
        "how often the engine was started; 0: it does not serve",
        "it grew: a process died; the log names it, and how it ended",
        owner=PLACE,
    )
    # `ModelFingerprint.word`; 0: of a simulated device. Written before SERVING: requests go on in a group of the same
    # model only.
    MODEL = state(owner=PLACE)
    LINKED = state(owner=PLACE)  # 1: the group of a node without servers is linked. Cleared when the uplink has ended
    RENDEZVOUS = state(owner=PLACE)  # the port at which the ranks of a node without cores meet; 0: not linked yet
    LINK_RESUMPTIONS = counter(
        "penstock_engine_link_resumptions",
        f"lost connections to other nodes that were made again, {SINCE_START}; no request migrates for it",
        "it grows: something between the nodes resets connections or damages packets; the log has `link resumed` with "
        "the pause and the reason",
        owner=PLACE,
    )
    FAILED_STARTS = state(owner=LAUNCHER)  # in a row: how often the group has ended before it served
    KV_DISCARD = state(owner=LAUNCHER)  # 1 + index of the reason for which it has emptied the KV cache; 0: it has not
    STARTS = counter(
        "penstock_process_starts",
        "processes of the engine that were started, by `way`: `forked` from the fork server, or `spawned`",
        "`spawned` grows: the log says why there is no fork server",
        owner=LAUNCHER,
        labels={"way": ("forked", "spawned")},
    )
    OPEN = gauge("open_in_engine", "open requests", owner=CORE)
    RUNNING = gauge(
        "vllm:num_requests_running", "sequences in the batch", "at `--max-num-seqs`: the batch is full", owner=CORE
    )
    WAITING = gauge(
        "vllm:num_requests_waiting",
        "sequences that wait for the batch, or were preempted",
        "above 0 for long: more `--max-num-seqs`, or blocks, or engines",
        owner=CORE,
    )
    BLOCKS = gauge("blocks", "blocks of the KV cache", owner=CORE)
    FREE_BLOCKS = gauge("free_blocks", "blocks of the KV cache that no sequence holds", owner=CORE)
    USAGE = gauge(
        "vllm:kv_cache_usage_perc",
        "share of the KV cache's blocks that sequences hold; 1 is all",
        "near 1: requests are preempted, and computed again",
        owner=CORE,
        value=_share_in_use,
    )
    ADAPTERS = gauge(
        "penstock_adapters_running",
        "different LoRA adapters of the sequences in the batch",
        "at `--max-loras`: requests for further adapters wait",
        owner=CORE,
    )
    ADAPTED = gauge("penstock_requests_with_adapter", "sequences in the batch that have a LoRA adapter", owner=CORE)
    PREFIX_QUERIES = counter(
        "vllm:prefix_cache_queries",
        "prompt tokens that were looked up in the prefix cache, when a sequence was first admitted",
        owner=CORE,
    )
    PREFIX_HITS = counter(
        "vllm:prefix_cache_hits",
        "prompt tokens that the prefix cache had",
        "divided by `vllm:prefix_cache_queries_total`: the hit rate",
        owner=CORE,
    )
    PREEMPTIONS = counter(
        "vllm:num_preemptions", "sequences that lost their blocks to others", "it grows: too few blocks", owner=CORE
    )
    KV_ADOPTED = gauge(
        "penstock_kv_adopted_blocks",
        "blocks of the KV cache that the engine found when it was started: a process was killed from outside, or the "
        "engine was restarted",
        "0 after a kill: the log says why the KV cache was discarded",
        owner=CORE,
    )
    KV_DISCARDS = counter(
        "penstock_kv_discards",
        "KV caches that were discarded when the engine was started, by `reason`: `failed` (the engine had failed by "
        "itself), `memory` (it may have been killed for want of memory), `changed` (another model, shape or size), "
        "`damaged`",
        owner=CORE,
        labels={"reason": KV_DISCARD_REASONS},
    )
    RESUMED_TOKENS = counter(
        "penstock_resumed_tokens",
        f"tokens of prompts and answers of resumed requests, {SINCE_START}, by `way`: `found` in the KV cache, or "
        "`computed` again",
        "`computed` is large: the KV cache did not survive, or had evicted them",
        owner=CORE,
        labels={"way": ("found", "computed")},
    )
    STEPS = counter(
        "penstock_engine_steps",
        f"steps {SINCE_START}",
        "it stands still with running requests: [stuck](stuck.md)",
        owner=CORE,
    )
    OWN_NS = counter(
        "penstock_engine_core_seconds",
        "seconds that the core itself spent on steps, waits excluded",
        "divided by the steps: the core's share of a step",
        owner=CORE,
        unit=1e9,
    )
    SUSPECTS = gauge(
        "penstock_suspects",
        "open requests that may have made the engine fail, and are not cleared",
        "above 0 for long: an engine fails again and again",
        owner=CORE,
    )
    ABSENT_OUTPUTS = state(owner=CORE)  # a bit for each output processor that has died, until its next life receives
    QUEUE_TIMES = histogram(
        "vllm:request_queue_time_seconds",
        "from a request's arrival in the core to its place in a batch",
        "above a step's time: the batch or the cache is full",
        owner=CORE,
        bounds=REQUEST_SECONDS,
    )
    PREFILL_TIMES = histogram(
        "vllm:request_prefill_time_seconds",
        "from the first place in a batch to the first token, of sequences that have ended; "
        "those that were resumed, or aborted, do not count, here and in the next two",
        "grows with prompts; and with preemptions",
        owner=CORE,
        bounds=REQUEST_SECONDS,
    )
    DECODE_TIMES = histogram(
        "vllm:request_decode_time_seconds",
        "from the first token to the last",
        owner=CORE,
        bounds=REQUEST_SECONDS,
    )
    INFERENCE_TIMES = histogram(
        "vllm:request_inference_time_seconds",
        "from the first place in a batch to the last token",
        owner=CORE,
        bounds=REQUEST_SECONDS,
    )
    BUSY_NS = counter(
        "penstock_engine_busy_seconds",
        "seconds in which the device ran a step, as rank 0 sees it; a simulated device reports it exactly",
        owner=RANK_0,
        unit=1e9,
    )
    IDLE_NS = counter(
        "penstock_engine_idle_seconds",
        "seconds in which the device ran no step, though a request was open",
        "it grows with open requests: the overhead around the device",
        owner=RANK_0,
        unit=1e9,
    )
    STEP_TOKENS = histogram(
        "vllm:iteration_tokens_total",
        "tokens of prompts and answers that each step computes",
        "often at `--max-num-batched-tokens`: long prompts delay the answers of others",
        owner=RANK_0,
        bounds=STEP_TOKENS,
        unit=1,
    )
    COMPUTED = counter("computed_tokens", "tokens of prompts that were computed", owner=RANK_0)
    SAMPLED = counter("sampled_tokens", "tokens of answers", owner=RANK_0)
    ENCODINGS = counter(  # of all ranks
        "penstock_encodings",
        f"images that the vision encoder has encoded, {SINCE_START}; an image that several workers encode counts for "
        "each",
        "divided by images: 1 is best; more with `--mm-encoder-tp-mode weights`, or where the prefix cache and the "
        "store of encodings have evicted",
        owner=RANK_0,
    )
    ENCODINGS_FOUND = counter(
        "penstock_encodings_found", "encodings that were found in the store of encodings", owner=RANK_0
    )
    ENCODINGS_UNSHARED = counter(
        "penstock_encodings_unshared",
        "encodings that could not be put into the store of encodings: no room, or another engine took half a "
        "`step_timeout` to write it",
        "it grows: more `--encoder-cache-gb`",
        owner=RANK_0,
    )
    GRAMMARS_OPEN = gauge("penstock_grammars_open", "sequences in the batch that follow a grammar", owner=RANK_0)
    GRAMMARS = counter(
        "penstock_grammars_compiled",
        f"grammars that were compiled, {SINCE_START}",
        "it grows with requests: each has a schema of its own, or there are more than 256",
        owner=RANK_0,
    )
    COMPILE_NS = counter(
        "penstock_grammar_compile_seconds",
        "seconds in which grammars were compiled, in a thread beside the steps",
        "divided by `penstock_grammars_compiled_total`: what a grammar delays its first token by",
        owner=RANK_0,
        unit=1e9,
    )
    MASKS = counter("penstock_grammar_masks", "masks of tokens that grammars filled, one a token", owner=RANK_0)
    MASK_NS = counter(
        "penstock_grammar_mask_seconds",
        "seconds in which masks were filled, beside the forward pass",
        "divided by `penstock_engine_steps_total`: above the time of a forward pass, masks delay steps",
        owner=RANK_0,
        unit=1e9,
    )

    def __init__(self, segment: lowlevel.Segment, *, writable: bool = False) -> None:
        self._words: memoryview[int] = segment.view(writable=writable).cast("Q")

    @staticmethod
    def create(groups: int, members: int = 0, outputs: int = 0) -> lowlevel.Segment:
        words_of_rows = (1 + groups) * StatusBoard.WORDS + outputs * OUTPUT_WORDS
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
        begin = (1 + group) * self.WORDS
        return self._words[begin : begin + self.WORDS]

    def begin(self, group: int) -> None:
        """Clears the row of a group that restarts, or has ended, but for the number of starts."""
        row = self.row(group)
        starts = [row[word] for word in self.STARTS.at.values()]
        for word in range(self.WORDS):
            row[word] = 0
        for word, number in zip(self.STARTS.at.values(), starts, strict=True):
            row[word] = number

    @property
    def rows(self) -> list[Row]:
        """Returns the rows of all groups."""
        return [self.row(group) for group in range(self._words[self.GROUPS])]

    @property
    def cluster(self) -> Row:
        """Returns the cluster's row."""
        return self._words[: self.WORDS]

    @property
    def _outputs_at(self) -> int:
        return (1 + self._words[self.GROUPS]) * self.WORDS

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


DEVICE_COUNTS = (  # rank 0 adds the counts of the device
    *(StatusBoard.ENCODINGS, StatusBoard.ENCODINGS_FOUND, StatusBoard.ENCODINGS_UNSHARED),
    *(StatusBoard.GRAMMARS, StatusBoard.COMPILE_NS, StatusBoard.MASKS, StatusBoard.MASK_NS),
)
