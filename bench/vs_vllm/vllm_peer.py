"""vLLM's own classes as ways to say something: in a process of the interpreter that has vllm, if there is one.

Leaves to `vllm_end` what happens there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.impls import Unavailable
from bench.impls.peer import python_with
from bench.vs_vllm.peer_process import PeerProcess
from bench.vs_vllm.rounds import Round

SCRIPT = Path(__file__).with_name("vllm_end.py")
START_LIMIT, ROUND_LIMIT = 180.0, 60.0  # seconds; importing vllm takes its time

_peer: list[PeerProcess | Unavailable] = []  # the one process, started when first asked for


def peer() -> PeerProcess:
    """Raises Unavailable, always for the same reason."""
    if not _peer:
        try:
            started = PeerProcess([python_with("vllm"), str(SCRIPT)], "vllm")
            _peer.append(started)
            started.receive(START_LIMIT)
        except Unavailable as error:
            close()
            _peer.append(error)
    if isinstance(_peer[0], Unavailable):
        raise _peer[0]
    return _peer[0]


def close() -> None:
    while _peer:
        item = _peer.pop()
        if isinstance(item, PeerProcess):
            item.close()


@dataclass(frozen=True)
class Remote:
    what: str
    make: Callable[[int], list[dict[str, Any]]]

    def perform(self, messages: int) -> Round:
        there = peer()
        there.send({"what": self.what, "steps": self.make(messages)})
        answer = there.receive(ROUND_LIMIT)
        frames = [base64.b64decode(item) for item in answer["frames"]]
        return Round(answer["encode_ns"], answer["decode_ns"], frames)
