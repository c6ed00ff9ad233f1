"""The signals of `penstock serve`, from the first statement of the command until the process has ended.

The handlers of an event loop begin too late and end too early. Imports and checks run for seconds before the loop, and
a loop that removes a handler restores the default disposition, by which SIGHUP and SIGTERM kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator

RECEIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT_S = 1.0  # after SIGTERM or SIGINT; a repetition before then is the same request, which programs forward twice

Deliver = Callable[[int, float], object]  # gets the number of a signal, and the time of its receipt (time.monotonic)


class CommandSignals:
    """Receives the signals of this process from its construction on."""

    def __init__(self) -> None:
        # nohup has SIGHUP ignored: the end of the terminal does not concern such a command.
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._had_terminal = not is_ignored and terminal_error() is None
        self.has_early_hangup = False
        self.deliver: Deliver = self._handle_early
        self._previous = {number: signal.signal(number, self._receive) for number in RECEIVED}

    def _receive(self, number: int, _: object) -> None:
        """SIGHUP from the closing of the terminal counts as SIGTERM."""
        if number == signal.SIGHUP and self._had_terminal and terminal_error() == errno.ENXIO:
            number = signal.SIGTERM
        self.deliver(number, time.monotonic())

    def _handle_early(self, number: int, _: float) -> None:
        """Ends the process: nothing has been started that needs an orderly end. A planned migration is not needed, as
        all processes of the engine are started after this signal."""
        if number == signal.SIGHUP:
            self.has_early_hangup = True
            return
        with contextlib.suppress(OSError):
            text = f"penstock serve: {signal.Signals(number).name} before the engine was started\n"
            os.write(2, text.encode())
        os._exit(0)

    def ignore(self) -> None:
        """Ignores the signals from now on. The interpreter restores the default disposition of a signal with a handler
        at its end, and leaves an ignored signal ignored."""
        for number in RECEIVED:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


_of_command: list[CommandSignals] = []  # empty: this process is no command that receives signals


def receive() -> None:
    """Receives signals until this process has ended. For the first statement of a command."""
    _of_command[:] = [CommandSignals()]


@contextlib.contextmanager
def delivered_to(deliver: Deliver) -> Iterator[CommandSignals]:
    """Delivers signals inside the block; `deliver` runs in the signal handler. After the block, a command ignores
    signals until it has ended, and another process handles them as before the block."""
    signals = _of_command[0] if _of_command else CommandSignals()
    signals.deliver = deliver
    try:
        yield signals
    finally:
        if _of_command:
            signals.ignore()
        else:
            signals.restore()


def terminal_error() -> int | None:
    """Returns the errno of opening this process's terminal; None: it has one."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return None
