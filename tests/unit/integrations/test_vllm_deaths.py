"""The board of deaths, and the wait for a death of a worker, while vLLM's engine waits for no reply."""

import asyncio
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock import EndGroup, Ring
from penstock.environment import VLLM_DEATHS
from penstock.errors import DeathCause, EndOfChannel
from penstock.integrations.vllm import deaths
from tests.conftest import spawn
from tests.support.loops import in_a_loop


def descriptor_of(board: str) -> int:
    return int(os.path.basename(board.partition(":")[0]))


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VLLM_DEATHS.name, "")
    deaths.create_board()
    boards = {VLLM_DEATHS.read()}
    yield
    boards.add(VLLM_DEATHS.read())
    for board in boards:
        os.close(descriptor_of(board))


DEATH = deaths.ProcessDied.of("VllmWorker-0", 4711, DeathCause.of_exit_code(-9))
OTHER = deaths.ProcessDied.of("EngineCore", 4712, DeathCause.of_exit_code(-9))


def reopen_board(replies: Ring[bytes]) -> None:
    """A process of a server: its parent has the board."""
    deaths.open_board()
    with replies.open_sender() as sender:
        sender.send(deaths.first_death().encode())


def test_board_is_that_of_the_server_in_its_processes() -> None:
    deaths.note(DEATH)
    replies = Ring[bytes]()
    with replies.open_receiver() as receiver, spawn(reopen_board, replies):
        assert receiver.receive(30) == str(DEATH).encode()


def test_board_is_new_for_a_server_that_a_shell_has_started() -> None:
    deaths.note(DEATH)
    deaths.open_board()
    assert not deaths.first_death()


def write_board(path: str) -> None:
    os.environ[VLLM_DEATHS.name] = path
    deaths.open_board()
    deaths.note(DEATH)


def test_board_is_new_where_the_variable_names_another_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("of another program")
    with spawn(write_board, str(path)) as process:
        process.join()
        assert process.exitcode == 0
    assert path.read_text() == "of another program"


def test_api_server_without_engine_cores_has_the_board_of_its_server() -> None:
    deaths.note(DEATH)
    assert deaths.first_death(deaths.board_of(None)) == str(DEATH)


class Manager:
    """Of the engine cores of a server."""


def test_second_server_of_a_process_keeps_the_deaths_of_the_first() -> None:
    first, second = Manager(), Manager()
    deaths.begin_server(first)
    board = VLLM_DEATHS.read()
    deaths.note(DEATH)
    deaths.begin_server(second)
    assert deaths.first_death(deaths.board_of(first)) == deaths.first_death(board) == str(DEATH)
    assert not deaths.first_death() and not deaths.first_death(deaths.board_of(second))
    assert deaths.causes() == str(DEATH)
    deaths.note(OTHER, deaths.board_of(second))
    assert deaths.causes() == f"{DEATH}; {OTHER}"
    del first
    assert deaths.causes() == str(OTHER)
    assert not deaths.first_death(board)


def test_late_death_of_a_server_is_not_written_to_the_next_board() -> None:
    manager = Manager()
    deaths.begin_server(manager)
    late = VLLM_DEATHS.read()
    del manager
    following = Manager()
    deaths.begin_server(following)
    assert descriptor_of(deaths.board_of(following)) == descriptor_of(late)
    deaths.note(DEATH, late)
    assert not deaths.first_death() and not deaths.first_death(late)


def test_variable_names_an_open_board_when_a_server_has_ended() -> None:
    before, first, second = VLLM_DEATHS.read(), Manager(), Manager()
    deaths.begin_server(first)
    deaths.begin_server(second)
    del second
    assert VLLM_DEATHS.read() == deaths.board_of(first)
    del first
    assert VLLM_DEATHS.read() == before
    deaths.note(DEATH)
    assert deaths.first_death() == str(DEATH)


def test_fork_that_collects_a_manager_keeps_the_board_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    deaths.begin_server(manager)
    board = VLLM_DEATHS.read()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: 1)
        del manager
    assert VLLM_DEATHS.read() == board
    deaths.note(DEATH)
    assert deaths.first_death() == str(DEATH)


def test_board_has_both_deaths_when_two_processes_write_at_once() -> None:
    with deaths.opened(VLLM_DEATHS.read()) as first, deaths.opened(VLLM_DEATHS.read()) as second:
        assert not first.read() and not second.read()
        first.write(f"{DEATH}\n".encode())
        second.write(b"died\n")
    assert deaths.first_death() == str(DEATH)


def test_death_is_not_written_to_a_file_in_the_place_of_a_board(tmp_path: Path) -> None:
    manager = Manager()
    deaths.begin_server(manager)
    path = tmp_path / "other"
    path.write_text("text")
    other = os.open(path, os.O_RDWR)
    try:
        os.dup2(other, descriptor_of(VLLM_DEATHS.read()))  # as if the number was used again
        deaths.note(DEATH)
        assert path.read_text() == "text" and deaths.first_death() == ""
    finally:
        os.close(other)


class Wait:
    """An executor with a count of its callbacks, and its thread in `await_death`."""

    def __init__(self) -> None:
        self.group, self.calls = EndGroup(), 0
        self.executor = SimpleNamespace(failure_callback=self.call, shutting_down=False)
        self.thread = threading.Thread(target=deaths.await_death, args=(self.executor, self.group, self.call))
        self.thread.start()

    def call(self) -> None:
        self.calls += 1


