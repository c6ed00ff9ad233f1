"""After which end of a group the launcher gives the memory of its KV cache back, and with which reason."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock import DeathCause
from penstock.engine.cluster.kept_memory import KVFiles
from penstock.engine.cluster.process_end import ProcessEnd
from penstock.engine.cluster.status_board import KV_DISCARD_REASONS, StatusBoard
from penstock.engine.launcher.group_loss import GroupLoss
from penstock.engine.launcher.process_group import ProcessGroup

PID = 7
KILLED, FAILED = DeathCause.of_exit_code(-signal.SIGKILL), DeathCause.of_exit_code(1)
NBYTES = 100


class Group(ProcessGroup):
    """A group of the board and the files alone: no process of it runs."""

    def __init__(self, board: StatusBoard, files: KVFiles | None) -> None:
        cluster = SimpleNamespace(kv_files_of=lambda group: files)
        launcher = SimpleNamespace(cluster=cluster, board=board, is_stopping=False)
        super().__init__(launcher, 0, [("core", 0, lambda cluster, me: None)])  # type: ignore[arg-type]

    def discard_after(self, end: ProcessEnd | None, oom_kills: tuple[int | None, int | None] = (0, 0)) -> None:
        """`end`: of the first process; None: a planned restart. `oom_kills`: at the start, and later."""
        kills = iter((oom_kills[0], *[oom_kills[1]] * 9))
        self._loss = GroupLoss(lambda: next(kills))
        if end is None:
            self._is_planned = True
            self._loss.plan()
        else:
            self._note_fault(end)
            self._loss.begin(PID, end, [], False)
            self._loss.close()
        self._discard_kv()


@pytest.fixture
def files() -> Iterator[KVFiles]:
    files = KVFiles.create(0, 2)
    assert files is not None
    for file in (files.ledger, *files.pages):
        file.resize(NBYTES)
    yield files
    files.close()


def reason_and_sizes(files: KVFiles, end: ProcessEnd | None, *oom_kills: int | None) -> tuple[str, set[int]]:
    page = StatusBoard.create(1)
    board = StatusBoard(page, writable=True)
    group = Group(board, files)
    group.discard_after(end, oom_kills or (0, 0))  # type: ignore[arg-type]
    word = board.row(0)[StatusBoard.KV_DISCARD]
    board.close()
    reason = KV_DISCARD_REASONS[word - 1] if word else ""
    return reason, {file.nbytes for file in (files.ledger, *files.pages)}


@pytest.mark.parametrize(
    "end", [ProcessEnd(KILLED), ProcessEnd(DeathCause.of_exit_code(-signal.SIGTERM)), None], ids=str
)
def test_kv_cache_is_kept_after_a_kill_from_outside_and_as_planned(files: KVFiles, end: ProcessEnd | None) -> None:
    assert reason_and_sizes(files, end) == ("", {NBYTES})


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"])
@pytest.mark.parametrize("is_sent", [True, False])
def test_kv_cache_is_emptied_after_a_fault_signal_of_any_sender(files: KVFiles, number: str, is_sent: bool) -> None:
    end = ProcessEnd(DeathCause.of_exit_code(-signal.Signals[number]), is_sent=is_sent)
    assert reason_and_sizes(files, end) == ("failed", {0})


def test_kv_cache_is_emptied_after_a_failure(files: KVFiles) -> None:
    assert reason_and_sizes(files, ProcessEnd(FAILED, last_words="ArithmeticError: fire")) == ("failed", {0})


@pytest.mark.parametrize("oom_kills", [(0, 1), (0, None), (None, None)])
def test_kv_cache_is_emptied_where_memory_may_have_been_short(
    files: KVFiles, oom_kills: tuple[int | None, int | None]
) -> None:
    assert reason_and_sizes(files, ProcessEnd(KILLED), *oom_kills) == ("memory", {0})


def test_group_without_files_discards_nothing() -> None:
    page = StatusBoard.create(1)
    board = StatusBoard(page, writable=True)
    Group(board, None).discard_after(ProcessEnd(FAILED))
    assert board.row(0)[StatusBoard.KV_DISCARD] == 0
    board.close()
