"""One process of a session: makes its end, then does what the parent orders until told to stop.

Run as a script (`python -m bench.harness.role FD`) by the peer interpreter; otherwise `run` is the target of a spawned
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.harness import phases, tensor_phases
from bench.harness.phases import Order, Report, collector_off
from bench.impls import IMPLEMENTATIONS, Receiver, Seat, Sender

PR_SET_PDEATHSIG = 1
SEND = {**phases.SEND, **tensor_phases.SEND}
RECEIVE = {**phases.RECEIVE, **tensor_phases.RECEIVE}


class Assignment(NamedTuple):
    """Everything a process has to know at its start."""

    implementation: str
    seat: Seat
    wire: object
    cpus: frozenset[int]  # empty: where the scheduler likes


def die_with_parent() -> None:
    """However the parent ends, this process goes with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(parent: Connection, assignment: Assignment) -> None:
    """The life of a role. Sends ("meet" | "ready" | "report" | "failed", …) and answers orders; None ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    die_with_parent()
    if assignment.cpus:
        os.sched_setaffinity(0, assignment.cpus)
    try:
        _serve(parent, assignment)
    except (EOFError, BrokenPipeError):
        pass  # the parent has gone
    except BaseException:
        with contextlib.suppress(OSError):
            parent.send(("failed", traceback.format_exc(limit=-4)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # background threads of an implementation must not hold up the exit


def _serve(parent: Connection, assignment: Assignment) -> None:
    def meet(offer: object) -> list[object]:
        parent.send(("meet", pickle.dumps(offer)))  # opaque: the parent may lack the modules to unpickle it
        return [pickle.loads(each) for each in parent.recv()]

    module = IMPLEMENTATIONS[assignment.implementation].module()
    seat = assignment.seat
    if seat.rank == 0:
        sender: Sender = module.Sender(assignment.wire, seat, meet)
        parent.send(("ready", 0))
        while isinstance(order := parent.recv(), Order):
            parent.send(("report", perform(SEND, sender, order)))
        reserved = sender.reserved_nbytes()
        sender.close()
        parent.send(("closed", reserved))
    else:
        receiver: Receiver = module.Receiver(assignment.wire, seat, meet)
        parent.send(("ready", 0))
        while isinstance(order := parent.recv(), Order):
            parent.send(("report", perform(RECEIVE, receiver, order)))
        receiver.close()
        parent.send(("closed", 0))


def perform(phase_of: dict[str, Callable[[Any, Order], Report]], end: Any, order: Order) -> Report:
    with collector_off():
        end.expect(order.nbytes)
        return phase_of[order.kind](end, order)


if __name__ == "__main__":
    control = Connection(int(sys.argv[1]))
    run(control, control.recv())
