"""Processes that move records of random sizes, with checksums and numbers, for seconds; 10^9 records in a soak.

Most of the records go through native/tests/stress.cpp, which is as fast as the core; the rest through Python, which is
what users have.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import LongRecords
from penstock.channel import Channel
from tests import tiers
from tests.conftest import spawn

ROOT = Path(__file__).parents[2]
HEAD = struct.Struct("<QIII")  # number, lane, length, checksum
PIECES = 251  # different records in a pool of payloads; a prime, so that a record of an earlier lap is another one
WATCHDOG = 60.0


def payloads(lane: int, largest: int) -> list[tuple[bytes, bytes]]:
    """Payloads with the part of their heads that does not change, made beforehand: sending then only gathers."""
    chance = random.Random(lane)
    payload_list = []
    for _ in range(PIECES):
        nbytes = chance.choice((0, chance.randrange(64), chance.randrange(1024), chance.randrange(largest)))
        body = chance.randbytes(nbytes)
        payload_list.append((struct.pack("<III", lane, nbytes, zlib.crc32(body)), body))
    return payload_list


def send_many(channel: Channel, lane: int, records: int, largest: int) -> None:
    payload_list = payloads(lane, largest)
    pack = struct.Struct("<Q").pack
    with channel.open_sender(lane) as sender:
        for number in range(records):
            head, body = payload_list[number % PIECES]
            sender.send([pack(number), head, body], timeout=WATCHDOG)


def receive_many(channel: Channel, index: int, records: int, checks: int = 1) -> None:
    due = [0] * channel.senders
    unpack = HEAD.unpack_from
    with channel.open_receiver(index) as receiver:
        for count in range(records * channel.senders):
            record = receiver.receive(timeout=WATCHDOG)
            number, lane, nbytes, checksum = unpack(record)
            if number != due[lane] or len(record) != HEAD.size + nbytes or lane != receiver.source:
                raise AssertionError(f"record {number} of {len(record)} bytes of lane {lane}: {due[lane]} was due")
            due[lane] += 1
            if count % checks == 0 and zlib.crc32(memoryview(record)[HEAD.size :]) != checksum:
                raise AssertionError(f"record {number} of lane {lane} is not what was sent")
        with pytest.raises(penstock.EndOfChannel):
            receiver.receive(timeout=WATCHDOG)


@pytest.mark.timeout(tiers.limit(120, soak=7200))
@pytest.mark.parametrize(
    "style,records,options",
    [
        ("ring", 1_000_000, {"capacity": 1 << 16}),
        (
            "ring",
            200_000,
            {"capacity": 4096, "long_records": LongRecords(inline_limit=512, pool_nbytes=1 << 20, max_records=16)},
        ),
        ("broadcast", 250_000, {"capacity": 1 << 16}),
        ("inbox", 250_000, {"capacity": 1 << 15}),
    ],
    ids=["ring", "tiny ring", "broadcast", "inbox"],
)
def test_every_record_arrives_once_whole_and_in_order(style: str, records: int, options: dict[str, Any]) -> None:
    records = int(records * tiers.STREAMS_SCALE)
    many = {"ring": (1, 1), "broadcast": (1, 4), "inbox": (4, 1)}[style]
    make = {
        "ring": lambda: penstock.Ring(**options),
        "broadcast": lambda: penstock.Broadcast(receivers=4, **options),
        "inbox": lambda: penstock.Inbox(senders=4, **options),
    }[style]
    with make() as channel:
        largest = channel._segment.inline_limit * 2
        within = tiers.limit(110.0, soak=7000.0)
        starts = [spawn(receive_many, channel, index, records, within=within) for index in range(many[1])]
        starts += [spawn(send_many, channel, lane, records, largest, within=within) for lane in range(many[0])]
        run_all(starts)
        assert channel.snapshot()["pool"][0]["blocks"] == 0


def run_all(starts: list[Any]) -> None:
    import contextlib

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start) for start in starts]
        for process in processes:
            process.join()
            assert process.exitcode == 0


@tiers.needs_all
@pytest.mark.timeout(tiers.limit(600, soak=7200))
def test_ten_million_records_between_native_processes(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler to build native/tests/stress.cpp with")
    built = ROOT / "build" / "native" / "tests" / "stress"
    program = tmp_path / "stress"
    source = ROOT / "native" / "tests" / "stress.cpp"
    newest = max(path.stat().st_mtime for path in [source, *(ROOT / "native").glob("*.h")])
    if built.exists() and built.stat().st_mtime > newest:
        program = built
    else:
        flags = ["-std=c++20", "-O2", "-pthread", f"-I{ROOT / 'native'}"]
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True, timeout=300)
    scale = ["--scale", str(tiers.NATIVE_STREAMS_SCALE)] if tiers.NATIVE_STREAMS_SCALE > 1 else []
    done = subprocess.run([str(program), *scale], capture_output=True, text=True, timeout=tiers.limit(400, soak=7000))
    assert done.returncode == 0, done.stderr[-3000:]
    total = sum(int(count) for count in re.findall(r"(\d+) records in", done.stdout))
    assert total >= 10**7 * (100 if tiers.NATIVE_STREAMS_SCALE > 1 else 1), done.stdout
