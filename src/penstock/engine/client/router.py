"""Chooses the group of a request: the one with the fewest open requests, or one that had its prefix or images before.

The status board counts the open requests of each group.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.engine.protocol.messages import Ints

BEGINNING = 64  # tokens of a prompt's prefix: prompts that share them are routed to the same group
MAX_REMEMBERED = 1 << 14  # prefixes and images
SLACK = 8  # a group may have so many requests, and a fourth, more than the least loaded before affinity is given up


def traces(prompt: Ints, salt: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys of a request's affinity: one for the prefix of its prompt, one for each of its images."""
    return [salt + np.ascontiguousarray(prompt[:BEGINNING], np.int32).tobytes(), *keys]


class Router:
    def __init__(self, seed: int | None = None) -> None:
        self._had: OrderedDict[bytes, int] = OrderedDict()  # each trace's last group, the longest unused trace first
        self._chance = random.Random(seed)

    def choose(self, loads: Mapping[int, int], traces: Sequence[bytes]) -> int:
        """Returns one of the groups in `loads`, which has the number of open requests of each."""
        least = min(loads.values())
        votes = Counter(self._had[trace] for trace in traces if trace in self._had)
        chosen = None
        for group, _ in votes.most_common():
            if group in loads and loads[group] <= least + SLACK + least // 4:
                chosen = group
                break
        if chosen is None:
            chosen = self._chance.choice([group for group, load in loads.items() if load == least])
        for trace in traces:
            self._had[trace] = chosen
            self._had.move_to_end(trace)
        while len(self._had) > MAX_REMEMBERED:
            self._had.popitem(last=False)
        return chosen
