"""What a process does during one phase of a measurement: the timed loops, without the start of processes.

Every phase begins with one reply of each receiver to the sender, so that all are in their loops before the first
stamp. Stamps are `perf_counter_ns`, which is CLOCK_MONOTONIC: one clock for all processes.
"""

from __future__ import annotations

import gc
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from bench.impls import REPLY_NBYTES, Received, Receiver, Sender

now = time.perf_counter_ns


class Order(NamedTuple):
    """What the parent asks all processes of a session to do. Same values to all of them."""

    kind: str
    nbytes: int
    messages: int
    pace: float = 0.0  # seconds between the starts of two sends
    is_acknowledged: bool = True  # the sender waits for all replies before it goes on
    share: float = 0.0  # of requests, those for what is kept already


@dataclass
class Report:
    """What one process saw. A stamp list has `messages` entries, or none where its process takes no such stamp."""

    begins: array[int] = field(default_factory=lambda: array("q"))  # sender: just before send
    sents: array[int] = field(default_factory=lambda: array("q"))  # sender: send returned
    dones: array[int] = field(default_factory=lambda: array("q"))  # sender: all replies are here
    arrivals: array[int] = field(default_factory=lambda: array("q"))  # receiver: receive returned
    cpu: float = 0.0  # seconds of all threads of the process, user and system
    wall: float = 0.0


@lru_cache(maxsize=2)
def frame_of(nbytes: int) -> bytes:
    """The frame that every implementation carries: known, and not all the same byte."""
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


REPLY = frame_of(REPLY_NBYTES)


def stamps(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def measured(report: Report) -> Iterator[None]:
    """Fills in the process's CPU and wall time of what runs inside."""
    cpu, wall = cpu_seconds(), now()
    yield
    report.wall = (now() - wall) / 1e9
    report.cpu = cpu_seconds() - cpu


def compare(frame: Received, nbytes: int) -> None:
    """A benchmark of a channel that loses or changes bytes is worth nothing: the first frame is compared in full."""
    if len(frame) != nbytes or bytes(frame) != frame_of(nbytes):
        raise ValueError(f"a frame of {nbytes} bytes arrived changed or cut ({len(frame)} bytes)")


def lock_step_send(end: Sender, order: Order) -> Report:
    report = Report(stamps(order.messages), stamps(order.messages), stamps(order.messages))
    begins, sents, dones = report.begins, report.sents, report.dones
    frame, send, gather = frame_of(order.nbytes), end.send, end.gather
    gather()
    with measured(report):
        for index in range(order.messages):
            begin = now()
            send(frame)
            sent = now()
            gather()
            dones[index] = now()
            begins[index] = begin
            sents[index] = sent
    return report


def lock_step_receive(end: Receiver, order: Order) -> Report:
    report = Report(arrivals=stamps(order.messages))
    arrivals, nbytes = report.arrivals, order.nbytes
    receive, reply = end.receive, end.reply
    reply(REPLY)
    with measured(report):
        for index in range(order.messages):
            frame = receive()
            arrivals[index] = now()
            if index == 0:
                compare(frame, nbytes)
            elif len(frame) != nbytes:
                raise ValueError(f"expected {nbytes} bytes, got {len(frame)}")
            del frame  # a view gives its memory back before the sender goes on
            reply(REPLY)
    return report


def paced_send(end: Sender, order: Order) -> Report:
    report = Report(stamps(order.messages), stamps(order.messages))
    begins, sents = report.begins, report.sents
    frame, send, gather = frame_of(order.nbytes), end.send, end.gather
    pace = int(order.pace * 1e9)
    gather()
    send(frame)  # uncounted: what follows counts from a message, not from a start
    with measured(report):
        due = now()
        for index in range(order.messages):
            due = max(due + pace, now())  # late: no burst to catch up
            time.sleep(max(0, due - now()) / 1e9)
            begins[index] = now()
            send(frame)
            sents[index] = now()
            if order.is_acknowledged:
                gather()
    gather()
    return report


def paced_receive(end: Receiver, order: Order) -> Report:
    report = Report(arrivals=stamps(order.messages))
    arrivals, nbytes, is_acknowledged = report.arrivals, order.nbytes, order.is_acknowledged
    receive, reply = end.receive, end.reply
    reply(REPLY)
    compare(receive(), nbytes)
    with measured(report):
        for index in range(order.messages):
            frame = receive()
            arrivals[index] = now()
            if len(frame) != nbytes:
                raise ValueError(f"expected {nbytes} bytes, got {len(frame)}")
            del frame
            if is_acknowledged:
                reply(REPLY)
    reply(REPLY)
    return report


def stream_send(end: Sender, order: Order) -> Report:
    report = Report(stamps(1))
    frame, send = frame_of(order.nbytes), end.send
    end.gather()
    with measured(report):
        report.begins[0] = now()
        for _ in range(order.messages):
            send(frame)
        end.gather()
    return report


def stream_receive(end: Receiver, order: Order) -> Report:
    report = Report(arrivals=stamps(1))
    receive, nbytes = end.receive, order.nbytes
    end.reply(REPLY)
    with measured(report):
        for _ in range(order.messages):
            frame = receive()
            if len(frame) != nbytes:
                raise ValueError(f"expected {nbytes} bytes, got {len(frame)}")
            del frame
        report.arrivals[0] = now()
        end.reply(REPLY)
    return report


def collect_send(end: Sender, order: Order) -> Report:
    """The stream the other way: every receiver replies `messages` times, the sender gathers them all."""
    report = Report(stamps(1), dones=stamps(1))
    gather = end.gather
    gather()
    with measured(report):
        report.begins[0] = now()
        end.send(frame_of(order.nbytes))  # go
        for _ in range(order.messages):
            gather()
        report.dones[0] = now()
    return report


def collect_receive(end: Receiver, order: Order) -> Report:
    report = Report()
    reply = end.reply
    reply(REPLY)
    with measured(report):
        end.receive()
        for _ in range(order.messages):
            reply(REPLY)
    return report


def exchange_send(end: Sender, order: Order) -> Report:
    """Lock-step the other way: all receivers reply, then the sender answers all of them at once."""
    report = Report()
    frame, send, gather = frame_of(order.nbytes), end.send, end.gather
    gather()
    with measured(report):
        send(frame)
        for _ in range(order.messages):
            gather()
            send(frame)
    return report


def exchange_receive(end: Receiver, order: Order) -> Report:
    report = Report(stamps(order.messages), dones=stamps(order.messages))
    begins, dones = report.begins, report.dones
    receive, reply = end.receive, end.reply
    reply(REPLY)
    receive()
    with measured(report):
        for index in range(order.messages):
            begin = now()
            reply(REPLY)
            frame = receive()
            dones[index] = now()
            begins[index] = begin
            del frame
    return report


SEND: dict[str, Callable[[Sender, Order], Report]] = {
    "lock_step": lock_step_send,
    "paced": paced_send,
    "stream": stream_send,
    "collect": collect_send,
    "exchange": exchange_send,
}
RECEIVE: dict[str, Callable[[Receiver, Order], Report]] = {
    "lock_step": lock_step_receive,
    "paced": paced_receive,
    "stream": stream_receive,
    "collect": collect_receive,
    "exchange": exchange_receive,
}


@contextmanager
def collector_off(collects_first: bool = True) -> Iterator[None]:
    """As timeit does: a collection in the middle would be charged to whichever implementation is running."""
    if collects_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
