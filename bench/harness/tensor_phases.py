"""The timed loops for tensors; as in phases.py, every phase begins with one reply of each receiver.

carry    one tensor under way: put, send, received, got, a byte of each page read, replied
warm     the same, after the sender touched all the memory that it puts to
hold     one tensor is carried and kept by all;  weigh  how much memory each process has;  let_go
fill, serve    as the ends themselves have it: bench/impls/serving.py
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.harness.phases import REPLY, Order, Report, measured, now, stamps
from bench.impls.tensors import compare, read_pages, weigh


@dataclass
class TensorReport(Report):
    """`arrivals`: the receiver has the view."""

    puts: array[int] = field(default_factory=lambda: array("q"))  # sender: put returned
    copies: array[int] = field(default_factory=lambda: array("q"))  # sender: how long one memcpy took, in turn
    tokens: array[int] = field(default_factory=lambda: array("q"))  # receiver: it knows what to get
    reads: array[int] = field(default_factory=lambda: array("q"))  # receiver: it has read a byte of each page
    nbytes: int = 0  # weighed


def carry_send(end: Any, order: Order) -> Report:
    count = order.messages
    report = TensorReport(stamps(count), stamps(count), stamps(count), puts=stamps(count))
    if end.is_compared_with_memcpy:
        report.copies = stamps(count)

    def copy(index: int) -> None:
        began = now()
        end.copy()
        report.copies[index] = now() - began

    end.gather()
    with measured(report):
        for index in range(count):
            end.prepare()
            if report.copies and index % 2:  # before the put and after it, by turns
                copy(index)
            begin = now()
            token = end.put()
            put = now()
            end.send(token)
            sent = now()
            end.gather()
            report.dones[index] = now()
            report.begins[index], report.puts[index], report.sents[index] = begin, put, sent
            del token
            if report.copies and not index % 2:
                copy(index)
    return report


def carry_receive(end: Any, order: Order) -> Report:
    count = order.messages
    report = TensorReport(arrivals=stamps(count), tokens=stamps(count), reads=stamps(count))
    end.reply(REPLY)
    with measured(report):
        for index in range(count):
            token = end.receive()
            report.tokens[index] = now()
            view = end.get(token)
            report.arrivals[index] = now()
            read_pages(view)
            report.reads[index] = now()
            if index == 0:
                compare(view, order.nbytes)
            del view, token  # a view gives its memory back before the sender goes on
            end.reply(REPLY)
    return report


def warm_send(end: Any, order: Order) -> Report:
    end.warm()
    return carry_send(end, order)


def hold_send(end: Any, order: Order) -> Report:
    end.gather()
    end.prepare()
    end.send(end.put())
    end.gather()
    return Report()


def hold_receive(end: Any, order: Order) -> Report:
    end.reply(REPLY)
    end.held = end.get(end.receive())
    compare(end.held, order.nbytes)
    end.reply(REPLY)
    return Report()


def weigh_here(end: Any, order: Order) -> Report:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not anybody's copy
    return TensorReport(nbytes=weigh("Pss_Anon:") + end.shared_nbytes())


def let_go_receive(end: Any, order: Order) -> Report:
    end.held = None
    return Report()


def fill(end: Any, order: Order) -> Report:
    report: Report = end.fill(order)
    return report


def serve(end: Any, order: Order) -> Report:
    report: Report = end.serve(order)
    return report


SEND: dict[str, Callable[[Any, Order], Report]] = {
    "carry": carry_send,
    "warm": warm_send,
    "hold": hold_send,
    "weigh": weigh_here,
    "let_go": lambda end, order: Report(),
    "fill": fill,
    "serve": serve,
}
RECEIVE: dict[str, Callable[[Any, Order], Report]] = {
    "carry": carry_receive,
    "warm": carry_receive,
    "hold": hold_receive,
    "weigh": weigh_here,
    "let_go": let_go_receive,
    "fill": fill,
    "serve": serve,
}
