"""What actors do, step by step, and the scenes that are made of it: channels, pools, stores, coming, going, deaths."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import penstock
from penstock import LongRecords, MemoryOptions, _native, lowlevel
from tests.faults.stage import PROMPTLY, WAIT, Actor, Broken, Changed, Own, Stage

HEAD = struct.Struct("<QQ")  # number, length in all
BYTES = random.Random(23).randbytes(1 << 18)
SHORT, LONG = 100, 60_000  # bytes: the ring takes up to 4 KiB, the rest goes to the pool
CHANNEL: dict[str, Any] = {
    "capacity": 16 << 10,
    "long_records": LongRecords(pool_nbytes=8 << 20, max_records=16),
    "max_peers": 8,
}
POOL_NBYTES = 1 << 20
HELD = 300_000  # bytes of a block that an actor holds
SCENES: dict[str, Callable[[Stage], None]] = {}


def scene(play: Callable[[Stage], None]) -> Callable[[Stage], None]:
    SCENES[play.__name__] = play
    return play


def payload(number: int, nbytes: int) -> bytes:
    start = number * 97 % 65_521
    return HEAD.pack(number, nbytes) + (BYTES * 5)[start : start + nbytes - HEAD.size]


def must_be(record: Any, number: int, nbytes: int | None = None) -> None:
    with memoryview(record) as view:
        record_number, length = HEAD.unpack_from(view)
        if length != len(view) or view != payload(record_number, length):
            raise Changed(f"a record or block of {len(view)} bytes is not what was written")
        if record_number != number or nbytes not in (None, length):
            raise Changed(f"number {record_number} came where {number} was due")


# ── steps: channels ──────────────────────────────────────────────────────────────────────────────────────────────────
def open_channel(own: Own, style: str) -> tuple[str, int]:
    if style == "broadcast":
        own.channel = penstock.Broadcast(receivers=2, **CHANNEL)
    elif style == "inbox":
        own.channel = penstock.Inbox(senders=2, **CHANNEL)
    else:
        own.channel = penstock.Ring(**CHANNEL)
    return str(own.channel.ticket), own.channel.fd


def attach(own: Own, ticket: str) -> None:
    own.channel = penstock.attach(ticket)


def become_sender(own: Own) -> None:
    own.sender = own.channel.open_sender(name=own.name)


def become_receiver(own: Own) -> None:
    own.receiver = own.channel.open_receiver(name=own.name)


def become_async_sender(own: Own) -> None:
    own.sender = own.channel.open_async_sender(name=own.name)


def become_async_receiver(own: Own) -> None:
    own.receiver = own.channel.open_async_receiver(name=own.name)


def send(own: Own, number: int, nbytes: int) -> None:
    own.sender.send(payload(number, nbytes), timeout=WAIT)


def send_reserved(own: Own, number: int, nbytes: int) -> None:
    with own.sender.reserve(nbytes, timeout=WAIT) as room:
        with memoryview(room) as view:
            view[:] = payload(number, nbytes)


def send_in_loop(own: Own, number: int, nbytes: int) -> None:
    own.loop.run_until_complete(own.sender.send(payload(number, nbytes), timeout=WAIT))


def receive(own: Own, number: int) -> None:
    must_be(own.receiver.receive(timeout=WAIT), number)


def receive_view(own: Own, number: int) -> None:
    """Keeps it."""
    lease = own.receiver.receive_view(timeout=WAIT)
    own.held.append((lease, number))
    must_be(lease, number)


def receive_in_loop(own: Own, number: int) -> None:
    must_be(own.loop.run_until_complete(own.receiver.receive(timeout=WAIT)), number)


def receive_from_two(own: Own, numbers: set[int]) -> None:
    """All of them, in any order."""
    missing = getattr(own, "missing", None) or set(numbers)
    own.missing = missing
    while missing:
        record = own.receiver.receive(timeout=WAIT)
        number, _ = HEAD.unpack_from(record)
        must_be(record, number)
        missing.remove(number)


@contextlib.contextmanager
def death_of(pid: int, otherwise: str) -> Iterator[None]:
    """The block raises the death of the process."""
    try:
        yield
    except penstock.PeerDied as death:
        if death.pid != pid:
            raise
    else:
        raise Changed(otherwise)


def wait_for_death(own: Own, pid: int) -> None:
    with death_of(pid, "a record came where a death was due"):
        own.receiver.receive(timeout=WAIT)


def wait_for_death_in_loop(own: Own, pid: int) -> None:
    with death_of(pid, "a record came where a death was due"):
        own.loop.run_until_complete(own.receiver.receive(timeout=WAIT))


def send_until_death(own: Own, pid: int) -> None:
    """Fills the ring, and waits for room that will never be."""
    with death_of(pid, "a hundred records were sent through a ring of sixteen KiB that nobody reads"):
        for number in range(100):
            own.sender.send(payload(number, 3000), timeout=WAIT)


def leave(own: Own) -> None:
    for name in ("sender", "receiver"):
        if hasattr(own, name):
            getattr(own, name).close()
            delattr(own, name)


def trim(own: Own) -> None:
    own.channel.trim()


def look_on(own: Own) -> None:
    """As `penstock inspect` does, and `penstock measure`."""
    own.tap = None
    own.channel.snapshot()
    own.channel.peers()
    own.tap = _native.Tap(own.channel._segment, True)


def read_tap(own: Own, numbers: list[int]) -> None:
    """All of them, each once."""
    if not hasattr(own, "to_be_seen"):
        own.to_be_seen = list(numbers)
    while own.to_be_seen:
        for _, _, _, frame in own.tap.read():
            number = own.to_be_seen.pop(0)
            if frame is None:
                raise Changed(f"the tap did not see record {number}")
            must_be(frame, number)


def begin_trace(own: Own) -> None:
    """As `penstock trace` does."""
    own.tracer = None
    own.tracer = _native.TraceReader(own.channel._segment)
    own.tracer.extend()


def read_trace(own: Own) -> None:
    own.tracer.extend()
    own.tracer.read()


def verify(own: Own) -> None:
    for held, number in own.held:
        must_be(held, number)


def let_go(own: Own) -> None:
    verify(own)
    while own.held:
        own.held.pop()[0].release()


# ── steps: pools ─────────────────────────────────────────────────────────────────────────────────────────────────────
def create_pool(own: Own) -> tuple[str, int]:
    own.pool = lowlevel.Pool.create(POOL_NBYTES, name="pool", peer_name=own.name, max_blocks=64, max_peers=8)
    return str(own.pool.ticket), own.pool.fd


def attach_pool(own: Own, ticket: str) -> None:
    own.pool = lowlevel.Pool.attach(ticket, peer_name=own.name)


def join(own: Own) -> int:
    return own.pool.join().index


def take(own: Own, number: int, nbytes: int = HELD) -> None:
    """Keeps it."""
    lease = own.pool.take(nbytes, timeout=WAIT)
    with memoryview(lease) as view:
        view[:] = payload(number, nbytes)
    own.held.append((lease, number))


def take_all(own: Own) -> None:
    """Takes what is free, block by block, and writes over it."""
    number = 1000
    while True:
        try:
            lease = own.pool.take(60_000)
        except penstock.MemoryExhausted as error:
            if "free" in str(error):  # it is the pool that is exhausted, and not this machine
                return
            raise
        with memoryview(lease) as view:
            view[:] = payload(number, 60_000)
        own.held.append((lease, number))
        number += 1


def share(own: Own, to: int) -> Any:
    return own.pool.share(own.held[-1][0], [to])


def open_ref(own: Own, ref: Any, number: int) -> None:
    lease = own.pool.open(ref)
    own.held.append((lease, number))
    must_be(lease, number)


def stop_within_take(own: Own) -> None:
    if not hasattr(own, "has_stopped"):
        _native.arm_point("pool.locked", "stop", 1)
        own.has_stopped = True
    take(own, 5, 1000)


# ── steps: segments and stores ───────────────────────────────────────────────────────────────────────────────────────
def create_segment(own: Own) -> tuple[str, int]:
    own.segment = lowlevel.Segment.create(100_000, name="plain", memory=MemoryOptions(numa_node=0))
    own.segment.view(writable=True)[:1000] = payload(3, 1000)
    return str(own.segment.ticket), own.segment.fd


def attach_segment(own: Own, ticket: str) -> None:
    own.segment = lowlevel.Segment.attach(ticket)
    must_be(bytes(own.segment.view()[:1000]), 3)


def adopt_segment(own: Own) -> None:
    """By a descriptor, as one that was inherited. If it is refused, the descriptor is ours still."""
    fd = os.dup(own.segment.fd)
    try:
        lowlevel.Segment.attach(fd)
    except BaseException:
        os.close(fd)
        raise


def create_store(own: Own) -> tuple[str, int]:
    own.store = penstock.Store(POOL_NBYTES, peer_name=own.name, max_items=32, max_peers=8)
    return str(own.store.ticket), own.store.fd


def attach_store(own: Own, ticket: str) -> None:
    own.store = penstock.Store.attach(ticket, peer_name=own.name)


def value_of(number: int, nbytes: int = 50_000) -> dict[str, Any]:
    return {"number": number, "pixels": np.frombuffer(payload(number, nbytes), np.uint8)}


def content_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(own: Own, number: int, nbytes: int = 50_000) -> None:
    own.lease = own.store.put(value_of(number, nbytes), key=content_key(number), timeout=WAIT)


def put_many(own: Own) -> None:
    """More than there is room for."""
    for number in range(20, 30):
        own.store.put(value_of(number, 150_000), key=content_key(number), timeout=WAIT).release()


def get(own: Own, number: int) -> None:
    with own.store.get(content_key(number)) as lease:
        must_be(lease.value()["pixels"].tobytes(), number)


def hold(own: Own, number: int) -> None:
    own.lease = own.store.get(content_key(number))


def verify_held(own: Own, number: int) -> None:
    must_be(own.lease.value()["pixels"].tobytes(), number)


def begin_loan(own: Own, number: int) -> None:
    own.loan = own.store.loan(
        content_key(number), {"number": number, "pixels": penstock.Empty((50_000,), "uint8")}, timeout=WAIT
    )


def commit_loan(own: Own, number: int) -> None:
    if own.loan is None:
        return
    own.loan.value()["pixels"][:] = np.frombuffer(payload(number, 50_000), np.uint8)
    own.lease = own.loan.commit()
    own.loan = None


# ── scenes: channels ─────────────────────────────────────────────────────────────────────────────────────────────────
def opened(stage: Stage, style: str = "ring") -> tuple[Actor, str]:
    """The actor that makes a channel."""
    maker = stage.actor("maker")
    ticket, fd = maker.do(open_channel, style)
    stage.look_into(maker, fd)
    return maker, ticket


def attached(stage: Stage, name: str, ticket: str, become: Any) -> Actor:
    """Opens an end of the channel in another actor."""
    actor = stage.actor(name)
    actor.do(attach, ticket)
    actor.do(become)
    return actor


def passing(stage: Stage, of_long: bool, sends: Any = send, receives: Any = receive, is_async: str = "") -> None:
    """A receiver that waits is woken by each record; a sender that waits for room, by each that is received."""
    maker, ticket = opened(stage)
    maker.do(become_async_sender if "sender" in is_async else become_sender)
    other = attached(stage, "receiver", ticket, become_async_receiver if "receiver" in is_async else become_receiver)
    for number in range(3):
        waiting = other.start(receives, number)
        waiting.settle()
        maker.do(sends, number, LONG if of_long else SHORT)
        waiting.result(PROMPTLY)
    if receives is receive_view:
        other.do(let_go)
        return
    number = 3
    while True:  # as many as fit, and one more
        waiting = maker.start(sends, number, 3000)
        waiting.settle()
        if not waiting.is_done() or number > 20:
            break
        waiting.result()
        number += 1
    other.do(receives, 3)
    other.do(receives, 4)
    waiting.result(PROMPTLY)
    for late in range(5, number + 1):
        other.do(receives, late)


SCENES |= {
    name: functools.partial(passing, **options)
    for name, options in {
        "ring_short": {"of_long": False},
        "ring_long": {"of_long": True},
        "ring_views": {"of_long": True, "receives": receive_view},
        "ring_reserved": {"of_long": True, "sends": send_reserved, "receives": receive_view},
        "ring_async_receiver": {"of_long": False, "receives": receive_in_loop, "is_async": "receiver"},
        "ring_async_sender": {"of_long": False, "sends": send_in_loop, "is_async": "sender"},
        "ring_async_long": {
            "of_long": True, "sends": send_in_loop, "receives": receive_in_loop, "is_async": "sender receiver",
        },
    }.items()
}  # fmt: skip


@scene
def broadcast(stage: Stage) -> None:
    maker, ticket = opened(stage, "broadcast")
    others = [attached(stage, f"receiver {index}", ticket, become_receiver) for index in range(2)]
    maker.do(become_sender)
    for number, nbytes in enumerate((SHORT, LONG)):
        waiting = [other.start(receive, number) for other in others]
        for attempt in waiting:
            attempt.settle()
        maker.do(send, number, nbytes)
        for attempt in waiting:
            attempt.result(PROMPTLY)


@scene
def broadcast_async(stage: Stage) -> None:
    maker, ticket = opened(stage, "broadcast")
    other = attached(stage, "receiver", ticket, become_receiver)
    looped = attached(stage, "receiver in a loop", ticket, become_async_receiver)
    maker.do(become_sender)
    for number, nbytes in enumerate((LONG, SHORT)):
        waiting = [other.start(receive, number), looped.start(receive_in_loop, number)]
        for actor in waiting:
            actor.settle()
        maker.do(send, number, nbytes)
        for actor in waiting:
            actor.result(PROMPTLY)


@scene
def inbox(stage: Stage) -> None:
    maker, ticket = opened(stage, "inbox")
    maker.do(become_receiver)
    others = [attached(stage, f"sender {index}", ticket, become_sender) for index in range(2)]
    waiting = maker.start(receive_from_two, {1, 2, 3, 4})
    waiting.settle()
    for number in (1, 3):
        sends = [other.start(send, number + index, SHORT) for index, other in enumerate(others)]
        for attempt in sends:
            attempt.result()
    waiting.result(PROMPTLY)


@scene
def replaced(stage: Stage) -> None:
    """A sender leaves and another comes; so does a receiver."""
    maker, ticket = opened(stage, "inbox")
    other = stage.actor("other")
    maker.do(become_receiver)
    for number in range(2):
        other.do(attach, ticket)
        other.do(become_sender)
        other.do(send, number, SHORT)
        maker.do(receive, number, within=PROMPTLY)
        other.do(leave)
    other.do(become_sender)
    maker.do(leave)
    maker.do(become_receiver)
    waiting = maker.start(receive, 9)
    waiting.settle()
    other.do(send, 9, SHORT)
    waiting.result(PROMPTLY)


@scene
def trimmed(stage: Stage) -> None:
    maker, ticket = opened(stage)
    maker.do(become_sender)
    other = attached(stage, "receiver", ticket, become_receiver)
    for number in range(2):
        maker.do(send, number, LONG)
        other.do(receive_view, number, within=PROMPTLY)
        maker.do(trim)
        other.do(let_go)
        other.do(trim)


# ── scenes: observers ────────────────────────────────────────────────────────────────────────────────────────────────
@scene
def watched(stage: Stage) -> None:
    maker, ticket = opened(stage)
    maker.do(become_sender)
    other = attached(stage, "receiver", ticket, become_receiver)
    outsider = attached(stage, "outsider", ticket, look_on)
    for number, nbytes in enumerate((SHORT, LONG)):
        maker.do(send, number, nbytes)
    outsider.do(read_tap, [0, 1])
    for number in range(2):
        other.do(receive, number, within=PROMPTLY)


@scene
def traced(stage: Stage) -> None:
    """An end that cannot map the part for events goes on without them."""
    maker, ticket = opened(stage)
    maker.do(become_sender)
    other = attached(stage, "receiver", ticket, become_receiver)
    outsider = attached(stage, "outsider", ticket, begin_trace)
    for number, nbytes in enumerate((SHORT, LONG)):
        waiting = other.start(receive, number)
        waiting.settle()
        maker.do(send, number, nbytes)
        waiting.result(PROMPTLY)
        outsider.do(read_trace)


# ── scenes: pools, segments, stores ──────────────────────────────────────────────────────────────────────────────────
def borrowing(stage: Stage, name: str, ticket: str, *numbers: int) -> Actor:
    """Takes blocks of the pool in another actor."""
    actor = stage.actor(name)
    actor.do(attach_pool, ticket)
    for number in numbers:
        actor.do(take, number)
    return actor


def lending(stage: Stage) -> tuple[Actor, str]:
    maker = stage.actor("maker")
    ticket, fd = maker.do(create_pool)
    stage.look_into(maker, fd)
    maker.do(join)
    return maker, ticket


@scene
def pool(stage: Stage) -> None:
    maker, ticket = lending(stage)
    other = borrowing(stage, "borrower", ticket)
    peer = other.do(join)
    maker.do(take, 1)
    ref = maker.do(share, peer)
    other.do(open_ref, ref, 1)
    maker.do(let_go)
    maker.do(take_all)
    other.do(let_go)
    waiting = other.start(take, 2)
    waiting.settle()
    maker.do(let_go)
    waiting.result(PROMPTLY)
    other.do(let_go)


@scene
def newcomer(stage: Stage) -> None:
    """An actor joins, while another holds memory and a third fills all that is free."""
    maker, ticket = lending(stage)
    holder = borrowing(stage, "holder", ticket, 1)
    comer = borrowing(stage, "newcomer", ticket, 2)
    time.sleep(0.003)
    maker.do(take_all)
    for actor in (holder, comer):
        actor.do(verify)
    for actor in (maker, holder, comer):
        actor.do(let_go)


@scene
def stopped_holder(stage: Stage) -> None:
    """The lock of a stopped, living actor is waited for and not taken."""
    maker, ticket = lending(stage)
    other = borrowing(stage, "stopped", ticket)
    other.do(join)
    stops = other.start(stop_within_take)
    while " T " not in open(f"/proc/{other.pid}/stat").read():
        if stops.is_done():
            stops.result()  # it was refused before it came there
            stops = other.start(stop_within_take)
        time.sleep(0.0005)
    waiting = maker.start(take, 1, 1000)
    time.sleep(0.01)
    is_early = waiting.is_done()
    os.kill(other.pid, signal.SIGCONT)
    if is_early:
        waiting.result()  # an error that the fault explains is none of a lock that was taken
        if not stage.errors:
            raise Broken("living declared dead", "a lock was taken of its holder, who is stopped and not dead")
    else:
        waiting.result(PROMPTLY)
    stops.result(PROMPTLY)
    for actor in (maker, other):
        actor.do(let_go)


@scene
def segment(stage: Stage) -> None:
    maker, other = stage.actor("maker"), stage.actor("other")
    ticket, fd = maker.do(create_segment)
    stage.look_into(maker, fd)
    other.do(attach_segment, ticket)
    maker.do(adopt_segment)


def keeping(stage: Stage) -> tuple[Actor, Actor]:
    maker = stage.actor("maker")
    ticket, fd = maker.do(create_store)
    stage.look_into(maker, fd)
    other = stage.actor("other")
    other.do(attach_store, ticket)
    return maker, other


@scene
def store(stage: Stage) -> None:
    maker, other = keeping(stage)
    maker.do(put, 1)
    other.do(get, 1)
    other.do(hold, 1)
    other.do(put_many)
    maker.do(put_many)
    other.do(verify_held, 1)


@scene
def store_made(stage: Stage) -> None:
    """One fills a value where it will lie, another waits for it."""
    maker, other = keeping(stage)
    maker.do(begin_loan, 1)
    waiting = other.start(put, 1)
    waiting.settle()
    maker.do(commit_loan, 1)
    waiting.result(PROMPTLY)
    other.do(verify_held, 1)
    maker.do(verify_held, 1)


# ── scenes: deaths ───────────────────────────────────────────────────────────────────────────────────────────────────
def end_killed(stage: Stage, survives: Any, dies: Any, waits: Any) -> None:
    maker, ticket = opened(stage)
    maker.do(survives)
    other = attached(stage, "doomed", ticket, dies)
    if survives is become_receiver:
        other.do(send, 0, SHORT)
        maker.do(receive, 0, within=PROMPTLY)
    waiting = maker.start(waits, other.pid)
    waiting.settle()
    other.kill()
    waiting.death()


SCENES |= {
    "sender_killed": functools.partial(
        end_killed, survives=become_receiver, dies=become_sender, waits=wait_for_death
    ),
    "sender_killed_async": functools.partial(
        end_killed, survives=become_async_receiver, dies=become_sender, waits=wait_for_death_in_loop
    ),
    "receiver_killed": functools.partial(
        end_killed, survives=become_sender, dies=become_receiver, waits=send_until_death
    ),
}  # fmt: skip


@scene
def holder_killed(stage: Stage) -> None:
    """What a dead peer held is given back; what a living one holds is not."""
    maker, ticket = lending(stage)
    holder = borrowing(stage, "holder", ticket, 1)
    doomed = borrowing(stage, "doomed", ticket, 2, 3)
    waiting = maker.start(take, 4)
    waiting.settle()
    doomed.kill()
    waiting.death()
    maker.do(take_all)
    holder.do(verify)
    for actor in (maker, holder):
        actor.do(let_go)


@scene
def maker_killed(stage: Stage) -> None:
    """The writer of a value dies; the actor that waits for the value writes it."""
    maker, other = keeping(stage)
    other.do(begin_loan, 1)
    waiting = maker.start(put, 1)
    waiting.settle()
    other.kill()
    waiting.death()
    maker.do(verify_held, 1)
