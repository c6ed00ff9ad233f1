"""Counters of a client in words of shared memory: of requests resumed after the loss of a group, and of new requests.

One client writes them: `MigrationCounters` for each group, `QueueCounters` for all groups together.
`server.status.counters` has a place for them.
"""

from __future__ import annotations

from penstock.engine.cluster.counter import Bounds, CounterRow, counter, gauge, histogram
from penstock.engine.cluster.verdict_board import Cause

PAUSE_SECONDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0),
)
OUTPUT = "output"  # an output processor ended, and its group serves
CAUSES = {
    Cause.OUTSIDE: "died",
    Cause.ITSELF: "failed",
    Cause.PLANNED: "planned",
    Cause.UNKNOWN: "unknown",
}
MIGRATION_CAUSES = (*CAUSES.values(), OUTPUT)


FAILURES = "requests of one client make engines fail: the log names them"
LOST = "requests that the engine has lost"  # begins the text of several counters


class MigrationCounters(CounterRow, scope="engine"):
    WAITING = gauge(
        "penstock_requests_waiting_to_resume",
        f"{LOST} and that no engine runs yet",
        "above 0 for long: the engine does not come back; its log says why",
    )
    KEPT_TOKENS = gauge(
        "penstock_kept_tokens",
        "tokens of open requests, prompts and answers, that servers keep to resume them, 4 bytes each",
        "memory of servers",
    )
    MIGRATIONS = counter(
        "penstock_migrations",
        f"{LOST} and that were resumed, by `cause`: `died` (a process was killed from outside), `failed` (it failed by "
        "itself), `output` (an output processor ended), `planned`, `unknown` (the server was stopped for so long, or "
        "is shutting down, that no cause was found)",
        "`failed` grows: the log names the process and the error",
        labels={"cause": MIGRATION_CAUSES},
    )
    GIVEN_UP = counter(
        "penstock_requests_given_up",
        f"{LOST} and that ended with an error: a limit of migration, 500 for a request that made it fail, or a "
        "shutdown",
        "errors",
    )
    PAUSE = histogram(
        "penstock_migration_pause_seconds",
        "from the loss of the engine to the next token of each resumed request; its `_count` is the number of requests "
        "that went on",
        "about the time of a restart with one engine, less than a second with two",
        bounds=PAUSE_SECONDS,
    )
    TRIALS = counter(
        "penstock_trials",
        "failures of an engine while one request ran alone",
        FAILURES,
        is_total=True,
    )
    TRIALS_REFUSED = counter(
        "penstock_trials_refused",
        "suspects that got 503, as their client had had all of its trials",
        FAILURES,
        is_total=True,
    )
    CONVICTIONS = counter(
        "penstock_convictions",
        "requests that were answered with 500, as an engine failed twice while they ran alone",
        FAILURES,
        is_total=True,
    )
    QUARANTINED = counter(
        "penstock_quarantined_requests",
        "requests that were refused as they equal a convicted request",
        FAILURES,
        is_total=True,
    )


class QueueCounters(CounterRow, scope="server"):
    """Counters of the new requests of one client: requests that no group has taken yet."""

    WAITING = gauge(
        "penstock_new_requests_waiting",
        "new requests in a `server` process that no engine has taken yet, while a lost engine is started again",
        "above 0 for long: the engine does not come back; its log says why",
    )
    TIMEOUTS = counter(
        "penstock_queue_timeouts",
        "new requests that a `server` process refused with 503, as no engine served within `--queue-timeout`",
        "it grows: a restart takes longer than clients may wait",
    )
