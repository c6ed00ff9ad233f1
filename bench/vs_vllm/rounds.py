"""Several ways to say the same, in turn: what each writes, how long that takes, and how long it takes to read.

A B C, B C A, …: what is compared was measured within the same seconds. Leaves to `comparison` what the ways are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bench.harness.phases import collector_off, now
from bench.harness.turns import in_turn
from bench.impls import Unavailable
from penstock.tools.capture.edit_distance import between

NEAR = 1 << 14  # edits; in an experiment there is time
LONG_NBYTES = 50_000  # of a message; of these only two pairs are compared
MAX_COMPARED = 32  # of the others


class Round(NamedTuple):
    """What one way did in one round: per message, in the mean of the round."""

    encode_ns: float
    decode_ns: float
    frames: list[bytes]


class Way(Protocol):
    """One format. Raises Unavailable where it cannot take part."""

    def perform(self, messages: int) -> Round:
        """So many messages, which follow those of the last call."""


@dataclass(frozen=True)
class Local:
    """A way in this process: `make` gives messages (untimed), `encode` and `decode` are timed."""

    make: Callable[[int], Sequence[Any]]
    encode: Callable[[Any], Any]
    decode: Callable[[bytes], object]

    def perform(self, messages: int) -> Round:
        created = self.make(messages)
        encode, decode = self.encode, self.decode
        # A collection empties the processor's caches: a short message would take 1.3 to 2 times as long.
        with collector_off(collects_first=False):
            began = now()
            encoded = [encode(message) for message in created]
            written = now()
            frames = [whole(item) for item in encoded]  # as the channel does it: one copy, into the ring
            gathered = now()
            for frame in frames:
                decode(frame)
            read = now()
        return Round((written - began) / messages, (read - gathered) / messages, frames)


def whole(encoded: Any) -> bytes:
    """A frame, or the pieces of one."""
    return b"".join(encoded) if isinstance(encoded, list) else bytes(encoded)


@dataclass
class Found:
    """Of one way, over all rounds."""

    nbytes: list[int] = field(default_factory=list)
    edits: list[int] = field(default_factory=list)
    is_exact: bool = True
    encode_ns: list[float] = field(default_factory=list)
    decode_ns: list[float] = field(default_factory=list)
    missing: str = ""  # why it did not take part

    def figures(self) -> dict[str, float]:
        """Medians of the rounds; bytes in the mean of all messages, because blocks fall due in some of them."""
        result: dict[str, float] = {"bytes": statistics.fmean(self.nbytes)}
        if self.edits:
            result["distance_bytes"] = statistics.fmean(self.edits)
        encode, decode = statistics.median(self.encode_ns), statistics.median(self.decode_ns)
        both = statistics.median(a + b for a, b in zip(self.encode_ns, self.decode_ns, strict=True))
        return result | {"encode_us": encode / 1e3, "decode_us": decode / 1e3, "encode_decode_us": both / 1e3}


def take_turns(ways: Mapping[str, Way], messages: int, rounds: int, *, warm_up: int = 1) -> dict[str, Found]:
    """The first rounds warm up: their times are not counted, their frames are."""
    outcome = {name: Found() for name in ways}
    for turn in range(rounds + warm_up):
        for name in in_turn([name for name in ways if not outcome[name].missing], turn):
            item = outcome[name]
            try:
                result = ways[name].perform(messages)
            except Unavailable as error:
                item.missing = str(error)
                continue
            if turn == 0:
                pairs = 2 if len(result.frames[0]) > LONG_NBYTES else MAX_COMPARED
                for before, after in zip(result.frames[:pairs], result.frames[1 : pairs + 1]):
                    distance = between(before, after, near=NEAR)
                    item.edits.append(distance.edits)
                    item.is_exact &= distance.is_exact
            item.nbytes += [len(frame) for frame in result.frames]
            if turn >= warm_up:
                item.encode_ns.append(result.encode_ns)
                item.decode_ns.append(result.decode_ns)
    return outcome
