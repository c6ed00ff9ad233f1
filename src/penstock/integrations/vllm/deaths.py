"""The way of a death to the clients of vLLM: which process died, and how, in the exception, the log and each answer.

    queue.py        ends each wait with ProcessDied, whichever process of the executor has died
    the executor    calls its failure callback before it waits for its other workers to end, instead of after
    the engine core sends ENGINE_CORE_DEAD with the cause behind it
    the API server  puts the cause into each EngineDeadError, and so into its answers
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import DeathCause, PeerDied
from penstock.integrations.vllm.settings import LOGGER

DEAD = b"ENGINE_CORE_DEAD"
RANK = re.compile(r"VllmWorker-(\d+)")  # vLLM's name of a worker's process

_first_deaths: dict[int, str] = {}  # by pid of the process that learned of it: a fork inherits none
_listeners: list[Callable[[str], None]] = []  # of the first death


class ProcessDied(RuntimeError):
    """A process of vLLM has died: "VllmWorker-1 (rank 1, pid 4711) died: killed by SIGKILL"."""

    name: str
    pid: int
    rank: int | None  # of a worker
    cause: DeathCause

    @classmethod
    def of(cls, name: str, pid: int, cause: DeathCause) -> ProcessDied:
        match = RANK.fullmatch(name)
        rank = None if match is None else int(match[1])
        error = cls(f"{name} ({'' if rank is None else f'rank {rank}, '}pid {pid}) died: {cause}")
        error.name, error.pid, error.rank, error.cause = name, pid, rank, cause
        return error


def note(death: ProcessDied) -> ProcessDied:
    """Logs the first death that this process learns of, and keeps it for the clients: later deaths follow from it."""
    if os.getpid() not in _first_deaths:
        _first_deaths[os.getpid()] = str(death)
        LOGGER.error("%s", death)
        for listener in _listeners:
            listener(str(death))
    return death


def process_died(death: PeerDied) -> ProcessDied:
    """Returns the exception that ends a wait of a queue."""
    return note(ProcessDied.of(death.name, death.pid, death.cause))


class DeadMessage(bytes):
    """ENGINE_CORE_DEAD with a cause behind it: equal to each other one, and to vLLM's, with which vLLM compares it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes) and other.startswith(DEAD)

    __hash__ = bytes.__hash__


def note_failed(processes: Sequence[Any]) -> ProcessDied | None:
    """Notes the first of the processes of `multiprocessing` that has ended with an error; None: none has."""
    for process in processes:
        if process.exitcode:
            return note(ProcessDied.of(process.name, process.pid, DeathCause.of_exit_code(process.exitcode)))
    return None


def before(cls: type, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the decorated step before the method of vLLM's class, with the same arguments."""
    original = getattr(cls, name)

    def put(step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def method(*arguments: Any, **keywords: Any) -> Any:
            step(*arguments, **keywords)
            return original(*arguments, **keywords)

        setattr(cls, name, method)
        return step

    return put


def replace() -> None:
    """Puts the steps into vLLM's classes."""
    if _listeners:
        return  # vLLM loads its plugins more than once
    replace_in_engine()
    replace_in_clients()


def replace_in_engine() -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    def extend_message(death: str) -> None:
        if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "0":  # that frontend compares the whole message
            EngineCoreProc.ENGINE_CORE_DEAD = DeadMessage(DEAD + b": " + death.encode())

    _listeners.append(extend_message)

    @before(MultiprocExecutor, "shutdown")
    def call_back(executor: Any) -> None:
        """Its monitor has seen a worker end. The engine's requests need not wait until the other workers have ended."""
        callback = getattr(executor, "failure_callback", None)
        if getattr(executor, "is_failed", False) and callback is not None:
            executor.failure_callback = None
            note_failed([worker.proc for worker in executor.workers])
            callback()

    @before(MultiprocExecutor, "collective_rpc")
    def require_workers(executor: Any, *_: Any, **__: Any) -> None:
        """Its monitor was first: vLLM's own error has no cause."""
        if executor.is_failed and (death := note_failed([worker.proc for worker in executor.workers])):
            raise death

    @before(CoreEngineProcManager, "shutdown")
    def note_core(manager: Any, timeout: float | None = None) -> None:
        note_failed(manager.processes)


def replace_in_clients() -> None:
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.exceptions import EngineDeadError

    @before(BackgroundResources, "validate_alive")
    def receive_cause(resources: Any, frames: Sequence[Any]) -> None:
        if len(frames) != 1 or not (message := frames[0].buffer)[: len(DEAD)] == DEAD:
            return
        cause = bytes(message[len(DEAD) :]).decode().removeprefix(": ")
        if cause:
            _first_deaths.setdefault(os.getpid(), cause)
        resources.engine_dead = True
        raise EngineDeadError()

    create = EngineDeadError.__init__

    @functools.wraps(create)
    def with_cause(self: EngineDeadError, *arguments: Any, **keywords: Any) -> None:
        create(self, *arguments, **keywords)
        if cause := _first_deaths.get(os.getpid()):
            self.args = (f"{self.args[0]} {cause}", *self.args[1:])

    EngineDeadError.__init__ = with_cause
