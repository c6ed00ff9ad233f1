"""The preloaded library (interpose.c): built once, and spoken to from within the process that it is loaded into."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec

SOURCE = Path(__file__).with_name("interpose.c")
CORE, PYTHON = 0, 1  # the caller; interpose.c

# What each page of the manual (section 2) names, and EPERM or ENOSYS where a sandbox is known to answer that. Not ESRCH
# of pidfd_open, nor ENOENT of stat: by these the kernel says that something is gone, and it does not say so of what is
# there.
ERRORS: dict[str, str] = {
    "pidfd_open": "EINVAL EMFILE ENFILE ENODEV ENOMEM EPERM ENOSYS",
    "openat": "EACCES EBUSY EINTR EINVAL ELOOP EMFILE ENFILE ENOENT ENOMEM ENXIO EOVERFLOW EPERM EAGAIN",
    "read": "EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR",
    "write": "EAGAIN EBADF EFAULT EINTR EINVAL EIO EPERM ENOSPC EPIPE",
    "close": "EINTR EIO ENOSPC EDQUOT",
    "mmap": "EACCES EAGAIN EBADF EINVAL ENFILE ENODEV ENOMEM EOVERFLOW EPERM",
    "ftruncate": "EACCES EBADF EFBIG EINTR EINVAL EIO EPERM ETXTBSY",
    "fallocate": "EBADF EFBIG EINTR EINVAL EIO ENODEV ENOSPC ENOSYS EOPNOTSUPP EPERM ETXTBSY",
    "fchmod": "EBADF EIO EPERM EROFS",
    "fcntl": "EACCES EAGAIN EBADF EBUSY EINTR EINVAL EMFILE EPERM",
    "futex_wait": "EACCES EAGAIN EFAULT EINTR EINVAL ENOSYS ETIMEDOUT",
    "futex_wake": "EACCES EFAULT EINVAL ENOSYS",
    "epoll_create1": "EINVAL EMFILE ENFILE ENOMEM",
    "epoll_ctl": "EBADF EINVAL ELOOP ENOMEM ENOSPC EPERM",
    "epoll_wait": "EBADF EFAULT EINTR EINVAL",
    "pipe2": "EFAULT EINVAL EMFILE ENFILE",
    "dup": "EBADF EBUSY EINTR EMFILE",
    "clone3": "EAGAIN EINVAL EPERM",
    "memfd_create": "EFAULT EINVAL EMFILE ENFILE ENOMEM EPERM",
    "eventfd": "EINVAL EMFILE ENFILE ENODEV ENOMEM",
    "fstat": "EBADF EFAULT ENOMEM EOVERFLOW",
    "stat": "EACCES EFAULT ELOOP ENOMEM ENOTDIR EOVERFLOW",
    "getrandom": "EAGAIN EFAULT EINTR EINVAL ENOSYS",
    "madvise": "EACCES EAGAIN EBADF EBUSY EFAULT EINVAL EIO ENOMEM EPERM",
    "mbind": "EFAULT EINVAL EIO ENOMEM EPERM",
    "poll": "EFAULT EINTR EINVAL ENOMEM",
    "waitid": "EAGAIN ECHILD EINTR EINVAL ESRCH",
    "ioctl": "EBADF EFAULT EINVAL ENOTTY",
    "timerfd": "ECANCELED EINVAL EMFILE ENFILE ENODEV ENOMEM EPERM",
    "set_robust_list": "EINVAL EPERM ENOSYS",
    "futex_waitv": "EAGAIN EFAULT EINTR EINVAL ENOMEM ENOSYS ETIMEDOUT",
}
# asyncio's own waiting is not ours: it survives a signal, and nothing else.
PYTHON_ERRORS = {name: ERRORS[name] for name in ("openat", "read", "fcntl", "epoll_ctl", "fstat", "stat", "ioctl")}
PYTHON_ERRORS["epoll_wait"] = "EINTR"


class Fault(msgspec.Struct, frozen=True):
    """These calls fail with this errno: `times` of them, from the `number`th of their kind on."""

    kind: str
    caller: int
    number: int
    error: str
    times: int = 1


def errors_of(kind: str, caller: int) -> list[str]:
    return (ERRORS if caller == CORE else PYTHON_ERRORS).get(kind, "").split()


def build(folder: Path) -> Path:
    """The library, compiled by the compiler that compiles the core."""
    target = folder / "interpose.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, "-x", "c", "-O2", "-fPIC", "-shared", "-o", target, SOURCE, "-ldl"], check=True)
    return target


def address_in(library: str) -> int:
    """Any address at which that library's text is mapped into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if library in line and " r-xp " in line:
            return int(line.split("-")[0], 16)
    sys.exit(f"{library} is not loaded")


class Interposer:
    """The library, in a process that was started with it."""

    def __init__(self) -> None:
        self._native = ctypes.PyDLL(os.environ["LD_PRELOAD"])  # with the interpreter's lock: it takes no time
        self._native.faults_name.restype = ctypes.c_char_p
        self._native.faults_arm.argtypes = (
            [ctypes.c_void_p] * 2 + [ctypes.c_int] * 2 + [ctypes.c_long] * 2 + [ctypes.c_int]
        )
        self._native.faults_count.restype = self._native.faults_fired.restype = ctypes.c_long
        self.kinds: list[str] = []
        while name := self._native.faults_name(len(self.kinds)):
            self.kinds.append(name.decode())
        self._libraries = address_in("/_native."), address_in("libstdc++")

    def arm(self, fault: Fault | None) -> None:
        """Counts from here on, and lets the calls of this fault fail."""
        if fault is None:
            return self._native.faults_arm(*self._libraries, -1, 0, 0, 0, 0)
        number = getattr(errno, fault.error)
        self._native.faults_arm(
            *self._libraries, self.kinds.index(fault.kind), fault.caller, fault.number, fault.times, number
        )

    def exempt(self, is_exempt: bool) -> None:
        """What this thread calls from here on is the test's: not counted, and never failing."""
        self._native.faults_exempt(is_exempt)

    def lift(self, is_lifted: bool) -> None:
        """Whether nothing fails any longer, also in processes that were forked from this one."""
        self._native.faults_lift(is_lifted)

    def stop(self) -> None:
        """Ends the counting."""
        self._native.faults_stop()

    def counts(self) -> dict[tuple[str, int], int]:
        """How many calls of each kind there were until now, of the core's and of Python's."""
        counts = {
            (name, caller): self._native.faults_count(index, caller)
            for index, name in enumerate(self.kinds)
            for caller in (CORE, PYTHON)
        }
        return {key: count for key, count in counts.items() if count}

    def fired(self) -> int:
        """How many calls have failed by this."""
        count: int = self._native.faults_fired()
        return count
