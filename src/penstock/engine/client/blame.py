"""What follows from failures of processes for requests of a client: convictions, the quarantine, a budget of trials."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.engine.client.stream import EngineError
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster.blame_ledger import (
    MAX_TRIALS,
    QUARANTINE_S,
    TRIAL_PERIOD_S,
    BlameLedger,
    ledger_key,
)
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.messages import Submit

CONVICTION = 2  # failures of a group while the request ran alone


def quarantine_key(submit: Submit) -> bytes | None:
    """Returns the hash of a prompt, of its images, its grammar, its adapter and its parameters but for the seed; None:
    an image has no key."""
    items = () if submit.inputs is None else submit.inputs.items
    if submit.grammar is not None:
        items = (*items, submit.grammar)
    keys = [item.key for item in items if item.key is not None]
    if len(keys) < len(items):
        return None
    params = msgspec.msgpack.encode(replace(submit.params, seed=None))
    return ledger_key(submit.prompt.tobytes(), params, *keys, *filter(None, [submit.adapter]))


class Blame:
    """The ledger as one client of the engine uses it. `counters`: one for each group."""

    def __init__(self, ledger: BlameLedger, board: StatusBoard, counters: Sequence[MigrationCounters]) -> None:
        self._ledger = ledger
        self._board = board
        self._counters = counters

    def require_no_quarantine(self, submitted: SubmittedRequest) -> None:
        """Raises EngineError for a request with a prompt that has been convicted lately."""
        key = quarantine_key(submitted.first)
        left = [] if key is None else self._ledger.quarantine.seconds_left(key)
        if left:
            self._counters[0][MigrationCounters.QUARANTINED] += 1
            event(
                "request is in quarantine", logging.WARNING, request_id=submitted.request_id, seconds=round(max(left))
            )
            reason = "a request with this prompt and these parameters has made processes of the engine fail"
            raise EngineError(500, f"{reason}: it is not run again within {max(left):.0f} s")

    def groups_for(self, submitted: SubmittedRequest, serving: dict[int, int], has_confined: bool) -> dict[int, int]:
        """Returns the serving groups that may run a request now, with their incarnations.

        Suspects are tried in one group, and other requests go to the other groups while any serves. Suspects wait for
        the trial group, unless its starts fail. `has_confined`: a request of this client waits for the group."""
        trial, rows = self._board.cluster[StatusBoard.TRIAL_GROUP] - 1, self._board.rows
        if not submitted.is_confined:
            avoided = {group for group in serving if rows[group][StatusBoard.SUSPECTS]}
            avoided |= {trial} if has_confined else set()
            return {group: number for group, number in serving.items() if group not in avoided} or serving
        if trial in serving:
            return {trial: serving[trial]}
        is_awaited = trial >= 0 and not self._board.is_draining and not rows[trial][StatusBoard.FAILED_STARTS]
        return {} if is_awaited else serving

    def convict(self, submitted: SubmittedRequest, group: int) -> None:
        """Puts the prompt of a request into quarantine."""
        self._counters[group][MigrationCounters.CONVICTIONS] += 1
        key = quarantine_key(submitted.first)
        if key is not None:
            self._ledger.quarantine.add(key, QUARANTINE_S)

    def has_budget(self, submitted: SubmittedRequest) -> bool:
        """Returns whether a suspect may be tried. A request without an account has no budget, and may be tried."""
        if submitted.failures == 0 or not submitted.account:
            return True
        key = ledger_key(submitted.account.encode())
        return len(self._ledger.trials.seconds_left(key)) < MAX_TRIALS

    def count_trial(self, submitted: SubmittedRequest, group: int) -> None:
        """Charges the account of a request that has made a group fail while it ran alone. Trials that clear a request
        cost other requests little, and nothing is charged for them."""
        self._counters[group][MigrationCounters.TRIALS] += 1
        if submitted.account:
            self._ledger.trials.add(ledger_key(submitted.account.encode()), TRIAL_PERIOD_S)

    def count_refused_trial(self, group: int) -> None:
        self._counters[group][MigrationCounters.TRIALS_REFUSED] += 1


OVER_BUDGET = (
    f"the request may have made processes of the engine fail, and requests of its client did so {MAX_TRIALS} times "
    f"within {TRIAL_PERIOD_S:.0f} s: send the request again later"
)
