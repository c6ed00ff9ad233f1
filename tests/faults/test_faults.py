"""Every system call fails once, with each errno that its page names, and nothing breaks that must hold."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiers
from tests.faults.fault_campaign import ROOT, Campaign, Case, run
from tests.faults.interposer import CORE, ERRORS, PYTHON, Fault, build

# What the core calls wherever it runs. A call that the table of errors lacks has to be looked up first.
MADE = set(
    "pidfd_open openat read write close mmap ftruncate fallocate fchmod fcntl futex_wait futex_wake epoll_create1 "
    "epoll_ctl epoll_wait pipe2 clone3 memfd_create fstat stat getrandom madvise mbind poll waitid".split()
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("interposer"))


@pytest.fixture
def campaign(library: Path) -> Iterator[Campaign]:
    with Campaign(library) as campaign:
        yield campaign


@pytest.mark.timeout(tiers.limit(300, soak=6 * 3600))
def test_every_invariant_holds_when_a_system_call_fails(library: Path, seed: int) -> None:
    tally = run(library, seed, tiers.FAULTS_CASES)
    print("\n".join(tally.lines()))
    assert not tally.broken, "\n".join(
        [*tally.lines(), "python -m tests.faults.fault_campaign --case NAME repeats one"]
    )
    assert tally.fired > tally.cases / 2, tally.lines()[0]
    assert len(tally.late) <= 2 + tally.cases / 500, tally.lines()


def test_the_scenes_make_every_call_that_the_core_makes(campaign: Campaign) -> None:
    campaign.count()
    calls = {kind for counts in campaign.counts.values() for kind, caller in counts if caller == CORE}
    assert MADE <= calls <= set(ERRORS)


def test_the_nth_call_of_a_kind_fails_and_no_other(library: Path) -> None:
    program = """
import os
from tests.faults.interposer import PYTHON, Fault, Interposer
import penstock
interposer = Interposer()
interposer.arm(Fault("openat", PYTHON, 2, "EMFILE"))
for _ in range(3):
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
        print("opened")
    except OSError as error:
        print(error.errno)
interposer.exempt(True)
os.close(os.open("/dev/null", os.O_RDONLY))
interposer.exempt(False)
print(interposer.fired(), interposer.counts()["openat", PYTHON])
"""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["opened", str(errno.EMFILE), "opened", "1", "3"], done.stderr


def test_a_case_is_broken_when_an_actor_keeps_more_than_usual(campaign: Campaign) -> None:
    campaign.count("segment")
    case = Case("segment", 0, Fault("getrandom", CORE, 1, "EINTR"))
    usual = dict(campaign.usual["segment", 0])
    ((_, outcome),) = campaign.play_all(iter([case]))
    assert (outcome.invariant, outcome.fired) == ("", 1), outcome.text
    campaign.usual["segment", 0] = {actor: {**many, "thread": many["thread"] - 1} for actor, many in usual.items()}
    ((_, outcome),) = campaign.play_all(iter([case]))
    assert outcome.invariant == "leak" and "1 x thread too many" in outcome.text


def test_the_same_seed_draws_the_same_cases(campaign: Campaign) -> None:
    campaign.counts = {
        ("ring_short", 0): {("mmap", CORE): [1, 9], ("openat", CORE): [50], ("openat", PYTHON): [90, 91]}
    }
    cases = campaign.draw(7, 100)
    assert cases == campaign.draw(7, 100) != campaign.draw(8, 100)
    assert len(set(cases)) == 100 and [Case.parse(case.name) for case in cases] == cases
    kinds = Counter((case.fault.kind, case.fault.caller) for case in cases if case.fault)
    assert set(kinds) == {("mmap", CORE), ("openat", CORE), ("openat", PYTHON)} and min(kinds.values()) > 10
    assert Counter(case.fault.number > 90 for case in cases if case.fault and case.fault.caller == PYTHON)[True] > 5


def test_a_director_that_dies_breaks_its_case_and_no_other(campaign: Campaign) -> None:
    cases = [Case("segment", 0, None), Case("no such scene", 0, None), Case("segment", 1, None)]
    outcomes = {case.scene: outcome for case, outcome in campaign.play_all(iter(cases))}
    assert outcomes["no such scene"].invariant == "crash" and "KeyError" in outcomes["no such scene"].text
    assert outcomes["segment"].invariant == ""
