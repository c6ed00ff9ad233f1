"""The way of a death to the clients of vLLM: which process died, and how, in the exception, the log and each answer.

queue.py           ends each wait with ProcessDied, whichever process of the executor has died
the executor       calls its failure callback at a death in the group of its queues, and before it waits for its other
                   workers to end. vLLM sees a death when the kernel has freed the memory of the process
each process       writes the death that it sees into the board of its server; the first line is the cause of all others
the API servers    put the first line into each EngineDeadError, and so into their answers
the launcher       closes the port of several API servers at the first death, instead of with its own end
first_process.py   ends all processes of a server when the first process was killed
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from threading import Thread
from typing import IO, Any

from penstock import EndGroup
from penstock.environment import VLLM_DEATHS
from penstock.errors import DeathCause, PeerDied
from penstock.integrations.vllm import first_process
from penstock.integrations.vllm.left_files import remove_left_files
from penstock.integrations.vllm.settings import LOGGER

RANK = re.compile(r"VllmWorker-(\d+)")  # vLLM's name of a worker's process
API_SERVER = "ApiServer_"  # begins vLLM's name of one of several API servers
BOARD = "penstock vllm deaths"  # begins the name of the file
REAPED_S = 0.2  # from the end of a process until its exit code is known
REAP_POLL_S = 0.001  # of a thread, while another thread reaps the process
CAUSE_S = 0.3  # from the close of an end, or of the board, by another process until the death is known here
SHUTDOWN_POLL_S = 5.0  # of a thread that waits for a death

# Boards of servers with engine cores that this process has started, by vLLM's manager of the cores
_boards: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_process_boards: list[str] = []  # the board that this process had before it started a server


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


# ── the board: a file that the first process of the server holds, for each server. A board is given as PATH:TOKEN ──
def open_board() -> None:
    """Makes the board, unless this process has the board of the process that has started it.

    vLLM starts the processes of a server by `multiprocessing`. A program that starts a server otherwise passes on the
    environment, too, but the server is none of its processes.
    """
    if multiprocessing.parent_process() is None or not has_board():
        create_board()
        remove_left_files()
        atexit.register(remove_left_files)


def create_board() -> str:
    """Creates a board. A later board may have the same descriptor number, and has another token."""
    token = os.urandom(8).hex()
    descriptor = os.memfd_create(f"{BOARD} {token}")
    os.environ[VLLM_DEATHS.name] = f"/proc/{os.getpid()}/fd/{descriptor}:{token}"
    return VLLM_DEATHS.read()


@contextmanager
def opened(board: str) -> Iterator[IO[bytes]]:
    """Opens a board to read and to append.

    Raises:
        FileNotFoundError: the board is closed.
    """
    path, _, token = board.rpartition(":")
    descriptor = os.open(path, os.O_PATH)  # without an effect on a file that is no board
    try:
        link = f"/proc/self/fd/{descriptor}"
        if os.readlink(link) != f"/memfd:{BOARD} {token} (deleted)":
            raise FileNotFoundError(f"{path} is not the board {token}")
        with open(link, "a+b", buffering=0) as file:
            file.seek(0)
            yield file
    finally:
        os.close(descriptor)


def begin_server(manager: Any) -> None:
    """Creates the board of a server. The manager is about to start its engine cores.

    A process may run several servers: a death in a server is not the cause of a death in another server.
    """
    if VLLM_DEATHS.read() not in _boards.values():
        _process_boards[:] = [VLLM_DEATHS.read()]
    board = _boards[manager] = create_board()
    ending = weakref.finalize(manager, end_server, board, os.getpid())
    ending.atexit = False  # processes of the server may look at the board until this process has ended


def end_server(board: str, pid: int) -> None:
    """Closes the board of a server, unless this process is a fork, which may be a process of that server."""
    if pid == os.getpid():
        os.close(int(os.path.basename(board.partition(":")[0])))
        if VLLM_DEATHS.read() == board:
            os.environ[VLLM_DEATHS.name] = [*_process_boards, *_boards.values()][-1]


def board_of(manager: Any) -> str:
    """Returns the server's board. An API server of several has no manager of engine cores."""
    return VLLM_DEATHS.read() if manager is None else _boards.get(manager) or VLLM_DEATHS.read()


