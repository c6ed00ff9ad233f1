"""A block that the ledger calls valid has the keys and values of its hash on all ranks, wherever processes are killed.

    here          native, and the engine
    take          block_ledger.h  BlockLedger::withdraw, by BlockCache::take
    publish       block_ledger.h  BlockLedger::publish, by PrefixHasher::publish
    sent, done    the messages Step and StepDone: a send releases, a receive acquires
    summed        the all-reduce after the attention of a layer, which rank 0 leaves when all ranks have entered
    pages         keys and values of the block, of each rank, in pages that outlive the worker

The next life reads the ledger when all processes of this life have ended, so the invariant holds at every state: each
state is what a kill of all processes leaves, and a process that was killed first is a process that goes no further.
"""

from functools import partial

import pytest

from tests.model import orders
from tests.model.explorer import Process, Step, View, load, must, store, until
from tests.model.scene import Scene

RANKS = 2
BEFORE, HALF = "of a former request", "half written"
CONTENTS = ("of the first", "of the second")  # of two steps, which are both in flight
ORDER = ("withdraw", "send")


def core(mutation: str) -> Step:
    """The first step fills the block for a sample that is preempted then; the second one, for another sample."""
    for step in range(len(CONTENTS)):
        actions = ORDER[::-1] if mutation == "withdraws after the send" else ORDER
        for action in actions:
            if action == "withdraw":
                yield store("state", 0)
            else:
                yield store("sent", step + 1, orders.publish.release)
        if mutation == "publishes at the send":
            yield from publish(CONTENTS[step], mutation)
    for step in range(len(CONTENTS)):
        yield until("done", partial(int.__lt__, step))
        yield load("done", orders.publish.acquire)
        if step == len(CONTENTS) - 1 or mutation == "publishes what was given up":
            yield from publish(CONTENTS[step], mutation)


def publish(content: str, mutation: str) -> Step:
    if mutation == "state before hash":
        yield store("state", 1)
        yield store("hash", content)
    else:
        yield store("hash", content)
        yield store("state", 1, orders.ledger.release)


def worker(rank: int, mutation: str) -> Step:
    for step in range(len(CONTENTS)):
        yield until("sent", partial(int.__lt__, step))
        yield load("sent", orders.publish.acquire)
        yield store(("pages", rank), HALF)
        yield store(("pages", rank), CONTENTS[step])
        if rank > 0:
            yield store(("summed", rank), step + 1, orders.publish.release)
            continue
        for other in range(1, RANKS):
            if mutation != "no sum over all ranks":
                yield until(("summed", other), partial(int.__lt__, step))
                yield load(("summed", other), orders.publish.acquire)
        yield store("done", step + 1, orders.publish.release)


def is_right(view: View) -> None:
    for rank in range(RANKS):
        must(view["state"] == 0 or view["pages", rank] == view["hash"], "a valid block has other keys and values")


def scene(mutation: str = "") -> Scene:
    words = {"state": 1, "hash": BEFORE, "sent": 0, "done": 0, ("summed", 1): 0}
    words |= {("pages", rank): BEFORE for rank in range(RANKS)}
    processes = [Process("core", partial(core, mutation), may_die=True, is_daemon=True)]
    processes += [
        Process(f"worker {rank}", partial(worker, rank, mutation), may_die=True, is_daemon=True)
        for rank in range(RANKS)
    ]
    return Scene(words, processes, invariant=is_right, faults=2)


def test_valid_block_is_right_wherever_processes_are_killed() -> None:
    scene().holds(1_000, "weak")


@pytest.mark.parametrize(
    "mutation",
    [
        "withdraws after the send",
        "state before hash",
        "publishes at the send",
        "publishes what was given up",
        "no sum over all ranks",
    ],
)
def test_ledger_lies_in_any_other_order(mutation: str) -> None:
    scene(mutation).fails("other keys and values", "weak")


def test_hash_is_written_before_the_state_by_the_named_order() -> None:
    scene().without("ledger", "release").fails("other keys and values", "weak")
