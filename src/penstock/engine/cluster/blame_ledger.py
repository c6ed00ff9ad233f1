"""The blame ledger: which prompts are in quarantine, and which accounts have had trials lately, in shared memory.

Each server writes entries of its own and reads the entries of all servers. So a prompt that one server has convicted is
refused by all, and entries outlive the server. An entry is a hash with an expiry. A full table loses the entry that
expires first. Each entry carries a check word: a reader ignores an entry that is half written.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np
import numpy.typing as npt

from penstock import lowlevel

QUARANTINE_ENTRIES = 1024  # of each server
QUARANTINE_S = 600.0  # seconds until a convicted prompt may run again
TRIAL_ENTRIES = 256  # of each server
MAX_TRIALS = 4  # of one account …
TRIAL_PERIOD_S = 60.0  # … in so many seconds
ENTRY_WORDS = 4  # hash (2), expiry on the monotonic clock in nanoseconds, check
NBYTES = 8 * ENTRY_WORDS
KEY_NBYTES = 16


def ledger_key(*parts: bytes) -> bytes:
    """Returns the key of an entry: a hash of the parts and of their lengths."""
    digest = hashlib.blake2b(digest_size=KEY_NBYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class ExpiringTable:
    """Keys with an expiry: rows of one server, and a view of the rows of all servers."""

    def __init__(self, rows: npt.NDArray[np.uint64], own: slice) -> None:
        self._rows = rows
        self._own = rows[own]
        self._expiries = rows[:, 2]

    @property
    def is_empty(self) -> bool:
        """Returns whether no entry is valid now."""
        return int(self._expiries.max()) <= time.monotonic_ns()

    def add(self, key: bytes, seconds: float) -> None:
        """Adds an entry, in the place of the one that expires first."""
        first, second = np.frombuffer(key, np.uint64)
        expiry = np.uint64(time.monotonic_ns() + int(seconds * 1e9))
        row = self._own[int(self._own[:, 2].argmin())]
        row[:] = first, second, expiry, first ^ second ^ expiry

    def seconds_left(self, key: bytes) -> list[float]:
        """Returns for each valid entry of this key the seconds until the entry expires."""
        first, second = np.frombuffer(key, np.uint64)
        rows = self._rows[self._rows[:, 0] == first].copy()
        is_whole = (rows[:, 1] == second) & (rows[:, 0] ^ rows[:, 1] ^ rows[:, 2] == rows[:, 3])
        now = time.monotonic_ns()
        return [(expiry - now) / 1e9 for expiry in rows[is_whole, 2].tolist() if expiry > now]


class BlameLedger:
    """The tables of all servers. `server`: the one that adds entries."""

    def __init__(self, segment: lowlevel.Segment, servers: int, server: int) -> None:
        rows = np.frombuffer(segment.view(writable=True), np.uint64).reshape(-1, ENTRY_WORDS)
        split, end = servers * QUARANTINE_ENTRIES, servers * (QUARANTINE_ENTRIES + TRIAL_ENTRIES)

        def own(entries: int) -> slice:
            return slice(server * entries, (server + 1) * entries)

        self.quarantine = ExpiringTable(rows[:split], own(QUARANTINE_ENTRIES))
        self.trials = ExpiringTable(rows[split:end], own(TRIAL_ENTRIES))

    @staticmethod
    def create(servers: int) -> lowlevel.Segment:
        return lowlevel.Segment.create(servers * (QUARANTINE_ENTRIES + TRIAL_ENTRIES) * NBYTES, name="blame")
