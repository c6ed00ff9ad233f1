"""A request in the core: its prompt and its samples, and the hashes of the blocks in which their tokens lie.

Leaves to the scheduler what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.kvcache import hash_of, items_of, root_of
from penstock.engine.protocol import Inputs, Ints, SamplingParams
from penstock.engine.schedule import Input, Params
from penstock.errors import PenstockError

Key = tuple[bytes, int, int]  # of what stands in a prompt instead of text, its position and length


class Refused(PenstockError):
    """This request can never run. `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request:
    """Waits as a whole, and is let in sample by sample."""

    def __init__(
        self,
        server: int,
        number: int,
        prompt: Ints,
        params: Params,
        block_size: int,
        *,
        arrival: int,
        priority: int = 0,
        client: str = "",
        salt: bytes = b"",
        inputs: tuple[Input, ...] = (),
        keys: tuple[Key, ...] = (),
    ) -> None:
        self.server = server
        self.number = number
        self.prompt = prompt
        self.interned = params
        self.inputs = inputs
        self.arrival = arrival
        self.priority = priority
        self.client = client
        self.is_waiting = False
        self.slots: set[int] = set()  # of its samples: whoever joins may have the prompt of any
        self.full_blocks: int = prompt.size // block_size
        self.samples = [Sample(self, index) for index in range(self.params.n)]
        self.open_samples = self.params.n
        self.block_size = block_size
        self._keys = keys
        self._hashes = [root_of(salt)]  # as many as anybody asked for; the first is that of no block

    @property
    def params(self) -> SamplingParams:
        return self.interned.value

    def hash_of(self, block: int) -> bytes:
        """Of one of the `full_blocks` of its prompt. That of block -1 is what the first one follows."""
        while len(self._hashes) < block + 2:
            begin = (len(self._hashes) - 1) * self.block_size
            ids = self.prompt[begin : begin + self.block_size].tobytes()
            self._hashes.append(hash_of(self._hashes[-1], ids, self.items_of(len(self._hashes) - 1)))
        return self._hashes[block + 1]

    def items_of(self, block: int) -> bytes:
        if not self._keys:
            return b""
        return items_of(self._keys, block * self.block_size, (block + 1) * self.block_size)


class Sample:
    """One of the n of a request."""

    __slots__ = ("_hashes", "full_blocks", "index", "is_aside", "is_ended", "rank", "request", "served", "slot")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.rank = (request.priority, request.arrival, index)  # who has the smaller one is not put aside for the other
        self.slot: int | None = None
        self.is_ended = False
        self.is_aside = False  # it has been let in, has no blocks, and wants some
        self.full_blocks = request.full_blocks  # of which the hashes are known
        self.served: int = request.prompt.size  # tokens for which its client has been charged, or pays otherwise
        self._hashes: list[bytes] = []  # of the full blocks after those of the prompt

    def hash_of(self, block: int) -> bytes:
        own = block - self.request.full_blocks
        return self._hashes[own] if own >= 0 else self.request.hash_of(block)

    def hashes(self, count: int) -> Iterator[bytes]:
        """Of the first blocks. One after the other: who finds none needs no more."""
        return (self.hash_of(block) for block in range(count))

    def extend(self, ids: bytes) -> bytes:
        """Another block is full of generated tokens, perhaps after the end of the prompt. Returns its hash."""
        hashes, block = self._hashes, self.full_blocks
        if hashes:
            one = hash_of(hashes[-1], ids)
        else:
            one = hash_of(self.request.hash_of(block - 1), ids, self.request.items_of(block))
        hashes.append(one)
        self.full_blocks = block + 1
        return one

    def serve(self, tokens: int) -> int:
        """It has so many. For how many its client is still to be charged: now it has been."""
        served, self.served = self.served, tokens
        return tokens - served


def inputs_of(inputs: Inputs | None, length: int, arrival: int) -> tuple[tuple[Input, ...], tuple[Key, ...]]:
    """As the schedule and as the hashes want them. Raises Refused where they do not lie in the prompt."""
    if inputs is None:
        return (), ()
    positions, lengths = inputs.positions.tolist(), inputs.lengths.tolist()
    if not len(inputs.items) == len(positions) == len(lengths) or inputs.counts.tolist() != [len(positions)]:
        raise Refused(400, f"expected a place in the prompt for each of {len(inputs.items)} inputs")
    for position, count in zip(positions, lengths, strict=True):
        if position < 0 or count < 1 or position + count > length:
            raise Refused(400, f"expected an input within a prompt of {length} tokens, got {count} at {position}")
    # What has no key is like nothing else that comes; what has one is like all that have the same.
    keys = [b"%d.%d" % (arrival, at) if one.key is None else one.key for at, one in enumerate(inputs.items)]
    return tuple(zip(inputs.items, positions, lengths, strict=True)), tuple(zip(keys, positions, lengths, strict=True))
