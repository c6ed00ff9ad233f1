"""The processes that get killed, and those that survive: senders, receivers, lenders and borrowers of blocks.

A record has its sender, its number and how long it is, and is followed by bytes that both sides know: whatever
is lost, doubled, torn or mixed up shows at the receiver. What a sender knows to be sent stands on the board, which
outlives it.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

import penstock
from penstock import _native, lowlevel

HEAD = struct.Struct("<IIQQ")  # actor, kind, number, length of what follows
RECORD, LAST = 1, 2
BYTES = random.Random(20).randbytes(1 << 19)  # what records are made of
SENT, RECEIVED, CELLS = 0, 1, 2
BOARD_ACTORS = 16384
WATCHDOG = 25.0


class Board:
    """Numbers that outlive their writers: a word for all, and two for each actor."""

    def __init__(self, segment: lowlevel.Segment) -> None:
        self.segment = segment
        self.words = segment.view(writable=True).cast("Q")

    @classmethod
    def create(cls) -> Board:
        return cls(lowlevel.Segment.create(8 * (8 + CELLS * BOARD_ACTORS), name="board"))

    def sent(self, actor: int) -> int:
        return self.words[8 + CELLS * actor + SENT]

    def received(self, actor: int) -> int:
        return self.words[8 + CELLS * actor + RECEIVED]

    def note(self, actor: int, cell: int, value: int) -> None:
        self.words[8 + CELLS * actor + cell] = value

    @property
    def is_over(self) -> bool:
        return self.words[0] != 0

    def end(self) -> None:
        self.words[0] = 1


class Part(msgspec.Struct):
    """What an actor is told before it begins."""

    actor: int
    board: str
    where: str  # ticket of the channel, or of the pool
    index: int = 0
    lanes: int = 1
    point: str = ""  # at which it kills itself
    countdown: int = 1
    sizes: tuple[int, ...] = (40,)
    pause: float = 0.0005
    through: str = ""  # lenders and borrowers: the ticket of the broadcast that carries references
    peers: tuple[int, ...] = ()  # lenders: the peers that they lend to
    closes_early: bool = False  # closes by itself after some records, instead of when all is over
    holds: int = 3  # views held at a time


def payload(number: int, nbytes: int) -> memoryview:
    start = number * 97 % (len(BYTES) - nbytes)
    return memoryview(BYTES)[start : start + nbytes]


def arm(part: Part) -> None:
    if part.point:
        _native.arm_point(part.point, "kill", part.countdown)


def arm_coming(part: Part) -> None:
    """The points that are passed while it comes."""
    if part.point.endswith(".claimed"):
        arm(part)


def insist(make: Any) -> Any:
    """Takes the place of an actor that died, as soon as its slot is free."""
    deadline = time.monotonic() + WATCHDOG
    while True:
        try:
            return make()
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


# ── what senders have in common, and receivers ───────────────────────────────────────────────────────────────────────
class Actor:
    """One end of a channel; with a pool, of the broadcast that carries the references."""

    def __init__(self, talk: Connection, part: Part, is_sender: bool, pool: lowlevel.Pool | None = None) -> None:
        self.talk, self.part = talk, part
        self.board = Board(lowlevel.Segment.attach(part.board))
        channel = penstock.attach(part.through if pool else part.where)
        claim = channel.open_sender if is_sender else channel.open_receiver
        self.end = insist(lambda: claim(part.index, name=f"actor {part.actor}"))
        # A borrower joins the pool last: what it is granted and not sent would never be opened, and never come back.
        talk.send(("ready", os.getpid(), *([pool.peer.index] if pool else [])))
        arm(part)

    def died(self, death: penstock.PeerDied) -> None:
        self.talk.send(("died", death.name, death.pid, time.monotonic()))

    def is_early(self, records: int) -> bool:
        return self.part.closes_early and records >= 50

    def send_all(self, body: Callable[[int, int], Any]) -> int:
        """Record after record, of what `body` says, until all is over: how many were sent."""
        part, board = self.part, self.board
        number = 0
        is_last = False
        while not is_last:
            is_over = board.is_over
            is_last = is_over or self.is_early(number)
            nbytes = part.sizes[number % len(part.sizes)]
            record = [HEAD.pack(part.actor, LAST if is_over else RECORD, number, nbytes), body(number, nbytes)]
            while True:
                try:
                    self.end.send(record, timeout=WATCHDOG)
                    number += 1
                    break
                except penstock.PeerDied as death:
                    self.died(death)
                    if is_last:
                        break
                except penstock.EndOfChannel:  # no receiver is left: what was not sent is not counted
                    if is_last or board.is_over:
                        is_last = True
                        break
                time.sleep(0.002)
            board.note(part.actor, SENT, number)
            if part.pause:
                time.sleep(part.pause)
        return number

    def receive_all(self, receive: Callable[[int], Any], met: Callable[[Any, int, int], None]) -> Heard:
        """Until the last of every lane, or the end. `receive` waits for one, and `met` has it, its number and size."""
        heard = Heard()
        lasts = 0
        while lasts < self.part.lanes and not self.is_early(heard.records):
            try:
                record = receive(heard.records)
            except penstock.PeerDied as death:
                if death.pid not in heard.deaths:
                    heard.deaths.append(death.pid)
                    self.died(death)
                else:
                    time.sleep(0.0005)  # a successor comes
                continue
            except penstock.EndOfChannel:
                if self.part.lanes == 1 or self.board.is_over:
                    break
                time.sleep(0.0005)
                continue
            actor, kind, number, nbytes = HEAD.unpack_from(record)
            span = heard.spans.setdefault(actor, [number, number])
            assert number == span[1], f"actor {actor}: record {number} came where {span[1]} was due"
            span[1] += 1
            met(record, number, nbytes)
            del record
            lasts += kind == LAST
            heard.records += 1
            self.board.note(self.part.actor, RECEIVED, heard.records)
        return heard


@dataclass
class Heard:
    """What a receiver got: of each actor the first record and one past the last, and the dead."""

    spans: dict[int, list[int]] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)
    records: int = 0


class Held:
    """Records that are held for a while, and must not change meanwhile."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: list[tuple[Any, int, int]] = []

    def keep(self, bytes_of: Any, number: int, nbytes: int) -> None:
        self.held.append((bytes_of, number, nbytes))
        while len(self.held) > self.most:
            self.let_go()

    def let_go(self) -> None:
        bytes_of, number, nbytes = self.held.pop(0)
        assert memoryview(bytes_of) == payload(number, nbytes), f"record {number} changed while it was held"
        if isinstance(bytes_of, lowlevel.BlockLease):
            bytes_of.release()

    def let_all_go(self) -> None:
        while self.held:
            self.let_go()


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def sender(talk: Connection, part: Part) -> None:
    arm_coming(part)
    actor = Actor(talk, part, is_sender=True)
    number = actor.send_all(payload)
    size = {"close.kept": 500, "abort.begun": 5000}.get(part.point)  # in the ring, in the pool
    view = None if size is None else memoryview(actor.end.reserve(size, WATCHDOG))
    actor.end.close()
    del view  # and with it the room, which until now it could have written into
    talk.send(("closed", number))


