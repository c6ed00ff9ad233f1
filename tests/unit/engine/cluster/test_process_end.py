"""Which signals a process raises itself, and which another process sends: the record that the process leaves."""

import ctypes
import os
import signal
from collections.abc import Callable

import pytest

from penstock import lowlevel
from penstock.engine.cluster.process_end import ProcessEnd, SignalRecord
from penstock.engine.cluster.status_board import StatusBoard
from penstock.errors import DeathCause
from tests.conftest import eventually, spawn

PLACE = 1
FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGUSR1, signal.SIGQUIT)


def read_null() -> None:
    ctypes.string_at(0)


def signal_itself() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def abort_with_faulthandler() -> None:
    import faulthandler

    faulthandler.enable(open(os.devnull, "w"))
    os.abort()


def fork_and_fault() -> None:
    """A child of the process faults, and the process itself is ended by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        read_null()
    os.waitpid(pid, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def run(segment: lowlevel.Segment, end: Callable[[], None] | None) -> None:
    board = StatusBoard(segment, writable=True)
    board.record_fatal_signals(PLACE)
    board.cluster[StatusBoard.DRAINING] = 1  # the test sends its signal
    if end is not None:
        end()
    while True:
        signal.pause()


def death(end: Callable[[], None] | None, number: int = 0) -> ProcessEnd:
    """Returns the cause of a process that ends itself, or is ended by this signal of the test."""
    segment = StatusBoard.create(1, 3)
    board = StatusBoard(segment, writable=True)
    try:
        with spawn(run, segment, end) as process:
            if number:
                eventually(lambda: board.is_draining, 20.0)
                os.kill(process.pid or 0, number)
            process.join(20.0)
            assert process.pid is not None and process.exitcode is not None and process.exitcode < 0
            cause = ProcessEnd(DeathCause.of_exit_code(process.exitcode))
            cause = cause.with_record(board.take_signal_record(PLACE), process.pid)
        assert board.take_signal_record(PLACE).number == 0, "the next process of the place has no record yet"
        return cause
    finally:
        board.close()
        segment.close()


@pytest.mark.parametrize("number", FATAL)
def test_signal_of_another_process_is_known_as_sent(number: signal.Signals) -> None:
    end = death(None, number)
    assert end.death.signal == number and end.is_sent and f"sent by pid {os.getpid()}" in end.death.text


@pytest.mark.parametrize(
    ("end", "number"),
    [
        (read_null, signal.SIGSEGV),
        (os.abort, signal.SIGABRT),
        (signal_itself, signal.SIGSEGV),
        (abort_with_faulthandler, signal.SIGABRT),
    ],
)
def test_signal_of_the_process_itself_is_not_sent(end: Callable[[], None], number: signal.Signals) -> None:
    process_end = death(end)
    assert process_end.death.signal == number and not process_end.is_sent


def test_kill_leaves_no_record_and_neither_does_a_fault_of_a_forked_child() -> None:
    assert not death(None, signal.SIGKILL).is_sent
    assert not death(fork_and_fault).is_sent


@pytest.mark.parametrize(
    ("record", "is_sent"),
    [
        (SignalRecord(signal.SIGSEGV, 0, 77), True),
        (SignalRecord(signal.SIGSEGV, -6, 77), True),
        (SignalRecord(signal.SIGSEGV, 0, 0), True),  # from outside of the pid namespace
        (SignalRecord(signal.SIGSEGV, 0, 4711), False),
        (SignalRecord(signal.SIGSEGV, 1, 77), False),  # SEGV_MAPERR: the address lies where the pid would
        (SignalRecord(signal.SIGSEGV, -2, 77), False),  # a timer
        (SignalRecord(signal.SIGABRT, 0, 77), False),  # another signal has ended the process
        (SignalRecord(0, 0, 0), False),
    ],
)
def test_record_says_sent_for_a_signal_of_another_process_alone(record: SignalRecord, is_sent: bool) -> None:
    word = record.number | (record.code & 0xFFFFFF) << 8 | record.sender << 32
    assert SignalRecord.of(word) == record
    assert ProcessEnd(DeathCause("killed by SIGSEGV")).with_record(record, 4711).is_sent == is_sent
