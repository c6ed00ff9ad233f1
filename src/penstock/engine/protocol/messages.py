"""Every message that crosses a boundary of the engine, in the order in which a request meets them.

Fields of many requests are columns: arrays of equal length. Structs by row are for what happens once in a request's
life. A request is known by its server's number for it, and a sample in a core by its slot. `batch_state` applies steps.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.codec.sequence import Sequenced
from penstock.errors import DecodeError
from penstock.tensor import Handle

Slots = npt.NDArray[np.uint16]  # each of one sample that a core runs or has preempted
Ints = npt.NDArray[np.int32]  # token ids, blocks, counts, lengths
Requests = Ints  # numbers that a server has given, unique among its open requests
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Natural = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # one of Ints
MAX_REQUESTS = 1 << 31  # numbers of requests are less; after the last one a server begins again at 0
MAX_SLOTS = 1 << 16
CONTEXT = 8  # last ids of a prompt, which decide how some tokenizers write the next ones


# ── server → core, by the core's inbox ───────────────────────────────────────────────────────────────────────────────
# A new sampling parameter takes this way:
#   1. `Sampling` in server/chat/request_schema.py: a field of the HTTP body, and its name in `_PASSED_THROUGH`;
#   2. a field here with a default, hashable (a tuple, not a list: `columns_of_params` sends equal parameters once), and
#      its range in `_LIMITS`. The second word of an error is the field ("expected top_p above 0"): `param` of the 400;
#   3. its reader: `Sampler.join` (worker), `StopConditions.join` (core) or `OutputState` (output processor).
# `penstock generate` accepts each field here by its name.
class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters of a request, and the conditions that end it."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as fit the model
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many besides the sampled one
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding turns into an error with a path."""
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"expected {name} between {low:g} and {high:g}, got {value}")
        if not self.top_p > 0:
            raise ValueError(f"expected top_p above 0, got {self.top_p}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"expected min_tokens up to max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if "" in self.stop:
            raise ValueError("expected stop strings that are not empty")
        if self.stop and not self.detokenize:
            raise ValueError("expected detokenize with stop strings: they are found in text")

    def require_choice(self, eos_ids: Collection[int], vocabulary: int) -> None:
        """Raises ValueError unless one of the allowed ids can be the first token of an answer."""
        if self.allowed_token_ids is None:
            return
        allowed = {token_id for token_id in self.allowed_token_ids if 0 <= token_id < vocabulary}
        if not allowed:
            raise ValueError(
                f"expected an id below {vocabulary} at $.allowed_token_ids: a request needs an id that it allows"
            )
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}
        if self.min_tokens and allowed <= ends:
            raise ValueError(
                "expected an id at $.allowed_token_ids that does not end the answer, as min_tokens is "
                f"{self.min_tokens}: all {len(allowed)} are end ids"
            )


_MAX_INT = float(2**31 - 1)
_LIMITS = (
    ("n", 1.0, 16384.0),
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("top_k", 0.0, _MAX_INT),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 1e6),
    ("max_tokens", 1.0, _MAX_INT),
    ("min_tokens", 0.0, _MAX_INT),
    ("logprobs", 0.0, _MAX_INT),
)


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


class ChunkFormat(msgspec.Struct, array_like=True, frozen=True):
    """How an output processor writes the chunks of an answer. The core passes it on."""

    style: Style
    head: bytes  # the beginning of each chunk: a JSON object without its last brace
    first_index: Natural = 0  # of its choices: one answer may have several requests


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
class Joined(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Requests that join a slot, one row each. It may be the slot of a request that leaves in the same step."""

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
    """The next step, as changes of the batch, which apply in this order. Rows that run and are not in `advances`
    compute one token. `BatchState.sampled` has the rows that sample."""

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
class Ready(msgspec.Struct, array_like=True, frozen=True):
    """From a worker: it has loaded the model, has room for so many blocks, and knows the ids below `vocabulary`."""

    rank: Natural
    blocks: Natural
    vocabulary: Natural
    max_short_prompt: Natural | None = None  # prompts of more tokens share no blocks with those of fewer


class Logprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """For each sampled token: itself first, then the likeliest."""

    ids: Ints
    values: Floats
    ranks: Ints  # of the sampled tokens only
    counts: Ints | None = None  # how many for each sampled token; None: as many for all


class StepDone(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The result of a step: sampled ids, and failures. Every step has one, in their order, even if no row sampled."""

    leader: int
    number: Natural  # of the step
    ids: Ints  # one for each that samples in this step (`BatchState.sampled`), from the lowest slot to the highest
    logprobs: Logprobs | None = None
    failed: Slots | None = None  # slots of samples that end without an answer
    reasons: Bytes | None = None  # FinishReason of each of them; None: all ERROR

    def require_fit(self, sampled: int) -> None:
        """Raises DecodeError unless there is one id for each of the `sampled` rows, and a reason for each failure."""
        if self.ids.shape != (sampled,):
            raise DecodeError(f"expected {sampled} numbers, got a shape of {self.ids.shape} at $.ids")
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
    ABORT = 3
    ERROR = 4  # its logits were not finite
    MISSING = 5  # an input of its prompt was no longer in the store: the request may be sent again
    MISFIT = 6  # an input of its prompt does not fit the model or its placeholder


# ── core → output processor, by a ring of its own ────────────────────────────────────────────────────────────────────
class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sample that has got a slot, which it keeps until it has ended, also while it is preempted."""

    slot: Natural
    request: Number
    params: SamplingParams
    context: tuple[int, ...]  # the last ids of its prompt, up to CONTEXT
    chunk_format: ChunkFormat | None = None
    server: Natural = 0
    sample: Natural = 0  # its index among its request's `n` samples
    cached: Natural = 0  # tokens of its prompt that the cache had


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


# ── output processor → server, by the server's inbox ─────────────────────────────────────────────────────────────────
class Finished(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The rows of a Delta that are the last of their sample, with the reasons."""

    rows: Slots
    reasons: Bytes  # FinishReason
    stops: tuple[int | str | None, ...] | None = None  # the id or string that ended each; None: none of them
    cached: Ints | None = None  # tokens of each prompt that the cache had; None: 0


class Delta(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """The next text and ids of answers: one row for each sample that has something new.

    Its columns of numbers lie in one array, as each array costs a microsecond, whatever its length.
    """

    rows: Natural
    numbers: Ints  # requests, one a row; lengths of their texts, one a row; ids
    text: bytes  # utf-8 of all rows, one after the other
    counts: Slots | None = None  # of each row's ids; None: one each
    samples: Slots | None = None  # each row's index among its request's `n` samples; None: all 0
    finished: Finished | None = None
    logprobs: Logprobs | None = None

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
class Failed(msgspec.Struct, array_like=True, frozen=True):
    """A request that ends without an answer. `status` is the HTTP status for it."""

    request: Number
    status: Natural
    reason: str


# What each channel carries; its number in this list is the message's number on the wire.
INBOX = Submit | Abort | Ready | Stop
STEPS = Step | Begin | Stop
RESULTS = StepDone
TOKENS = Tokens | Stop
DELTAS = Delta | Failed
