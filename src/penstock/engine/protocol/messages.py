"""Every message that crosses a boundary of the engine, in the order in which a request meets them.

Fields of many requests are columns: arrays of equal length. Structs by row are for rare events in a request's life. A
request is known by the server's number, and a sample in a core by the slot. `batch_state` applies steps.
"""

from __future__ import annotations

import enum
import os
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.codec.sequence import Sequenced
from penstock.engine.protocol.answer_format import AnswerFormat as AnswerFormat  # a part of messages
from penstock.engine.protocol.sampling_params import SamplingParams as SamplingParams  # a part of messages
from penstock.errors import DecodeError
from penstock.tensor import Handle

Seeds = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint16]  # each of one sample that a core runs or has preempted
Ints = npt.NDArray[np.int32]  # token ids, blocks, counts, lengths
Requests = Ints  # numbers that a server has given, unique among its open requests
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Natural = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # one of Ints
MAX_REQUESTS = 1 << 31  # numbers of requests are less; after the last one a server begins again at 0
MAX_SLOTS = 1 << 16
NAME_NBYTES = 16  # of a request
CONTEXT = 8  # last ids of a prompt, which decide how some tokenizers write the next ones


# ── server → core, by the core's inbox ───────────────────────────────────────────────────────────────────────────────
class Inputs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Inputs of prompts other than text: images and prompt embeddings. The core passes the items on and opens none."""

    counts: Ints  # how many belong to each prompt
    items: tuple[Handle, ...]  # an inline item keeps the frame alive that it came in
    positions: Ints  # of each item's first placeholder in its prompt
    lengths: Ints  # of each item's placeholder, in tokens


class Style(enum.IntEnum):
    """The format of an answer's chunks: complete lines of server-sent events."""

    CHAT = 1  # chat.completion.chunk
    COMPLETION = 2  # text_completion
    TEXT = 3  # text alone, for a server that parses the answer; only ids of reasoning are counted


class ChunkFormat(msgspec.Struct, array_like=True, frozen=True):
    """How an output processor writes the chunks of an answer. The core passes it on."""

    style: Style
    head: bytes  # the beginning of each chunk: a JSON object without its last brace
    first_index: Natural = 0  # of its choices: one answer may have several requests
    answer: AnswerFormat | None = None  # of a chat; None: all text is content
    prompt_tokens: Natural | None = None  # for the usage in each chunk; None: the chunks have none
    has_ids: bool = False  # each chunk has its token ids


