"""Reads single keys from the terminal without waiting for a line, and restores the terminal's mode."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """In the block, the terminal passes keys one by one and does not echo them. Ctrl-C works as before."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def is_enough(seconds: float) -> bool:
    """Waits up to `seconds`, and returns whether q was typed."""
    deadline = time.monotonic() + seconds
    while sys.stdin.isatty() and (left := deadline - time.monotonic()) > 0:
        if not select.select([sys.stdin], [], [], left)[0]:
            return False
        typed = os.read(sys.stdin.fileno(), 64)
        if not typed or b"q" in typed or b"Q" in typed:
            return True
    time.sleep(max(0.0, deadline - time.monotonic()))
    return False
