"""Chooses the group of a request: the one with the fewest open requests, or one that had its prefix or images before.

The status board counts the open requests of each group.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.engine.protocol.messages import Ints

BEGINNING = 64  # tokens of a prompt's prefix: prompts that share them are routed to the same group
REMEMBERED = 1 << 15  # prefixes and images, 10 bytes each
SLACK = 8  # a group may have so many requests, and a fourth, more than the least loaded before affinity is given up


def traces(prompt: Ints, salt: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys of a request's affinity: one for the prefix of its prompt, one for each of its images."""
    return [salt + np.ascontiguousarray(prompt[:BEGINNING], np.int32).tobytes(), *keys]


class Router:
    def __init__(self, seed: int | None = None) -> None:
        # The last group of each trace, in a table of fixed size: a trace replaces the trace before it in the slot of
        # its hash. No trace has the initial hash of its slot.
        self._hashes = array("q", range(1, REMEMBERED + 1))
        self._groups = array("h", bytes(2 * REMEMBERED))
        self._chance = random.Random(seed)

    def choose(self, loads: Mapping[int, int], traces: Sequence[bytes]) -> int:
        """Returns one of the groups in `loads`, which has the number of open requests of each."""
        least = min(loads.values())
        hashes = [hash(trace) for trace in traces]
        votes = Counter(self._groups[key % REMEMBERED] for key in hashes if self._hashes[key % REMEMBERED] == key)
        chosen = None
        for group, _ in votes.most_common():
            if group in loads and loads[group] <= least + SLACK + least // 4:
                chosen = group
                break
        if chosen is None:
            chosen = self._chance.choice([group for group, load in loads.items() if load == least])
        for key in hashes:
            self._hashes[key % REMEMBERED], self._groups[key % REMEMBERED] = key, chosen
        return chosen