class Progress(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """What the samples of a request have generated before their group was lost."""

    counts: Ints  # generated ids of each sample; -1: the sample is over, and is not run
    ids: Ints  # of all samples, one after the other

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        counts, ids = self.counts, self.ids
        if counts.ndim != 1 or not counts.size or counts.min() < -1 or counts.max() < 0:
            raise ValueError("expected a count of -1 or more for each sample, and one that is not over")
        if ids.shape != (total := int(counts.clip(0).sum(dtype=np.int64)),):
            raise ValueError(f"expected {total} generated ids, got a shape of {ids.shape}")

    def generated(self) -> list[Ints | None]:
        """Returns the generated ids of each sample. None: the sample is over."""
        ends = np.cumsum(self.counts.clip(0), dtype=np.int64).tolist()
        counts = zip(ends, self.counts.tolist(), strict=True)
        return [None if count < 0 else self.ids[end - count : end] for end, count in counts]


SUSPECT = 2  # failures after which a request is tried alone
CONFINED_TOKENS = 64  # a suspect that has generated fewer runs where suspects are tried: most failures come early
TRIAL_TOKENS = 16  # that a suspect generates until it is cleared; more than are in flight between a step and a server


class Submit(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request. `n` samples of one prompt are one request, and as many slots."""

    server: Natural
    request: Number  # of this server
    prompt: Ints
    params: SamplingParams
    priority: int = 0  # lower is sooner
    client: str = ""  # scheduling is fair among clients
    salt: bytes = b""  # requests share cached blocks only with those of the same salt
    inputs: Inputs | None = None
    chunk_format: ChunkFormat | None = None  # None: plain text
    seed: Natural = 0  # of all draws, 64 bits: the seed of `params` modulo 2**64, or drawn by the server
    arrived_ns: Natural = 0  # time.monotonic_ns() when the request was submitted first
    progress: Progress | None = None  # None: the request begins
    failures: Natural = 0  # deaths by itself of a process, while the request was in a step in flight
    may_be_tried: bool = True  # alone, if the request is a suspect: its client has a budget of trials
    request_id: str = ""  # as clients and logs name the request; for observers
    grammar: Handle | None = None  # text that the answer follows (`text.grammar`). The core passes the handle on
    adapter: bytes = b""  # `Adapter.digest`; b"": the model alone
    # Random, and kept when an answer is resumed: names its inputs without keys, and its blocks where none are shared.
    # A number that a core counts would name inputs of two users alike, as blocks may outlive the core.
    name: bytes = msgspec.field(default_factory=partial(os.urandom, NAME_NBYTES))

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        if self.progress is not None and self.progress.counts.size != self.params.n:
            raise ValueError(f"expected progress of {self.params.n} samples, got {self.progress.counts.size}")


class Abort(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Requests of a server, or samples of them, that need no more tokens.

    From the server: its clients have gone. From an output processor: a stop string has ended the samples,
    and their last chunks have been sent; or the server reads too slowly.
    """

    server: Natural
    requests: Requests
    samples: Slots | None = None  # index of one sample of each request; None: all samples

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        if self.samples is not None and self.samples.shape != self.requests.shape:
            raise ValueError(f"expected {self.requests.size} samples, got a shape of {self.samples.shape}")


# ── core → workers, by broadcast ─────────────────────────────────────────────────────────────────────────────────────
class AdapterChange(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter for all ranks of a group to load, or to unload. The core passes the change on to the workers."""

    server: Natural
    number: Natural  # of the change; a later change has a higher number, also of another server
    name: str
    path: str
    digest: bytes  # `Adapter.digest`
    is_loaded: bool  # False: the adapter is unloaded, when no request of the group has it any more


class Joined(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Requests that join a slot, a row each. A request that leaves in the same step may free the slot."""

    slots: Slots
    requests: Requests
    params: tuple[SamplingParams, ...]  # each once
    lengths: Ints  # of the prompts
    ids: Ints  # the prompts, one after the other
    block_counts: Ints
    blocks: Ints
    params_of: Slots | None = None  # which of `params` each row has; None: one each
    computed: Ints | None = None  # tokens of each prompt that the cache has; None: 0
    # Of each row: its own slot, or the slot with the same prompt and inputs, which are not sent again. None: all own.
    parents: Slots | None = None
    servers: Slots | None = None  # None: all of server 0
    inputs: Inputs | None = None
    samples: Slots | None = None  # each row's index among its request's `n` samples; None: all 0
    seeds: Seeds | None = None  # None: all 0
    generated_counts: Ints | None = None  # ids that each row has generated before it was resumed; None: 0
    generated: Ints | None = None  # the ids, row after row
    grammars: tuple[Handle, ...] = ()  # each once; an inline grammar keeps its frame alive
    grammars_of: Slots | None = None  # number of each row's grammar, from 1; 0: none. None: all 0
    adapters: tuple[bytes, ...] = ()  # each once: `Submit.adapter`
    adapters_of: Slots | None = None  # as `grammars_of`


class Resumed(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Preempted requests that run again, with new blocks."""

    slots: Slots
    block_counts: Ints
    blocks: Ints
    computed: Ints | None = None  # tokens that the cache still has; None: 0


class Appended(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Blocks at the end of block tables."""

    slots: Slots
    blocks: Ints
    counts: Ints | None = None  # None: one each


class Advances(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The number of tokens that this step computes of a request, if it is not 1: chunks of prefill."""

    slots: Slots
    counts: Ints  # 0: not in this step


class Begin(Sequenced, array_like=True, frozen=True, eq=False):
    """The first message of a core: the size of its batch, which is empty. Steps are counted from it."""

    slots: Natural
    blocks: Natural
    block_size: Natural


class Step(Sequenced, array_like=True, frozen=True, eq=False):
    """The next step, as changes of the batch, in this order. Running rows outside `advances` compute one token."""

    left: Slots | None = None
    preempted: Slots | None = None  # keep slot and prompt, lose their blocks
    joined: Joined | None = None
    resumed: Resumed | None = None
    appended: Appended | None = None
    advances: Advances | None = None


class Stop(msgspec.Struct, array_like=True, frozen=True):
    """The last message: no more steps, or tokens, come. From the launcher, by the core's inbox: the core is to stop."""

    reason: str = ""


# ── worker → core: Ready by the core's inbox, StepDone by the ring of rank 0 ─────────────────────────────────────────
class AdapterState(msgspec.Struct, array_like=True, frozen=True):
    """Whether an adapter can be used: on a rank, or, from the core to a server, on all ranks."""

    digest: bytes
    error: str = ""  # why not; "": it can
    rank: Natural = 0
    server: Natural = 0  # of the change, as `number`
    number: Natural = 0


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """From a worker: it has loaded the model, has room for so many blocks, and knows the ids below `vocabulary`."""

    rank: Natural
    blocks: Natural
    vocabulary: Natural
    max_short_prompt: Natural | None = None  # prompts of more tokens share no blocks with those of fewer
    model: Natural = 0  # `ModelFingerprint.word` of the files that it has loaded; 0: a simulated device has none
    dtype: str = "float32"  # of the model
    kv_epoch: bytes | None = None  # of the rank's pages, which outlive the worker; None: they do not
    full_step_tokens: Natural | None = None  # see `Device.full_step_tokens`
    adapters: tuple[AdapterState, ...] = ()  # that the rank has loaded, or could not load


class Logprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """For each sampled token: itself first, then the likeliest."""

    ids: Ints
    values: Floats
    ranks: Ints  # of the sampled tokens only
    counts: Ints | None = None  # how many for each sampled token; None: as many for all


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log-probabilities of consecutive tokens of a prompt. After a preemption or a loss some come again."""

    number: Natural  # of the sample's slot; in a Delta, of the request
    position: Natural  # of the first of the tokens
    logprobs: Logprobs  # for each token: itself first, then the likeliest in its place


class StepDone(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The result of a step: sampled ids, and failures. Every step has one, in their order, even if no row sampled."""

    leader: int
    number: Natural  # of the step
    ids: Ints  # one for each that samples in this step (`BatchState.sampled`), from the lowest slot to the highest
    logprobs: Logprobs | None = None
    failed: Slots | None = None  # slots of samples that end without an answer
    reasons: Bytes | None = None  # FinishReason of each of them; None: all ERROR
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    vectors: tuple[Handle, ...] = ()  # of a pooling engine: one for each of the ids, which mean nothing there

    def require_fit(self, sampled: int) -> None:
        """Raises DecodeError unless there is one id for each of the `sampled` rows, and a reason for each failure."""
        if self.ids.shape != (sampled,):
            raise DecodeError(f"expected {sampled} numbers, got a shape of {self.ids.shape} at $.ids")
        if self.vectors and len(self.vectors) != sampled:
            raise DecodeError(f"expected {sampled} vectors, got {len(self.vectors)} at $.vectors")
        if self.reasons is not None and (self.failed is None or self.reasons.shape != self.failed.shape):
            raise DecodeError(
                f"expected a reason for each failed slot, got a shape of {self.reasons.shape} at $.reasons"
            )

    def failures(self) -> list[tuple[int, FinishReason]]:
        """Returns the slots that failed, with the reasons. Raises DecodeError for an unknown reason."""
        if self.failed is None:
            return []
        slots: list[int] = self.failed.tolist()
        if self.reasons is None:
            return [(slot, FinishReason.ERROR) for slot in slots]
        try:
            return [(slot, FinishReason(why)) for slot, why in zip(slots, self.reasons.tolist(), strict=True)]
        except ValueError as error:
            raise DecodeError(f"{error} at $.reasons") from None


class FinishReason(enum.IntEnum):
    STOP = 1  # an end id or a stop string
    LENGTH = 2
    ERROR = 3  # its logits were not finite
    MISSING = 4  # an input of its prompt, or its grammar, was no longer in the store: the request may be sent again
    MISFIT = 5  # an input of its prompt does not fit the model or its placeholder
    STUCK = 6  # its grammar, bad words and allowed ids rule out every id
    GRAMMAR_LIMIT = 7  # its grammar takes more work than a step may
    GRAMMAR_MISFIT = 8  # the ids before it was resumed are not of its grammar


# ── output processor → core, by the core's inbox ─────────────────────────────────────────────────────────────────────
class OutputReady(msgspec.Struct, array_like=True, frozen=True):
    """From an output processor: the receiver is open, in this life and incarnation."""

    index: Natural
    incarnation: Natural
    life: Natural


# ── core → output processor, by a ring of its own ────────────────────────────────────────────────────────────────────
class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sample with a slot. The sample keeps the slot until the end, also while preempted."""

    slot: Natural
    request: Number
    params: SamplingParams
    context: tuple[int, ...]  # the last ids of its prompt, up to CONTEXT
    chunk_format: ChunkFormat | None = None
    server: Natural = 0
    sample: Natural = 0  # its index among its request's `n` samples
    cached: Natural = 0  # tokens of its prompt that the cache had
    generated: tuple[int, ...] = ()  # ids before it was resumed: their text has been delivered


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """A sample that has ended."""

    slot: Natural
    reason: FinishReason
    stop: int | None = None  # the id of its `stop_token_ids` that ended it


class Tokens(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """New samples, ids and ends, for the samples of one output processor. Only the core and stop strings end a sample.

    The fields apply in this order: aborted, started, ids, ended. So a slot is free when a sample starts in it, and the
    last token of a sample comes with its end. A sample gets nothing after its end.
    """

    ids: Ints  # the next token of each of `slots`; or none
    slots: Slots | None = None  # None: those of the last message with ids
    logprobs: Logprobs | None = None  # of these ids
    aborted: tuple[int, ...] = ()  # slots: their samples have ended since the message before, without another token
    started: tuple[Started, ...] = ()
    ended: tuple[Ended, ...] = ()  # a slot that is not in `slots` gets no more token
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    vectors: tuple[Handle, ...] = ()  # as in `StepDone`


# ── output processor → server, by the server's inbox ─────────────────────────────────────────────────────────────────
class Finished(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The rows of a Delta that are the last of their sample, with the reasons."""

    rows: Slots
    reasons: Bytes  # FinishReason
    stops: tuple[int | str | None, ...] | None = None  # the id or string that ended each; None: none of them
    reasoning: Ints | None = None  # ids of the reasoning of each; None: no request has a format of reasoning
    calls: Ints | None = None  # tool calls in the chunks of each; None: no chunk has any


class Began(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The rows of a Delta that are the first of a sample, and not resumed, of prompts that the cache had tokens of."""

    rows: Slots
    cached: Ints  # tokens of each prompt that the cache had


class Delta(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The next text and ids of answers: a row for each sample with news.

    The columns of numbers lie in one array, as each array costs a microsecond at any length.
    """

    rows: Natural
    numbers: Ints  # requests, one a row; lengths of their texts, one a row; ids
    text: bytes  # utf-8 of all rows, one after the other
    counts: Slots | None = None  # of each row's ids; None: one each
    samples: Slots | None = None  # each row's index among its request's `n` samples; None: all 0
    finished: Finished | None = None
    logprobs: Logprobs | None = None
    began: Began | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # those of a request come before the first row of it
    vectors: tuple[Handle, ...] = ()  # of the first rows, one each, without ids

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        for name, column in (("counts", self.counts), ("samples", self.samples)):
            if column is not None and column.shape != (self.rows,):
                raise ValueError(f"expected {self.rows} {name}, got a shape of {column.shape}")
        ids = self.rows if self.counts is None else int(self.counts.sum())
        if self.numbers.shape != (2 * self.rows + ids,):
            raise ValueError(f"expected {2 * self.rows + ids} numbers, got a shape of {self.numbers.shape}")

    @property
    def requests(self) -> Requests:
        return self.numbers[: self.rows]

    @property
    def text_lengths(self) -> Ints:
        return self.numbers[self.rows : 2 * self.rows]

    @property
    def ids(self) -> Ints:
        return self.numbers[2 * self.rows :]


# ── core or output processor → server, by the server's inbox ─────────────────────────────────────────────────────────
class Resume(enum.IntEnum):
    """Why a serving group gives up a request. The server may submit the request again, with its progress."""

    OUTPUT_DIED = 1  # its output processor
    SUSPECT_RUNS = 2  # another request runs alone, as it may be the reason for failures of processes
    TRIAL_REFUSED = 3  # the request may be the reason, and may not run alone: it may not be submitted again


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """A request that ends without an answer. `status` is the HTTP status for it."""

    request: Number
    status: Natural
    reason: str
    resume: Resume | None = None  # None: it may not be submitted again


# ── the uplink of a node → the bridge of its group, on the home node ──────────────────────────────────────────────────
class LossReport(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A group of a remote node serves no more. Carries the verdict of the remote launcher."""

    cause: Natural  # Cause
    reason: str
    servers: Ints  # of the requests in its steps in flight
    requests: Requests
    is_trial: bool = False


# The messages of each channel; the index in the list is the number on the wire.
INBOX = Submit | Abort | Ready | OutputReady | Stop | AdapterChange | AdapterState
STEPS = Step | Begin | Stop | AdapterChange
RESULTS = StepDone
TOKENS = Tokens | Stop
DELTAS = Delta | Failed | AdapterState
LOSSES = LossReport