def causes() -> str:
    """Returns the first death of each server of this process: an error of vLLM does not name the server that failed."""
    boards = list(_boards.values()) or [VLLM_DEATHS.read()]
    return "; ".join(filter(None, map(first_death, boards)))


def has_board() -> bool:
    """Returns whether the variable names a board."""
    with suppress(OSError), opened(VLLM_DEATHS.read()):
        return True
    return False


def first_death(board: str | None = None) -> str:
    """Returns the text of the first death on the board; empty: none is known. The board ends with the first process."""
    with suppress(OSError), opened(board or VLLM_DEATHS.read()) as file:
        return file.readline().decode().rstrip()
    return first_process.ended_parent(CAUSE_S)


def note(death: ProcessDied, board: str | None = None) -> ProcessDied:
    """Logs a death, unless it is on the board, and writes it there."""
    line = f"{death}\n".encode()
    with suppress(OSError), opened(board or VLLM_DEATHS.read()) as file:
        if line in file.readlines():
            return death
        file.write(line)
    LOGGER.error("%s", death)
    return death


def process_died(death: PeerDied) -> ProcessDied:
    """Returns the exception that ends a wait of a queue."""
    return note(ProcessDied.of(death.name, death.pid, death.cause))


def note_failed(processes: Sequence[Any], board: str | None = None) -> ProcessDied | None:
    """Notes the first of the processes of `multiprocessing` that has ended with an error; None: none has."""
    by_sentinel = {process.sentinel: process for process in processes}
    for sentinel in wait(list(by_sentinel), timeout=0):
        process = by_sentinel[sentinel]
        if exit_code := exit_code_of(process):
            return note(ProcessDied.of(process.name, process.pid, DeathCause.of_exit_code(exit_code)), board)
    return None


def exit_code_of(process: Any) -> int | None:
    """Returns the exit code of a process that has ended. `exitcode` is None while another thread reaps the process."""
    deadline = time.monotonic() + REAPED_S
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(REAP_POLL_S)
    exit_code: int | None = process.exitcode
    return exit_code


def death_behind(group: EndGroup, timeout: float) -> ProcessDied | None:
    """Returns the death for which another process has closed its ends: a survivor may know of a death first."""
    try:
        group.wait(timeout)
    except PeerDied as death:
        return process_died(death)
    return None


# ── in vLLM's classes ──
def before(cls: type, name: str) -> Callable[[Callable[..., None]], None]:
    """Runs the decorated step before the method of vLLM's class, with the same arguments."""
    original = getattr(cls, name)

    def put(step: Callable[..., None]) -> None:
        @functools.wraps(original)
        def method(*arguments: Any, **keywords: Any) -> Any:
            step(*arguments, **keywords)
            return original(*arguments, **keywords)

        setattr(cls, name, method)

    return put


def replace() -> None:
    """Puts the steps into vLLM's classes."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if hasattr(EngineDeadError.__init__, "__wrapped__"):
        return  # vLLM loads its plugins more than once
    open_board()
    replace_in_executor()
    replace_in_servers()
    create = EngineDeadError.__init__

    @functools.wraps(create)
    def with_cause(self: EngineDeadError, *arguments: Any, **keywords: Any) -> None:
        create(self, *arguments, **keywords)
        if cause := causes():
            add_cause(self, cause)

    EngineDeadError.__init__ = with_cause


def add_cause(error: Any, cause: str) -> None:
    """Adds the cause to the text of the error, and to the text for clients, which vLLM has apart since 0.33."""
    error.args = (f"{error.args[0]} {cause}", *error.args[1:])
    if hasattr(error, "CLIENT_MESSAGE"):
        error.CLIENT_MESSAGE = f"{error.CLIENT_MESSAGE} {cause}"


def replace_in_executor() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    @before(MultiprocExecutor, "shutdown")
    def call_back(executor: Any) -> None:
        """Its monitor has seen a worker end. The engine's requests need not wait until the other workers have ended."""
        callback = getattr(executor, "failure_callback", None)
        if getattr(executor, "is_failed", False) and callback is not None:
            executor.failure_callback = None
            note_failed([worker.proc for worker in executor.workers])
            callback()

    @before(MultiprocExecutor, "register_failure_callback")
    def watch(executor: Any, callback: Callable[[], None]) -> None:
        """An idle engine waits for no reply."""
        group = getattr(executor.rpc_broadcast_mq, "end_group", None)
        if group is not None:
            arguments = executor, group, callback
            Thread(target=await_death, args=arguments, name="PenstockDeaths", daemon=True).start()

    @before(MultiprocExecutor, "collective_rpc")
    def require_workers(executor: Any, *_: Any, **__: Any) -> None:
        """Its monitor was first: vLLM's own error has no cause."""
        if executor.is_failed and (death := death_of_worker(executor)):
            raise death


