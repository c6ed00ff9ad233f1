"""Why a group was lost: which ends of processes are a cause, and which of them count against requests."""

import signal
from pathlib import Path

import pytest

from penstock.engine.cluster.process_end import ProcessEnd
from penstock.engine.cluster.verdict_board import Cause
from penstock.engine.launcher.group_loss import GroupLoss
from penstock.engine.launcher.oom_kills import count_oom_kills
from penstock.errors import DeathCause


def ended(text: str, cause: Cause | None = None) -> ProcessEnd:
    return ProcessEnd(DeathCause.of_exit_code(1), cause=cause, last_words=text)


def killed_by(number: signal.Signals) -> ProcessEnd:
    return ProcessEnd(DeathCause.of_exit_code(-number))


PEER = ended("PeerDied: worker 0.0 #1 died")
KILLED = killed_by(signal.SIGKILL)
RAISED = ended("ArithmeticError: the device has caught fire")
TIMED_OUT = ended("Timeout: no StepDone for step 3 within 30 s")


def sent(number: signal.Signals) -> ProcessEnd:
    return killed_by(number)._replace(is_sent=True)


def loss(*, ooms: int | None = 0) -> GroupLoss:
    counts = iter([None if ooms is None else 7])
    return GroupLoss(lambda: next(counts, None if ooms is None else 7 + ooms))


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (KILLED, Cause.OUTSIDE),
        (killed_by(signal.SIGTERM), Cause.OUTSIDE),
        (killed_by(signal.SIGHUP), Cause.OUTSIDE),
        (killed_by(signal.SIGINT), Cause.OUTSIDE),
        (RAISED, Cause.ITSELF),
        (TIMED_OUT, Cause.ITSELF),
        (ended("exited with status 0"), Cause.ITSELF),
        *[
            (killed_by(number), Cause.ITSELF)
            for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
        ],
        *[(sent(number), Cause.OUTSIDE) for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1)],
        (PEER, None),
    ],
)
def test_cause_is_known_with_the_first_end_that_is_one(end: ProcessEnd, cause: Cause | None) -> None:
    group_loss = loss()
    group_loss.begin(1, end, [], False)
    assert group_loss.cause == cause
    group_loss.add(2, RAISED if cause is Cause.OUTSIDE else KILLED)
    assert group_loss.cause == cause
    assert group_loss.close() == (cause or Cause.OUTSIDE)


def test_kill_by_the_launcher_is_no_cause_but_the_first_end_is() -> None:
    group_loss = loss()
    group_loss.begin(1, PEER, [3], False)
    group_loss.add(2, KILLED)  # by the launcher, which has seen the first end
    assert group_loss.cause is None
    group_loss.add(3, killed_by(signal.SIGSEGV))
    assert group_loss.cause == Cause.ITSELF


def test_collective_error_is_no_failure_when_another_worker_was_killed() -> None:
    group_loss = loss()
    group_loss.begin(1, ended("RuntimeError: connection closed by peer"), [2], False)
    assert group_loss.cause is None, "the other worker was ending before the launcher killed anything"
    group_loss.add(3, KILLED)
    assert group_loss.cause is None
    group_loss.add(2, KILLED)
    assert group_loss.cause == Cause.OUTSIDE
    group_loss = loss()
    group_loss.begin(1, ended("RuntimeError: connection closed by peer"), [2], False)
    group_loss.add(2, RAISED)
    assert group_loss.cause == Cause.ITSELF


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (Cause.OUTSIDE, Cause.OUTSIDE),
        (Cause.PLANNED, Cause.PLANNED),
        (Cause.ITSELF, Cause.ITSELF),
        (None, Cause.ITSELF),
    ],
)
def test_error_of_a_collective_waits_for_what_the_other_node_reports(report: Cause | None, cause: Cause) -> None:
    group_loss = loss()
    group_loss.begin(1, ended("RuntimeError: connection closed by peer"), [2], False)
    assert group_loss.cause is None
    group_loss.add(2, PEER if report is None else ended("group 0 of node 1 has ended", cause=report))
    assert group_loss.cause == cause


def test_failure_of_another_node_waits_for_a_worker_killed_here() -> None:
    group_loss = loss()
    group_loss.begin(1, ended("group 0 of node 1 has ended", cause=Cause.ITSELF), [2], False)
    assert group_loss.cause is None
    group_loss.add(2, KILLED)
    assert group_loss.cause == Cause.OUTSIDE


def test_core_that_waited_for_a_stopped_worker_has_not_failed() -> None:
    group_loss = loss()
    group_loss.begin(1, TIMED_OUT, [], True)
    assert group_loss.cause == Cause.OUTSIDE


def test_kill_for_want_of_memory_is_a_failure() -> None:
    group_loss = loss(ooms=1)
    group_loss.begin(1, KILLED, [], False)
    assert group_loss.cause == Cause.ITSELF
    group_loss = loss(ooms=1)
    group_loss.begin(1, PEER, [], False)
    group_loss.add(2, KILLED)
    assert group_loss.close() == Cause.ITSELF
    group_loss = loss(ooms=None)
    group_loss.begin(1, KILLED, [], False)
    assert group_loss.cause == Cause.OUTSIDE and not group_loss.is_oom_counted


def test_kill_for_want_of_memory_long_ago_is_forgotten() -> None:
    kills = [7]
    group_loss = GroupLoss(lambda: kills[0])
    kills[0] += 1
    group_loss.forget_oom_kills()
    assert group_loss.is_maybe_out_of_memory, "it was a moment ago"
    group_loss.forget_oom_kills()
    assert not group_loss.is_maybe_out_of_memory
    group_loss.begin(1, KILLED, [], False)
    assert group_loss.cause == Cause.OUTSIDE and group_loss.is_oom_counted


def test_planned_restart_stays_planned_whatever_its_processes_do() -> None:
    group_loss = loss()
    group_loss.plan()
    group_loss.add(1, RAISED)
    assert group_loss.close() == Cause.PLANNED


# ── the kernel's counter ──
@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/a/b", "a/b/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/a/b", "memory.events", "oom_kill 2\n"),
        ("4:cpu,memory:/a", "a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_oom_kills_are_read_from_both_versions_of_control_groups(
    tmp_path: Path, line: str, file: str, text: str
) -> None:
    cgroup, none = tmp_path / "cgroup", tmp_path / "none"
    cgroup.write_text(f"9:pids:/a\n{line}\n")
    root = tmp_path / "root"
    assert count_oom_kills(cgroup, (root,), none) is None
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text(text)
    assert count_oom_kills(cgroup, (root,), none) == 2


def test_oom_kills_are_unknown_where_nothing_can_be_read(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert count_oom_kills(none, (tmp_path,), none) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.events").write_text("oom 1\n")
    assert count_oom_kills(tmp_path / "cgroup", (tmp_path,), none) is None


def test_oom_kills_of_the_machine_count_for_a_group_without_a_counter(tmp_path: Path) -> None:
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 7\noom_kill 3\n")
    assert count_oom_kills(tmp_path / "none", (tmp_path,), machine) == 3


@pytest.mark.parametrize("cause", list(Cause))
def test_cause_of_a_group_on_another_node_is_what_its_bridge_says(cause: Cause) -> None:
    group_loss = loss()
    group_loss.begin(1, ended("the link to node 1 has ended", cause=cause), [], False)
    assert group_loss.cause == group_loss.close() == cause
