"""Ours over a bridge: a local broadcast to one bridge process, TCP to another, and a broadcast to the receivers there.

Replies go back the same way. The sender starts the bridge of its node, the first receiver that of the other node.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.sessions import ROOT
from bench.impls import Meet, Seat, Wires

TIMEOUT = 60.0


def check() -> None:
    import penstock.bridge  # noqa: F401


def lay(receivers: int, scratch: Path) -> Wires:
    import penstock

    home = penstock.Broadcast(receivers=1), penstock.Inbox(senders=receivers)
    away = penstock.Broadcast(receivers=receivers), penstock.Inbox(senders=receivers)
    return Wires([home, *[away] * receivers])


def start_bridge(side: str, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.nodes.bridge_process", side, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Sender:
    def __init__(self, wire: tuple[Any, Any], seat: Seat, meet: Meet) -> None:
        self._frames, self._replies = wire
        tickets = [str(channel.ticket) for channel in wire]
        self._bridge = start_bridge("frames-home", [*tickets, str(seat.receivers)])
        meet(line_of(self._bridge))
        self._sender = self._frames.open_sender()
        self._inbox = self._replies.open_receiver()
        self._receivers = range(seat.receivers)
        self.send = partial(self._sender.send, timeout=TIMEOUT)

    def expect(self, nbytes: int) -> None:
        pass

    def gather(self) -> None:
        for _ in self._receivers:
            self._inbox.receive(timeout=TIMEOUT)

    def reserved_nbytes(self) -> int:
        return int(self._frames.segment_nbytes + self._replies.segment_nbytes)

    def close(self) -> None:
        self._sender.close()
        self._inbox.close()
        self._bridge.kill()
        self._bridge.wait()


class Receiver:
    def __init__(self, wire: tuple[Any, Any], seat: Seat, meet: Meet) -> None:
        frames, replies = wire
        address = meet("")[0]
        self._bridge = None
        if seat.rank == 1:
            tickets = [str(channel.ticket) for channel in wire]
            self._bridge = start_bridge("frames-away", [*tickets, str(seat.receivers), str(address)])
        self._receiver = frames.open_receiver(seat.rank - 1)
        self._sender = replies.open_sender(seat.rank - 1)
        self.reply = partial(self._sender.send, timeout=TIMEOUT)
        self.receive = partial(self._receiver.receive, timeout=TIMEOUT)

    def expect(self, nbytes: int) -> None:
        pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.wait()
