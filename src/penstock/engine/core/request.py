"""A request in the core: prompt, samples, and the hashes of their blocks.

A resumed request has the ids that its samples generated in the lost group. These ids are computed again like a prompt.

Hashes are cryptographic, as a collision would show a user the text of a stranger; and chained: equal hashes mean equal
prefixes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import sha256

import numpy as np

from penstock.engine._native import BlockCache, hash_blocks
from penstock.engine.protocol.columns import NOTHING, Input
from penstock.engine.protocol.messages import Inputs, Ints, Submit
from penstock.errors import PenstockError

Key = tuple[bytes, int, int]  # of an input (an image, say), its position and length
Arrival = tuple[int, int]  # time of a request's first submission, and its number in this core: no two are equal
SortKey = tuple[int, Arrival, int]  # of a sample: priority, arrival and index; the smallest goes first
HASH_NBYTES = 32
MAX_PRIORITY = 1 << 31
_ITEM = struct.Struct("<qqq")


class RequestRefused(PenstockError):
    """This request can never run. `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request:
    """A request waits as a whole, and is admitted sample by sample."""

    def __init__(
        self,
        submit: Submit,
        block_size: int,
        *,
        arrival: Arrival,
        salt: bytes = b"",
        inputs: tuple[Input, ...] = (),
        keys: tuple[Key, ...] = (),
        queued_ns: int = 0,
    ) -> None:
        self.server = submit.server
        self.number = submit.request
        self.prompt = np.array(submit.prompt, np.int32)
        self.params = submit.params
        self.inputs = inputs
        self.arrival = arrival
        self.priority = max(-MAX_PRIORITY, min(submit.priority, MAX_PRIORITY))
        self.client = submit.client
        self.chunk_format = submit.chunk_format
        self.grammar = submit.grammar
        self.adapter = submit.adapter
        self.queued_ns = queued_ns
        self.cached = 0  # tokens of the prompt that the cache had when the request began, if it has begun here
        self.is_waiting = False
        self.slots: set[int] = set()  # of running samples; a joining sample may share the prompt of any
        self.seed = submit.seed
        progress = submit.progress
        generated = [NOTHING] * self.params.n if progress is None else progress.generated()
        self.has_begun = progress is not None and bool(progress.counts.any())  # in a group that was lost
        self.samples = [Sample(self, index, ids) for index, ids in enumerate(generated)]
        self.first = next(sample for sample in self.samples if not sample.is_ended)  # it computes the prompt
        self.open_samples = sum(not sample.is_ended for sample in self.samples)
        self.block_size = block_size
        self._salt = salt
        self._keys = keys

    @cached_property
    def chain(self) -> bytes:
        """Returns the root hash, and the hash of each full block of the prompt."""
        full = range(self.prompt.size // self.block_size)
        items = [self.items_of(block) for block in full] if self._keys else ()
        return hash_blocks(root_hash(self._salt), self.prompt, self.block_size, items)

    def generated(self, ids: Callable[[int], int]) -> int:
        """Returns how many tokens each running sample has generated at least since the request was submitted. `ids`: by
        slot."""
        slots = [(sample, sample.slot) for sample in self.samples if sample.slot is not None and not sample.is_ended]
        return min((ids(slot) - sample.num_tokens for sample, slot in slots), default=0)

    def items_of(self, block: int) -> bytes:
        """Returns the inputs in the block, which the hash covers besides ids."""
        if not self._keys:
            return b""
        return image_salt(self._keys, block * self.block_size, (block + 1) * self.block_size)


class Sample:
    """One of the `n` samples of a request."""

    __slots__ = (
        *("_chain", "admitted_ns", "first_ns", "generated", "index", "is_aside", "is_ended", "request", "served"),
        *("slot", "sort_key"),
    )

    def __init__(self, request: Request, index: int, generated: Ints | None = NOTHING) -> None:
        """`generated`: the ids before the sample was resumed; None: it is over."""
        self.request = request
        self.index = index
        self.generated = NOTHING if generated is None or not generated.size else generated.copy()  # not the whole frame
        self.sort_key: SortKey = (request.priority, request.arrival, index)  # no sample is preempted for a larger key
        self.slot: int | None = None
        self.is_ended = generated is None
        self.admitted_ns = self.first_ns = (
            0  # when it came into a batch and had its first token, as the core's loop notes
        )
        self.is_aside = False  # its request has begun; it has no blocks, and waits for some
        self.served = self.num_tokens  # tokens for which its client has been charged, or pays otherwise
        self._chain: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Returns the number of `ids`."""
        return self.request.prompt.size + self.generated.size

    @property
    def ids(self) -> Ints:
        """Returns the ids of the prompt, and those generated before the sample was resumed."""
        return np.concatenate((self.request.prompt, self.generated)) if self.generated.size else self.request.prompt

    @property
    def chain(self) -> bytes:
        """Returns the root hash, and the hash of each full block of `ids`."""
        request = self.request
        if not self.generated.size:
            return request.chain
        if self._chain is None:
            prompt_blocks, size = request.prompt.size // request.block_size, request.block_size
            ids = self.ids[prompt_blocks * size :]
            items = [request.items_of(prompt_blocks + block) for block in range(ids.size // size)]
            self._chain = request.chain + hash_blocks(request.chain[-HASH_NBYTES:], ids, size, items)[HASH_NBYTES:]
        return self._chain

    def serve(self, tokens: int) -> int:
        """Sets how many tokens are served. Returns how many of them the client has not been charged for before."""
        served, self.served = self.served, tokens
        return tokens - served


def take_tail(cache: BlockCache, sample: Sample, full: int) -> tuple[Ints, int]:
    """Takes the unfinished block that a killed core has left of a resumed sample with `full` blocks in the cache.
    Returns the block, or none, and the number of ids that are computed there."""
    size = sample.request.block_size
    begin, end = full * size, sample.num_tokens - 1
    is_resumed = sample.slot is None and sample.generated.size > 0
    if not is_resumed or end - begin >= size or sample.request.items_of(full):
        return NOTHING, 0
    parent = sample.chain[full * HASH_NBYTES : (full + 1) * HASH_NBYTES]
    tail = cache.take_tail(parent, sample.ids[begin:end])
    return (NOTHING, 0) if tail is None else (np.array(tail[:1], np.int32), tail[1])


def root_hash(salt: bytes) -> bytes:
    """Returns the parent hash of the first block of a prompt."""
    return sha256(salt).digest()


def image_salt(inputs: Iterable[tuple[bytes, int, int]], begin: int, end: int) -> bytes:
    """Packs the inputs (key, position, length) that lie between these positions, with their offsets from `begin`."""
    return b"".join(
        _ITEM.pack(position - begin, length, len(key)) + key
        for key, position, length in inputs
        if position < end and position + length > begin
    )


def check_submit(submit: Submit, max_model_len: int, vocabulary: int, eos_ids: tuple[int, ...]) -> None:
    """Raises RequestRefused if the prompt or the parameters of a request can never run."""
    prompt, params, progress = submit.prompt, submit.params, submit.progress
    if not 1 <= prompt.size < max_model_len:
        raise RequestRefused(400, f"expected a prompt of 1 to {max_model_len - 1} tokens, got {prompt.size}")
    if prompt.ndim != 1 or prompt.min() < 0 or prompt.max() >= vocabulary:
        raise RequestRefused(400, f"expected ids from 0 to {vocabulary - 1} in the prompt")
    try:
        params.require_choice(eos_ids, vocabulary)
    except ValueError as error:
        raise RequestRefused(400, str(error)) from None
    if params.prompt_logprobs is not None and submit.inputs is not None:
        raise RequestRefused(400, "prompt_logprobs are not supported of a prompt with images, videos or embeddings")
    if progress is None:
        return
    if progress.ids.size and (progress.ids.min() < 0 or progress.ids.max() >= vocabulary):
        raise RequestRefused(400, f"expected ids from 0 to {vocabulary - 1} in the progress")
    room = max_model_len - prompt.size
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    if progress.counts.max() >= limit:
        raise RequestRefused(
            400,
            f"expected less than {limit} generated ids of an open sample, got {progress.counts.max()}",
        )


def build_request(
    submit: Submit, block_size: int, number: int, queued_ns: int, has_prefix_cache: bool, max_short_prompt: int | None
) -> Request:
    """Builds the request, and decides with which others it may share blocks. `number`: of no other request of this
    core; hashes do not cover it, as blocks may outlive the core. Raises RequestRefused."""
    length = submit.prompt.size
    inputs, keys = check_inputs(submit.inputs, length, submit.name)
    arrival = submit.arrived_ns or queued_ns, number
    kind = b"s" if max_short_prompt is None or length <= max_short_prompt else b"l"
    # Each token of a prompt with log-probabilities is computed, once more only after a preemption or a loss.
    is_shared = has_prefix_cache and submit.params.prompt_logprobs is None
    if submit.adapter:  # of a fixed length, and no other kind begins like this one
        kind = b"a" + submit.adapter + kind
    salt = kind + submit.salt if is_shared else b"n" + submit.name
    return Request(submit, block_size, arrival=arrival, salt=salt, inputs=inputs, keys=keys, queued_ns=queued_ns)


def check_inputs(inputs: Inputs | None, length: int, name: bytes) -> tuple[tuple[Input, ...], tuple[Key, ...]]:
    """Returns the inputs for the batch state and for the hashes. `name`: of the request. Raises RequestRefused if one
    is not in the prompt."""
    if inputs is None:
        return (), ()
    positions, lengths = inputs.positions.tolist(), inputs.lengths.tolist()
    if not len(inputs.items) == len(positions) == len(lengths) or inputs.counts.tolist() != [len(positions)]:
        raise RequestRefused(400, f"expected a place in the prompt for each of {len(inputs.items)} inputs")
    for position, count in zip(positions, lengths, strict=True):
        if position < 0 or count < 1 or position + count > length:
            raise RequestRefused(
                400, f"expected an input within a prompt of {length} tokens, got {count} at {position}"
            )
    # An input without a key equals no other; inputs with the same key are equal.
    keys = [name + b".%d" % at if item.key is None else item.key for at, item in enumerate(inputs.items)]
    return tuple(zip(inputs.items, positions, lengths, strict=True)), tuple(zip(keys, positions, lengths, strict=True))
