"""Reads the Python stack of a process by py-spy, or by a signal (`stack_dump`) where py-spy is not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from penstock import stack_dump
from penstock.tools.format import printable
from penstock.tools.inspect.processes import process_of
from penstock.tools.inspect.segments import Json

TIMEOUT_S = 5.0  # of py-spy, which stops the process while it reads
SIGNAL_TIMEOUT_S = 0.5
QUIET_S = 0.02  # without growth: faulthandler has written all
POLL_S = 0.005
MAX_NBYTES = 1 << 20
MAX_STACKS = 16
BAD = ("deadlock", "stuck", "warning")
# Calls of torch.distributed, and of groups of processes in vLLM.
COLLECTIVES = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather monitored_barrier recv reduce reduce_scatter reduce_scatter_tensor scatter "
    "send".split()
)
PY_SPY_THREAD = re.compile(r'Thread (\d+) .*?(?:: "(.*)")?$')
PY_SPY_FRAME = re.compile(r"    (.*) \((.*):(\d+)\)$")
FAULTHANDLER_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class PythonStack:
    """The stack of a process's main thread, the innermost frame first; without frames there is a reason."""

    pid: int
    frames: tuple[Frame, ...] = ()
    reason: str = ""

    @property
    def collective(self) -> Frame | None:
        """The collective that the thread is in."""
        return next((frame for frame in self.frames if is_collective(frame)), None)


def is_collective(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2] in COLLECTIVES and "distributed" in frame.file


def add_stacks(snapshot: Json) -> None:
    """Adds the stacks of blocking processes, in the order of the verdict."""
    bad = [entry for entry in snapshot["verdict"] if entry["level"] in BAD and entry["kind"] == "wait"]
    pids = {pid: None for entry in bad for pid in entry["blockers"] or entry["pids"] if pid > 0}
    names = {process["pid"]: process["peers"] for process in snapshot["processes"]}
    snapshot["stacks"] = [
        {
            "pid": pid,
            "name": next(iter(names.get(pid, ())), f"pid {pid}"),
            "frames": list(map(str, stack.frames)),
            "collective": None if stack.collective is None else str(stack.collective),
            "reason": stack.reason,
        }
        for pid in list(pids)[:MAX_STACKS]
        for stack in (read_stack(pid),)
    ]


def read_stack(pid: int) -> PythonStack:
    """Returns the stack of the main thread. Reading the stack of a stopped process needs py-spy."""
    program = shutil.which("py-spy")
    if program is not None:
        done = run_py_spy(program, pid)
        if done is not None and done.returncode == 0:
            return PythonStack(pid, tuple(frames_of_py_spy(done.stdout)))
    process = process_of(pid)
    if process is not None and process.state in ("T", "t"):
        return PythonStack(pid, reason="the process is stopped; py-spy reads such a stack, if it is installed")
    number = descriptor_of(pid)
    if number is None:
        why = "py-spy is not installed" if program is None else "py-spy cannot read it"
        return PythonStack(pid, reason=f"{why}, and the process has not registered for the signal")
    text = text_by_signal(pid, number)
    if not text:
        return PythonStack(pid, reason=f"no answer to the signal within {SIGNAL_TIMEOUT_S} s")
    return PythonStack(pid, tuple(frames_of_faulthandler(text)))


def run_py_spy(program: str, pid: int) -> subprocess.CompletedProcess[str] | None:
    command = [program, "dump", "--pid", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def frames_of_py_spy(text: str) -> Iterator[Frame]:
    """Yields the frames of py-spy's MainThread, or else of the first thread."""
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := PY_SPY_THREAD.match(line):
            frames = threads.setdefault(match[2] or match[1], [])
        elif match := PY_SPY_FRAME.match(line):
            frames.append(Frame(printable(match[1]), printable(match[2]), match[3]))
    first = next(iter(threads.values()), [])
    yield from threads.get("MainThread", first)


# ── by a signal ──
def descriptor_of(pid: int) -> int | None:
    """Returns the descriptor into which the process writes its stacks; None: the signal would end the process."""
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{stack_dump.NAME} "):
                return int(number) if handles_signal(pid) else None
    except (OSError, ValueError):
        pass
    return None


def handles_signal(pid: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        caught = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (stack_dump.SIGNAL - 1) & 1)


def text_by_signal(pid: int, number: int) -> str:
    """Returns the text that `faulthandler` writes; empty: none within the time limit."""
    text, deadline, grown_at = b"", time.monotonic() + SIGNAL_TIMEOUT_S, 0.0
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        os.truncate(file, 0)
        os.kill(pid, stack_dump.SIGNAL)
        while (now := time.monotonic()) < deadline and not (text and now > grown_at + QUIET_S):
            more = os.pread(file, MAX_NBYTES, 0)
            if len(more) > len(text):
                text, grown_at = more, now
            time.sleep(POLL_S)
    except OSError:
        pass  # the process has ended
    finally:
        os.close(file)
    return text.decode(errors="replace")


def frames_of_faulthandler(text: str) -> Iterator[Frame]:
    """Yields the frames of the thread that was created first: `faulthandler` writes it last."""
    for line in text.rstrip().rpartition("\n\n")[2].splitlines():
        if match := FAULTHANDLER_FRAME.match(line):
            yield Frame(printable(match[3]), printable(match[1]), match[2])