def death_of_worker(executor: Any) -> ProcessDied | None:
    group = getattr(executor.rpc_broadcast_mq, "end_group", None)
    death = None if group is None else death_behind(group, CAUSE_S)
    return death or note_failed([worker.proc for worker in executor.workers])


def await_death(executor: Any, group: EndGroup, callback: Callable[[], None]) -> None:
    """Calls the failure callback at the first death in the group of the executor's queues. vLLM's monitor may call it,
    too: a second call says the same."""
    while not getattr(executor, "shutting_down", False):
        try:
            group.wait(SHUTDOWN_POLL_S)
        except PeerDied as death:
            if not getattr(executor, "shutting_down", False):
                executor.failure_callback = None
                process_died(death)
                callback()
            return


def replace_in_servers() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.utils import APIServerProcessManager

    first_process.replace_coordinator(DPCoordinatorProc)

    @before(EngineCoreProc, "__init__")
    def drop_port(*_: Any, **__: Any) -> None:
        first_process.drop_port()

    def end_core_with_server(core: Any) -> None:
        first_process.end_with_parent(lambda: first_process.leave_requests(core))

    # A core that is spawned loads its plugins within __init__.
    for cls in (EngineCoreProc, DPEngineCoreProc):
        before(cls, "run_busy_loop")(end_core_with_server)

    @before(AsyncLLM, "__init__")
    def end_api_server_with_server(*_: Any, **__: Any) -> None:
        if multiprocessing.current_process().name.startswith(API_SERVER):
            ports: list[socket.socket] = []
            first_process.end_with_parent(lambda: first_process.refuse(ports))

            @before(importlib.import_module("uvicorn").Server, "serve")
            def note_ports(_: Any, sockets: list[socket.socket] | None = None) -> None:
                ports.extend(sockets or ())

    @before(CoreEngineProcManager, "__init__")
    def begin(manager: Any, *_: Any, **__: Any) -> None:
        begin_server(manager)

    @before(CoreEngineProcManager, "shutdown")
    def note_core(manager: Any, timeout: float | None = None) -> None:
        note_failed(manager.processes, board_of(manager))

    @before(APIServerProcessManager, "shutdown")
    def refuse_connections(manager: Any, timeout: float | None = None) -> None:
        """The server ends in seconds. Until then no process accepts, and new connections would wait in the backlog."""
        note_failed(manager.processes)
        if first_death():
            first_process.refuse([manager.sock])

    @before(AsyncLLM, "shutdown")
    def answer_open_requests(llm: Any, timeout: float | None = None) -> None:
        """An API server that ends for another process's death would leave its clients without an answer."""
        client = getattr(llm, "engine_core", None)
        if client is not None and first_death(board_of(client.resources.engine_manager)):
            run_in_loop(llm.output_handler, lambda: llm.output_processor.propagate_error(EngineDeadError()))


def run_in_loop(task: Any, call: Callable[[], None]) -> None:
    """Calls in the loop of the task: vLLM shuts an engine client down in another thread. None: no loop has begun."""
    if task is not None:
        with suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(call)
