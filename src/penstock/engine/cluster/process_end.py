"""Why one process of the cluster has ended: its last words, its exit status, or a signal and the sender of the signal.

The status of a process does not say whether a fault of the process raised a signal, or another process sent it. The
process itself leaves a record of the sender (`native/engine/fatal_signals.h`). Without a record the sender is unknown,
and the signal counts as raised by the process.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from penstock.engine.cluster.verdict_board import Cause
from penstock.errors import DeathCause

CAUSED_BY_PEER_DEATH = "PeerDied: "  # in the last words of a process that ends because a peer has died
FROM_OUTSIDE = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}  # no process of a group raises these
KILLS = {signal.SIGKILL, *FROM_OUTSIDE}  # core and launcher agree that an output processor ended so is started again
# si_code of a signal that a process has sent: by kill, sigqueue and tgkill. Other codes are the kernel's.
SENT_CODES = (0, -1, -6)


class SignalRecord(NamedTuple):
    """What a process has recorded of the signal that ended it. `number` 0: no record."""

    number: int
    code: int
    sender: int  # pid; 0: of another pid namespace

    @classmethod
    def of(cls, word: int) -> SignalRecord:
        code = word >> 8 & 0xFFFFFF
        return cls(word & 0xFF, code - (1 << 24) if code >> 23 else code, word >> 32)


class ProcessEnd(NamedTuple):
    """Why a process has ended."""

    death: DeathCause  # as the kernel reports it
    is_lasting: bool = False  # the process could not start, and the next attempt would meet the same error
    cause: Cause | None = None  # of the loss of a group on another node; None: the process itself is the reason
    is_sent: bool = False  # another process is known to have sent the signal
    last_words: str = ""  # of the process about its error

    @property
    def how(self) -> str:
        return self.last_words or self.death.text

    @property
    def is_caused_by_peer(self) -> bool:
        return CAUSED_BY_PEER_DEATH in self.last_words

    @property
    def is_killed(self) -> bool:
        """Returns whether SIGKILL has ended the process: from outside, or by the kernel for want of memory."""
        return self.death.signal == signal.SIGKILL

    @property
    def is_from_outside(self) -> bool:
        """Returns whether another process is known to have ended this process by a signal other than SIGKILL."""
        return self.is_sent or self.death.signal in FROM_OUTSIDE

    def with_record(self, record: SignalRecord, pid: int) -> ProcessEnd:
        """Adds what the process `pid` has recorded of its signal. A record of another signal says nothing."""
        if record.number != self.death.signal:
            return self
        if record.code in SENT_CODES and record.sender != pid:
            return self._replace(death=DeathCause(f"{self.death}, sent by pid {record.sender}"), is_sent=True)
        return self