def reply(ring: Ring[bytes], name: str) -> None:
    with ring.open_sender(name=name) as sender:
        sender.send(b"attached")
        threading.Event().wait(60)


def test_await_death_calls_back_once_with_the_death_on_the_board() -> None:
    wait, replies = Wait(), Ring()
    receiver = replies.open_receiver(group=wait.group)
    with spawn(reply, replies, "VllmWorker-1") as worker:
        assert receiver.receive(10) == b"attached"
        pid = worker.pid
        assert pid is not None
        os.kill(pid, 9)
        wait.thread.join(10)
    assert wait.calls == 1 and wait.executor.failure_callback is None
    assert deaths.first_death() == f"VllmWorker-1 (rank 1, pid {pid}) died: killed by SIGKILL"


def test_await_death_ends_without_a_call_when_the_executor_has_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "SHUTDOWN_POLL_S", 0.01)
    wait = Wait()
    wait.executor.shutting_down = True
    wait.thread.join(10)
    assert not wait.thread.is_alive()
    assert wait.calls == 0 and not deaths.first_death()


def test_await_death_makes_no_call_while_the_executor_shuts_down() -> None:
    wait, replies = Wait(), Ring()
    receiver = replies.open_receiver(group=wait.group)
    with spawn(reply, replies, "VllmWorker-0") as worker:
        assert receiver.receive(10) == b"attached"
        wait.executor.shutting_down = True
        assert worker.pid is not None
        os.kill(worker.pid, 9)
        wait.thread.join(10)
    assert wait.calls == 0 and not deaths.first_death()


def close_queue_and_wait(replies: Ring[bytes], steps: Ring[bytes]) -> None:
    """A survivor closes a queue before the test process knows of the death."""
    with replies.open_sender(name="VllmWorker-0") as sender, steps.open_sender(name="VllmWorker-0"):
        sender.send(b"attached")
        sender.close()
        threading.Event().wait(60)


def test_death_behind_a_closed_end_is_the_first_of_the_group() -> None:
    group, replies, steps = EndGroup(), Ring[bytes](), Ring[bytes]()
    receiver, waiting = replies.open_receiver(group=group), steps.open_receiver(group=group)
    with spawn(close_queue_and_wait, replies, steps) as worker:
        assert receiver.receive(10) == b"attached"
        with pytest.raises(EndOfChannel):
            receiver.receive(10)
        assert deaths.death_behind(group, 0) is None
        pid = worker.pid
        assert pid is not None
        os.kill(pid, 9)
        death = deaths.death_behind(group, 10)
    assert death is not None and death.pid == pid and str(death) == deaths.first_death()
    waiting.close()


def test_process_that_another_thread_reaps_is_noted_with_its_exit_code() -> None:
    codes = iter([None, None, -9])
    read, write = os.pipe()
    os.close(write)  # readable, like the sentinel of an ended process
    reaped = type("Process", (), {"exitcode": property(lambda self: next(codes, -9)), "name": "VllmWorker-1"})()
    reaped.sentinel, reaped.pid = read, 4711
    assert str(deaths.note_failed([reaped])) == "VllmWorker-1 (rank 1, pid 4711) died: killed by SIGKILL"
    os.close(read)


def test_death_of_the_parent_is_known_without_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes the board: the thread that awaits the end may be late."""
    with subprocess.Popen(["true"]) as process:
        pass
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(name="MainProcess", pid=process.pid))
    text = f"MainProcess (pid {process.pid}), which started this process, has ended"
    assert deaths.first_death(f"/proc/{process.pid}/fd/3:token") == text


def test_closed_board_of_a_parent_that_lives_has_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "CAUSE_S", 0.0)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(name="MainProcess", pid=os.getpid()))
    assert not deaths.first_death(f"/proc/{os.getpid()}/fd/1000:token")


@in_a_loop
async def test_call_of_another_thread_runs_in_the_loop_of_the_task() -> None:
    threads: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.current_task()
    call = lambda: threads.set_result(threading.get_ident())  # noqa: E731
    await asyncio.to_thread(deaths.run_in_loop, task, call)
    assert await threads == threading.get_ident()


def test_call_into_a_loop_that_is_closed_has_no_effect() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    deaths.run_in_loop(None, pytest.fail)
    deaths.run_in_loop(SimpleNamespace(get_loop=lambda: loop), pytest.fail)


class EngineDeadError(Exception):
    """As in vLLM 0.33."""

    CLIENT_MESSAGE = "The server had an error."


def test_cause_is_in_the_text_for_clients_of_this_error_alone() -> None:
    error = EngineDeadError("The engine is dead.")
    deaths.add_cause(error, str(DEATH))
    assert str(error) == f"The engine is dead. {DEATH}"
    assert error.CLIENT_MESSAGE == f"The server had an error. {DEATH}"
    assert EngineDeadError.CLIENT_MESSAGE == "The server had an error."


def test_cause_is_added_to_an_error_without_a_text_for_clients() -> None:
    error = RuntimeError("The engine is dead.")
    deaths.add_cause(error, str(DEATH))
    assert str(error) == f"The engine is dead. {DEATH}" and not hasattr(error, "CLIENT_MESSAGE")