def receiver(talk: Connection, part: Part) -> None:
    """Takes every third record as a view, and holds a few."""
    arm_coming(part)
    actor = Actor(talk, part, is_sender=False)
    held = Held(part.holds)

    def receive(count: int) -> memoryview:
        return memoryview((actor.end.receive if count % 3 else actor.end.receive_view)(timeout=WATCHDOG))

    def met(record: memoryview, number: int, nbytes: int) -> None:
        body = record[HEAD.size :]
        assert body == payload(number, nbytes), f"record {number} is not what was sent"
        if not isinstance(record.obj, bytes):
            held.keep(body, number, nbytes)

    heard = actor.receive_all(receive, met)
    held.let_all_go()
    if part.point == "fail.written":
        actor.end.fail(RuntimeError("no such layer"))
    actor.end.close()
    talk.send(("seen", {source: tuple(span) for source, span in heard.spans.items()}, heard.deaths))


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def lender(talk: Connection, part: Part) -> None:
    """Fills blocks and sends references to all receivers, each granted to each; keeps a few."""
    arm_coming(part)
    pool = lowlevel.Pool.attach(part.where, peer_name=f"actor {part.actor}")
    pool.join()
    actor = Actor(talk, part, is_sender=True, pool=pool)
    leases: list[Any] = []

    def lend(number: int, nbytes: int) -> bytes:
        if len(leases) > part.holds:
            leases.pop(number % len(leases)).release()
        lease = pool.take(nbytes, timeout=WATCHDOG)
        memoryview(lease)[:] = payload(number, nbytes)
        peers = [peer.index for peer in pool.peers() if peer.state == "live" and peer.name.startswith("borrower")]
        ref = pool.share(lease)
        for to in peers:
            with contextlib.suppress(penstock.PeerDied):
                pool.share(lease, [to])
        leases.append(lease)
        return msgspec.json.encode(ref)

    number = actor.send_all(lend)
    leases.clear()
    actor.end.close()
    pool.close()
    talk.send(("closed", number))


def borrower(talk: Connection, part: Part) -> None:
    """Opens references, checks the bytes, and holds some blocks for a while."""
    arm_coming(part)
    pool = lowlevel.Pool.attach(part.where, peer_name=f"borrower {part.actor}")
    actor = Actor(talk, part, is_sender=False, pool=pool)
    held = Held(part.holds)
    stale: list[int] = []

    def met(record: bytes, number: int, nbytes: int) -> None:
        ref = msgspec.json.decode(record[HEAD.size :], type=lowlevel.Ref)
        try:
            lease = pool.open(ref)
        except lowlevel.StaleRef:
            stale.append(number)  # its lender died, or it was lent before we came
            return
        assert lease.nbytes == nbytes, f"a lease of {lease.nbytes} bytes where {nbytes} were lent"
        assert memoryview(lease) == payload(number, nbytes), f"block of record {number} is not what was lent"
        held.keep(lease, number, nbytes)

    heard = actor.receive_all(lambda count: actor.end.receive(timeout=WATCHDOG), met)
    held.let_all_go()
    actor.end.close()
    pool.close()
    talk.send(("seen", heard.records, len(stale)))
