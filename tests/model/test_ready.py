"""The ready bits of an inbox: no record is forgotten, whoever dies between committing and saying so.

    here              native
    commit            sender.h    Sender::commit, from lane_->committed.store: ORDER publish, ORDER ready, ORDER bell
    close             sender.h    Sender::close
    try_find          receiver.h  Receiver::try_find for an inbox, find_in reduced to a look at committed: ORDER ready
    look_at_ends      receiver.h  Receiver::look_at_ends for an inbox, with sender_death = 0
    is_awaited        receiver.h  Receiver::is_awaited
    reap              reap.h      reap_holdings for lanes; Attachment::reap: header.changes, wake_everybody

A position counts records here; what a record holds is test_ring.py's.
"""

from functools import partial

import pytest

from tests.model.explorer import (
    ACQ_REL,
    ACQUIRE,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Explored,
    Process,
    Step,
    View,
    Violation,
    cas,
    explore,
    fetch_add,
    fetch_and,
    fetch_or,
    load,
    must,
    store,
    until_gone,
)
from tests.model.test_bell import ring, ring_all, wait

LANES = 2


def sender(lane: int, records: int, mutation: str = "") -> Step:
    for n in range(1, records + 1):
        if mutation == "ready before committed":
            yield fetch_or("ready", 1 << lane, SEQ_CST)
            yield store(("committed", lane), n, RELEASE)
        else:
            yield store(("committed", lane), n, RELEASE)  # ORDER publish
            yield fetch_or("ready", 1 << lane, RELAXED if mutation == "ready is relaxed" else SEQ_CST)  # ORDER ready
        yield from ring()
    # close
    yield cas(("word", lane), "live", "closed", ACQ_REL)
    yield fetch_or("ready", 1 << lane)
    yield fetch_add("changes", 1, ACQ_REL)
    yield from ring_all()


class Receiver:
    def __init__(self, mutation: str) -> None:
        self.mutation = mutation
        self.position = [0] * LANES
        self.is_told = [False] * LANES
        self.last_lane = 0
        self.seen_changes = -1

    def receive_all(self) -> Step:
        """Until the channel ends. What it was told of and what it read is returned."""
        while True:
            outcome = yield from self.try_find()
            if outcome == "end of channel":
                return tuple(self.position), tuple(self.is_told)
            if outcome == "nothing":
                yield from wait(1, self.is_awaited)

    def try_find(self) -> Step:
        while True:
            ready = yield load("ready", ACQUIRE)
            if ready == 0:
                break
            later = ready & ~((2 << self.last_lane) - 1)
            i = lowest(later or ready)  # in turn: no sender starves another
            del ready, later
            self.last_lane = i
            committed = yield load(("committed", i), ACQUIRE)  # ORDER publish
            if committed != self.position[i]:
                self.position[i] += 1
                return "found"
            del committed
            if self.mutation != "looks before clearing":
                yield fetch_and("ready", ~(1 << i), SEQ_CST)  # ORDER ready: cleared before the last look
            committed = self.position[i]
            if self.mutation != "no last look":
                committed = yield load(("committed", i), SEQ_CST)
            if self.mutation == "looks before clearing":
                yield fetch_and("ready", ~(1 << i), SEQ_CST)
            if committed != self.position[i]:
                yield fetch_or("ready", 1 << i)
            del committed, i
        outcome = yield from self.look_at_ends()
        return outcome

    def look_at_ends(self) -> Step:
        changes = yield load("changes", ACQUIRE)
        if changes == self.seen_changes:
            return "nothing"
        is_all_ended = True
        for i in range(LANES):
            state = yield load(("word", i), ACQUIRE)
            if state == "live":
                is_all_ended = False
            if state != "dead" or self.is_told[i]:
                continue
            committed = yield load(("committed", i), ACQUIRE)
            if committed != self.position[i]:
                yield fetch_or("ready", 1 << i)  # what it had committed comes first
                return "nothing"
            del committed, state
            self.is_told[i] = True
            return "told"  # there may be more to tell: seen_changes stays
        if is_all_ended:
            ready = yield load("ready", SEQ_CST)
            return "nothing" if ready != 0 else "end of channel"
        self.seen_changes = changes
        return "nothing"

    def is_awaited(self) -> Step:
        changes = yield load("changes", ACQUIRE)
        if changes != self.seen_changes:
            return True
        ready = yield load("ready", ACQUIRE)
        return ready != 0


def lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def receiver(mutation: str) -> Step:
    outcome = yield from Receiver(mutation).receive_all()
    return outcome


def reaper(mutation: str) -> Step:
    died = yield until_gone("sender 0")
    lane = int(died[-1])  # the senders are alike: the first dies
    yield cas(("word", lane), "live", "dead", ACQ_REL)
    if mutation != "reaper says nothing":
        yield fetch_or("ready", 1 << lane)  # it may have died between committing and saying so
    yield fetch_add("changes", 1, ACQ_REL)  # and once more when it is dead, before this:
    if mutation != "reaper wakes nobody":
        yield from ring_all()


def inbox(records: tuple[int, int] = (2, 1), model: str = "sc", *, dies: bool = False, mutation: str = "") -> Explored:
    def at_end(view: View) -> None:
        read, told = view.result("receiver")
        for lane in range(LANES):
            committed = view["committed", lane]
            must(read[lane] == committed, f"{read[lane]} records of lane {lane} were read and {committed} committed")
            has_died = view.is_dead(f"sender {lane}") and view["word", lane] == "dead"
            must(told[lane] == has_died, f"receiver was told of a death of sender {lane}: {told[lane]}")

    memory = {"ready": 0, "changes": 0, "rings": 0, "parked": 0}
    memory |= {("committed", i): 0 for i in range(LANES)} | {("word", i): "live" for i in range(LANES)}
    processes = [
        *(
            Process(f"sender {i}", partial(sender, i, n, mutation), may_die=dies and i == 0)
            for i, n in enumerate(records)
        ),
        Process("receiver", partial(receiver, mutation)),
    ]
    if dies:
        processes.append(Process("reaper", partial(reaper, mutation), is_daemon=True))
    return explore(memory, processes, model=model, at_end=at_end, must_end=True, limit=800_000)


@pytest.mark.parametrize(("model", "records"), [("sc", (2, 1)), ("tso", (1, 1)), ("weak", (1, 1))])
def test_no_record_of_two_senders_is_forgotten(model: str, records: tuple[int, int]) -> None:
    explored = inbox(records, model)
    print(explored)
    assert explored.states > 10_000


@pytest.mark.parametrize(("model", "records"), [("sc", (1, 1)), ("weak", (1, 0))])
def test_a_sender_that_dies_anywhere_loses_nothing_that_it_had_committed(model: str, records: tuple[int, int]) -> None:
    explored = inbox(records, model, dies=True)
    print(explored)
    assert explored.states > 10_000


# ── what each part is there for ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("mutation", ["looks before clearing", "no last look", "ready before committed"])
def test_the_bit_is_set_after_committing_and_cleared_before_the_last_look(mutation: str) -> None:
    with pytest.raises(Violation):
        inbox((2, 1), mutation=mutation)


def test_the_bit_releases_what_was_committed() -> None:
    inbox((1, 1), "tso", mutation="ready is relaxed")
    with pytest.raises(Violation):
        inbox((1, 1), "weak", mutation="ready is relaxed")


def test_a_reaper_that_wakes_nobody_leaves_the_receiver_asleep() -> None:
    with pytest.raises(Violation, match="nobody will wake it"):
        inbox((1, 0), dies=True, mutation="reaper wakes nobody")


def test_the_receiver_would_find_it_by_itself_if_the_reaper_did_not_set_the_bit() -> None:
    """Two look after it: the reaper, and look_at_ends of a receiver that finds the end dead and something unread."""
    inbox((1, 0), dies=True, mutation="reaper says nothing")
