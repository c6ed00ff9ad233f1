"""What failures of processes have as consequences for requests: groups, convictions, the quarantine, budgets."""

import numpy as np
import pytest

from penstock.engine.client.blame import Blame, quarantine_key
from penstock.engine.client.stream import EngineError
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster.blame_ledger import MAX_TRIALS, BlameLedger
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.columns import columns_of_inputs
from penstock.engine.protocol.messages import CONFINED_TOKENS, SUSPECT, TRIAL_TOKENS, SamplingParams, Submit
from penstock.tensor import Scope

GROUPS = 3
SERVING = dict.fromkeys(range(GROUPS), 1)


class Scene:
    def __init__(self) -> None:
        self.board = StatusBoard(StatusBoard.create(GROUPS), writable=True)
        self.counters = [MigrationCounters() for _ in range(GROUPS)]
        self.blame = Blame(BlameLedger(BlameLedger.create(1), 1, 0), self.board, self.counters)

    def groups(self, submitted: SubmittedRequest, serving: dict[int, int], has_confined: bool = False) -> set[int]:
        return set(self.blame.groups_for(submitted, serving, has_confined))


def submitted(prompt: int = 1, *, failures: int = 0, delivered: int = 0, account: str = "a") -> SubmittedRequest:
    request = SubmittedRequest(Submit(0, 7, np.array([prompt], np.int32), SamplingParams(n=2)), account=account)
    request.add(0, [5] * delivered)
    for _ in range(failures):
        request.count_failure(is_alone=False)
    return request


# ── groups ──
def test_suspect_runs_in_the_group_that_failed_last_alone() -> None:
    scene = Scene()
    scene.board.cluster[StatusBoard.TRIAL_GROUP] = 1 + 1
    assert scene.groups(submitted(failures=1, delivered=CONFINED_TOKENS - 1), SERVING) == {1}
    assert scene.groups(submitted(failures=SUSPECT, delivered=CONFINED_TOKENS), SERVING) == {1}
    assert scene.groups(submitted(failures=1, delivered=CONFINED_TOKENS), SERVING) == {0, 1, 2}


def test_suspect_waits_for_its_group_unless_the_starts_of_the_group_fail() -> None:
    scene, suspect, others = Scene(), submitted(failures=1), {0: 1, 2: 1}
    assert scene.groups(suspect, others) == {0, 2}, "no group has failed"
    scene.board.cluster[StatusBoard.TRIAL_GROUP] = 1 + 1
    assert scene.groups(suspect, others) == set()
    scene.board.row(1)[StatusBoard.FAILED_STARTS] = 1
    assert scene.groups(suspect, others) == {0, 2}
    scene.board.row(1)[StatusBoard.FAILED_STARTS] = 0
    scene.board.drain()
    assert scene.groups(suspect, others) == {0, 2}


def test_request_avoids_groups_with_suspects_while_another_serves() -> None:
    scene, request = Scene(), submitted()
    assert scene.groups(request, SERVING) == {0, 1, 2}
    scene.board.row(0)[StatusBoard.SUSPECTS] = 1
    scene.board.cluster[StatusBoard.TRIAL_GROUP] = 1 + 1
    assert scene.groups(request, SERVING) == {1, 2}
    assert scene.groups(request, SERVING, has_confined=True) == {2}
    assert scene.groups(request, {0: 1}, has_confined=True) == {0}, "no other group serves"


# ── suspects ──
def test_suspect_is_cleared_by_the_tokens_of_all_its_samples() -> None:
    request = submitted(failures=SUSPECT, delivered=40)
    request.migrations = request.failed_migrations = 2
    request.add(0, [5] * (2 * TRIAL_TOKENS - 1))
    request.clear_if_advanced(1)
    assert request.failures == SUSPECT
    request.add(1, [5])
    request.clear_if_advanced(1)
    assert request.failures == request.migrations == 0
    request.count_failure(is_alone=True)
    request.migrations = request.failed_migrations = 1
    request.add(0, [5] * 2 * TRIAL_TOKENS)
    request.clear_if_advanced(1)
    assert request.failures == request.failures_alone == 0 and request.migrations == 1, "cleared as often as allowed"


# ── quarantine ──
def test_convicted_prompt_is_refused_until_the_quarantine_ends() -> None:
    scene = Scene()
    scene.blame.require_no_quarantine(submitted(1))
    scene.blame.convict(submitted(1), 2)
    scene.blame.require_no_quarantine(submitted(2))
    with pytest.raises(EngineError, match="not run again within 600 s") as caught:
        scene.blame.require_no_quarantine(submitted(1, account="b"))
    assert caught.value.status == 500
    assert scene.counters[2][MigrationCounters.CONVICTIONS] == scene.counters[0][MigrationCounters.QUARANTINED] == 1


def test_quarantine_key_covers_prompt_and_parameters_but_no_seed() -> None:
    def key(prompt: int = 1, **params: object) -> bytes | None:
        return quarantine_key(Submit(0, 1, np.array([prompt], np.int32), SamplingParams(**params)))  # type: ignore[arg-type]

    assert key() == key(seed=5) is not None
    assert len({key(), key(2), key(temperature=0.5), key(logit_bias=((3, 1.0),))}) == 4


def test_quarantine_key_covers_images_and_is_none_without_their_keys() -> None:
    def key(image: bytes | None) -> bytes | None:
        with Scope(None) as scope:
            handle = scope.put({"pixels": np.zeros(4, np.float32)}, key=image)
            inputs = columns_of_inputs([((handle, 0, 1),)])
            return quarantine_key(Submit(0, 1, np.array([1], np.int32), SamplingParams(), inputs=inputs))

    assert key(None) is None
    assert key(b"a" * 32) == key(b"a" * 32) != key(b"b" * 32)


# ── budget ──
def test_account_has_so_many_trials_and_another_one_has_its_own() -> None:
    scene = Scene()
    for _ in range(MAX_TRIALS):
        assert scene.blame.has_budget(submitted(failures=1))
        scene.blame.count_trial(submitted(failures=1), 1)
    assert not scene.blame.has_budget(submitted(failures=1))
    assert scene.blame.has_budget(submitted()), "no suspect"
    assert scene.blame.has_budget(submitted(failures=1, account="b"))
    assert scene.blame.has_budget(submitted(failures=1, account="")), "a request without an account has no budget"
    assert scene.counters[1][MigrationCounters.TRIALS] == MAX_TRIALS
