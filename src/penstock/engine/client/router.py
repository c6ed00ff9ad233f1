"""Which group gets a request: the one with the least to do, or one that has seen its beginning before.

Leaves to the board how much each has to do.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.engine.protocol.messages import Ints

BEGINNING = 64  # tokens that two prompts share, if they are to share a cache
MAX_REMEMBERED = 1 << 14
SLACK = 8  # requests more than others: so many a group may have, and a fourth more, before affinity is too dear


def traces(prompt: Ints, salt: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """What a group remembers a request by."""
    return [salt + np.ascontiguousarray(prompt[:BEGINNING], np.int32).tobytes(), *keys]


class Router:
    def __init__(self, seed: int | None = None) -> None:
        self._had: OrderedDict[bytes, int] = OrderedDict()  # each trace's last group, the longest unused trace first
        self._chance = random.Random(seed)

    def choose(self, loads: Mapping[int, int], traces: Sequence[bytes]) -> int:
        """One of the groups in `loads`, which says how many requests each has."""
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
