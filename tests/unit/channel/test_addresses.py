"""A channel reserves addresses for as much as its pool may ever hold; memory is committed as records need it."""

import os
from pathlib import Path

from penstock import Broadcast


def committed_nbytes() -> int:
    """What the kernel has promised to all processes: with vm.overcommit_memory=2 it refuses more than a limit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Committed_AS"].split()[0]) * 1024


def address_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_addresses_that_a_channel_reserves_are_not_committed() -> None:
    committed, addresses = committed_nbytes(), address_nbytes()
    channels = [Broadcast(receivers=2, name=f"queue {number}") for number in range(8)]
    reserved = address_nbytes() - addresses
    assert reserved > 8 << 30
    assert committed_nbytes() - committed < reserved / 4  # other processes begin and end meanwhile
    del channels
