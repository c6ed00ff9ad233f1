"""Python stacks on demand: at a signal of `penstock inspect --stacks` this process writes the stacks of its threads.

`faulthandler` writes without the interpreter's lock, so also while the process hangs. The file has no name. Its
descriptor tells an observer that the process handles the signal. The signal's default action would end the process.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

SIGNAL = signal.SIGRTMIN + 9
NAME = "penstock stacks"
_descriptors: list[int] = []


def register() -> None:
    """Lets observers read the stacks of this process and of processes that it forks; may be called again."""
    if _descriptors:
        return
    try:
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    except OSError:
        return  # no descriptor or memory is left: a process works without observers
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # an observer empties the file before each signal
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    _descriptors.append(descriptor)
