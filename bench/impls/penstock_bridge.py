"""Ours over a bridge: a local broadcast to one bridge process, TCP to another, and a broadcast to the receivers there.

Replies go back the same way. The sender starts the bridge of its node, the first receiver that of the other node.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness.sessions import ROOT
from bench.impls import Meet, Seat, Wires, penstock_channel


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


class Sender(penstock_channel.Sender):
    def __init__(self, wire: tuple[Any, Any], seat: Seat, meet: Meet) -> None:
        tickets = [str(channel.ticket) for channel in wire]
        self._bridge = start_bridge("frames-home", [*tickets, str(seat.receivers)])
        meet(line_of(self._bridge))
        super().__init__((*wire, ""), seat, meet)

    def close(self) -> None:
        super().close()
        self._bridge.kill()
        self._bridge.wait()


class Receiver(penstock_channel.Receiver):
    def __init__(self, wire: tuple[Any, Any], seat: Seat, meet: Meet) -> None:
        address = meet("")[0]
        self._bridge = None
        if seat.rank == 1:
            tickets = [str(channel.ticket) for channel in wire]
            self._bridge = start_bridge("frames-away", [*tickets, str(seat.receivers), str(address)])
        super().__init__((*wire, ""), seat, meet)

    def close(self) -> None:
        super().close()
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.wait()
