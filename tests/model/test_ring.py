"""One lane of a ring or a broadcast: exactly once, in order, never torn, never overwritten, and every sleeper wakes.

    here                         native
    Sender.try_reserve, commit   sender.h    of the same names; the record is written cell by cell, then order publish
    Sender.wait, is_awaited, has_room, least_released, admit, look_at_ends: of the same names
    Sender.close                 sender.h    Sender::close; what it does while a view lives is in test_view.py
    Receiver.find_in, give_back  receiver.h  of the same names: order publish, order room, `wake_position`. PATIENCE_NS
                                             have passed is a word of its own, which a process called time sets
    Receiver.wait, look_at_sender, was_admitted, hand_on: of the same names
    Receiver.join, let_go        receiver.h  the constructor for a place that was closed; let_go
    reap_sender, reap_receiver   reap.h      reap_holdings for one end, then wake_everybody

put_out (native.py) is what let_go and the reaper do to a cursor: until it is out, unless it is a successor's already,
by an epoch that was read once, together with the word of the end. The tests at "leaves", "joins" and "a place is taken
again" show what each of these is for.

Positions and the ring count cells. A record is a header and, if it needs two cells, a body. The ring need not be a
power of two here, so that small ones wrap with a skip.
"""

from functools import partial

import pytest

from tests import tiers
from tests.model import orders
from tests.model.explorer import (
    RELAXED,
    Process,
    Step,
    View,
    cas,
    exchange,
    fence,
    fetch_add,
    fetch_and,
    fetch_or,
    futex_wake,
    load,
    must,
    store,
    until,
    until_gone,
)
from tests.model.native import put_out, ring, ring_all, wait
from tests.model.scene import ASLEEP, Scene, Words

ROOM = "room "


def lane(cells: int, receivers: int) -> Words:
    words: Words = {"committed": 0, "word": "live", "joining": 0, "changes": 0, "rings": 0, "parked": 0}
    words |= {ROOM + "rings": 0, ROOM + "parked": 0, "wanted": 0, "since": "", "keeper": "", "kept": 0}
    words |= {("cell", i): None for i in range(cells)}
    for r in range(receivers):
        words |= {("released", r): 0, ("mode", r): ("counted", 1), ("word", r): ("live", 1), ("read", r): 0}
    return words


class Sender:
    def __init__(self, cells: int, receivers: int, mutation: str = "") -> None:
        self.cells, self.receivers, self.mutation = cells, receivers, mutation
        self.committed = self.least = self.need = self.skip = 0
        self.seen_changes = -1
        self.has_receivers = True

    def send_all(self, needs: tuple[int, ...]) -> Step:
        for n in range(len(needs)):
            outcome = yield from self.send(n, needs[n])
            if outcome != "sent":
                return outcome
        yield from self.close()
        return "all"

    def send(self, n: int, need: int) -> Step:
        while True:
            outcome = yield from self.try_reserve(need)
            if outcome == "room":
                yield from self.commit(n)
                return "sent"
            if outcome == "no receiver":
                return outcome
            yield from self.wait()

    def try_reserve(self, need: int) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes != self.seen_changes:
            yield from self.look_at_ends()
        del changes
        joining = yield load("joining", orders.joining.acquire)
        if joining != 0:
            yield from self.admit()
        del joining
        if not self.has_receivers:
            return "no receiver"
        index = self.committed % self.cells
        self.need = need
        self.skip = self.cells - index if index + need > self.cells else 0
        has_room = yield from self.has_room()
        return "room" if has_room else "full"

    def has_room(self) -> Step:
        if self.mutation == "no back-pressure":
            return True
        if self.committed + self.skip + self.need - self.least <= self.cells:
            return True
        yield from self.least_released()
        return self.committed + self.skip + self.need - self.least <= self.cells

    def least_released(self) -> Step:
        least = self.committed
        for r in range(self.receivers):
            mode, _ = yield load(("mode", r), orders.mode.acquire)
            if mode != "counted":
                continue
            released = yield load(("released", r), orders.room.acquire)  # read before it is overwritten
            if self.committed - released <= self.cells:
                least = min(least, released)
        keeper = yield load("keeper", orders.room.acquire)
        if keeper != "":
            kept_state = yield load("kept")
            least = min(least, kept_state)
        self.least = least

    def commit(self, n: int) -> Step:
        position = self.committed + self.skip
        end = position + self.need
        if self.mutation == "committed before it is written":
            yield store("committed", end, orders.publish.release)
        if self.need == 2:
            yield store(("cell", (position + 1) % self.cells), ("body", n))
        if self.skip != 0 and self.mutation != "no skip":
            yield store(("cell", self.committed % self.cells), (self.committed, "skip", self.skip, -1))
        yield store(("cell", position % self.cells), (position, "bytes", self.need, n))
        yield store("committed", end, orders.publish.release)  # the record is written before this
        self.committed = end
        self.skip = self.need = 0
        del position, end
        yield from ring()

    def wait(self) -> Step:
        enough = max(self.skip + self.need, min(self.cells // 4, self.committed - self.least))
        yield store("wanted", self.committed + enough - self.cells, RELAXED)
        yield store("since", "waits", RELAXED)
        yield from wait(1, self.is_awaited, bell=ROOM)
        yield store("since", "", RELAXED)

    def is_awaited(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes != self.seen_changes:
            return True
        joining = yield load("joining", RELAXED)
        if joining != 0:
            return True
        has_room = yield from self.has_room()
        return has_room

    def admit(self) -> Step:
        joining = yield exchange("joining", 0, orders.joining.acq_rel)
        for r in range(self.receivers):
            if joining >> r & 1 == 0:
                continue
            mode, epoch = yield load(("mode", r), orders.mode.acquire)
            if mode != "joining":
                continue
            if self.mutation != "counted before it knows where":
                yield store(("released", r), self.committed, RELAXED)
            yield cas(("mode", r), ("joining", epoch), ("counted", epoch), orders.mode.acq_rel)
            if self.mutation == "counted before it knows where":
                yield store(("released", r), self.committed, RELAXED)
            self.has_receivers = True
        yield from ring_all()

    def look_at_ends(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        is_any = False
        for r in range(self.receivers):
            mode, _ = yield load(("mode", r), orders.mode.acquire)
            is_any |= mode != "out"
            if mode == "joining" and self.mutation != "look_at_ends does not ask for it":
                yield fetch_or("joining", 1 << r, orders.joining.acq_rel)  # it may not have asked yet
        self.has_receivers = is_any
        yield from self.least_released()
        self.seen_changes = changes

    def close(self) -> Step:
        yield cas("word", "live", "closed", orders.end.acq_rel)
        yield fetch_add("changes", 1, orders.changes.acq_rel)
        yield from ring_all()


class Receiver:
    def __init__(self, r: int, cells: int, receivers: int, mutation: str = "") -> None:
        self.r, self.cells, self.receivers, self.mutation = r, cells, receivers, mutation
        self.epoch = 1
        self.position = 0
        self.is_counted = True
        self.seen_changes = -1
        self.next: int | None = 0  # the number of the record that must come next; None: any, as it has just joined
        self.first: int | None = None  # of one that joined: the first record that came

    def receive(self, most: int = 1 << 30) -> Step:
        """Until the channel ends or it has had enough: how it ended, and which record would be next."""
        while most > 0:
            is_found = yield from self.find_in()
            if is_found:
                yield from self.give_back(self.position)
                most -= 1
                continue
            outcome = yield from self.look_at_sender()
            if outcome != "nothing":
                return outcome, self.next
            yield from self.wait()
        yield from self.let_go()
        return "left", self.next

    def find_in(self) -> Step:
        if not self.is_counted:
            yield from self.was_admitted()
            if not self.is_counted:
                return False
        while True:
            committed = yield load("committed", orders.publish.acquire)  # see Sender.commit
            if committed == self.position:
                return False
            del committed
            header = yield load(("cell", self.position % self.cells))
            must(header is not None and header[0] == self.position, f"not the record of {self.position}: {header}")
            _, kind, need, n = header
            if kind == "skip":
                self.position += need
                if self.mutation != "a skip is kept until the next record":
                    yield from self.give_back(self.position)
                continue
            if self.mutation == "given back before it is read":
                yield store(("released", self.r), self.position + need, orders.room.release)
            if need == 2:
                body = yield load(("cell", (self.position + 1) % self.cells))
                must(body == ("body", n), f"record {n} is torn: {body}")
            must(self.next is None or n == self.next, f"record {n} where {self.next} should be")
            self.first = n if self.next is None else self.first
            self.next = n + 1
            self.position += need
            yield store(("read", self.r), self.position, RELAXED)  # pass
            return True

    def give_back(self, end: int, is_late: bool = False) -> Step:
        yield store(("released", self.r), end, orders.room.release)  # it was read before this
        if self.mutation != "no fence after releasing":
            yield fence(orders.bell.seq_cst_first)
        parked = yield load(ROOM + "parked", RELAXED)
        if parked == 0:
            return
        since = yield load("since", RELAXED)
        is_waited_for = is_late or (since == "waits for long" and self.mutation != "no patience")
        del since
        expected = yield load("wanted", RELAXED)
        if is_waited_for or end - expected >= 0:
            yield from ring(1, bell=ROOM)

    def was_admitted(self) -> Step:
        mode, _ = yield load(("mode", self.r), orders.mode.acquire)
        if mode == "counted":
            self.position = yield load(("released", self.r), orders.room.acquire)
            yield store(("read", self.r), self.position, RELAXED)
            self.is_counted = True

    def wait(self) -> Step:
        parked = yield load(ROOM + "parked", RELAXED)
        if parked != 0 and self.mutation != "waits without ringing":
            yield from ring(1, bell=ROOM)
        del parked
        yield from wait(1 << self.r, self.is_awaited, self.hand_on)

    def hand_on(self, parked: int) -> Step:
        behind = 0
        for r in range(self.receivers):
            if parked >> r & 1 == 0:
                continue
            read = yield load(("read", r), RELAXED)
            committed = yield load("committed", orders.publish.acquire)
            if read != committed:
                behind |= 1 << r
            del read, committed
        if behind != 0:
            yield futex_wake("rings", 1, behind)

    def is_awaited(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes != self.seen_changes:
            return True
        if self.is_counted:
            committed = yield load("committed", orders.publish.acquire)
            return committed != self.position
        mode, _ = yield load(("mode", self.r), orders.mode.acquire)
        return mode == "counted"

    def look_at_sender(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        state = yield load("word", orders.end.acquire)
        if state == "live":
            self.seen_changes = changes
            if not self.is_counted:
                yield from self.ask_to_join()
            return "nothing"
        if self.is_counted and self.mutation != "ends before all is read":
            committed = yield load("committed", orders.publish.acquire)
            if committed != self.position:
                return "nothing"  # read first
        return "end" if state == "closed" else "died"

    def ask_to_join(self) -> Step:
        yield fetch_or("joining", 1 << self.r, orders.joining.acq_rel)
        yield from ring(1, bell=ROOM)

    def join(self, before: tuple[str, int]) -> Step:
        """Takes a place that was closed, or left by a dead receiver."""
        self.epoch = before[1] + 1
        self.is_counted = False
        self.next = None
        yield cas(("word", self.r), before, ("live", self.epoch), orders.end.acq_rel)
        yield store(("mode", self.r), ("joining", self.epoch), orders.mode.release)
        yield from self.ask_to_join()
        yield fetch_add("changes", 1, orders.changes.acq_rel)
        yield from ring(1, bell=ROOM)

    def let_go(self) -> Step:
        yield from put_out(("mode", self.r), self.epoch, self.mutation)
        yield cas(("word", self.r), ("live", self.epoch), ("closed", self.epoch), orders.end.acq_rel)
        if self.mutation != "leaves without a word":
            yield fetch_add("changes", 1, orders.changes.acq_rel)
            yield from ring_all(bell=ROOM)


def wake_everybody(mutation: str = "") -> Step:
    if mutation != "wakes nobody":
        yield from ring_all()
        yield from ring_all(bell=ROOM)


def reap_sender(mutation: str = "") -> Step:
    yield until_gone("sender")
    yield cas("word", "live", "dead", orders.end.acq_rel)
    yield store(ROOM + "parked", 0, orders.bell.seq_cst_then)
    yield fetch_add("changes", 1, orders.changes.acq_rel)
    yield from wake_everybody(mutation)


def reap_receiver(r: int, mutation: str = "") -> Step:
    yield until_gone(f"receiver {r}")
    yield from end_receiver(r, mutation)
    yield fetch_add("changes", 1, orders.changes.acq_rel)
    yield from wake_everybody(mutation)


def end_receiver(r: int, mutation: str = "") -> Step:
    state, epoch = yield load(("word", r), orders.end.acquire)
    if epoch != 1:  # expected, or a successor's: another slot, another peer
        return
    if state == "live":
        yield cas(("word", r), (state, epoch), ("dead", epoch), orders.end.acq_rel)
    if mutation == "epoch is read again":
        _, epoch = yield load(("word", r))
    yield from put_out(("mode", r), epoch, mutation)
    yield fetch_and("parked", ~(1 << r), orders.bell.seq_cst_then)


# ── all are well ─────────────────────────────────────────────────────────────────────────────────────────────────────
def sending(cells: int, receivers: int, needs: tuple[int, ...], mutation: str, **how: bool) -> Process:
    return Process("sender", lambda: Sender(cells, receivers, mutation).send_all(needs), **how)


def receiving(r: int, cells: int, receivers: int, mutation: str, most: int = 1 << 30, **how: bool) -> Process:
    return Process(f"receiver {r}", lambda: Receiver(r, cells, receivers, mutation).receive(most), **how)


def channel(
    cells: int, needs: tuple[int, ...], receivers: int = 1, mutation: str = "", must_end: bool = False
) -> Scene:
    def at_end(view: View) -> None:
        must(view.result("sender") == "all", f"the sender ended with {view.result('sender')}")
        for r in range(receivers):
            actual = view.result(f"receiver {r}")
            must(actual == ("end", len(needs)), f"receiver {r} has {actual} of {len(needs)} records")

    processes = [
        sending(cells, receivers, needs, mutation),
        *(receiving(r, cells, receivers, mutation) for r in range(receivers)),
    ]
    return Scene(lane(cells, receivers), processes, at_end=at_end, must_end=must_end)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
@pytest.mark.parametrize(("cells", "needs"), [(2, (1, 1, 1)), (3, (2, 2, 1)), (4, (2, 1, 2))])
def test_every_record_comes_exactly_once_and_in_order_and_whole(cells: int, needs: tuple[int, ...], model: str) -> None:
    channel(cells, needs, must_end=True).holds(1_000, model)


def test_two_receivers_get_every_record_each() -> None:
    channel(1, (1,), receivers=2).holds(10_000)


def the_slower_of_two(mutation: str = "") -> Scene:
    """Two records through a ring of one; the second receiver looks when there is something, and so takes few steps."""

    def looks() -> Step:
        me = Receiver(1, 1, 2, mutation)
        while me.position < 2:
            yield until("committed", DIFFERS[me.position])
            yield from me.find_in()
            yield from me.give_back(me.position)
        return "end", me.next

    def at_end(view: View) -> None:
        for r in range(2):
            must(view.result(f"receiver {r}") == ("end", 2), f"receiver {r} has {view.result(f'receiver {r}')}")

    processes = [sending(1, 2, (1, 1), mutation), receiving(0, 1, 2, mutation), Process("receiver 1", looks)]
    return Scene(lane(1, 2), processes, at_end=at_end)


DIFFERS = [lambda value: value != 0, lambda value: value != 1]


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_the_sender_waits_for_the_slower_of_two_receivers(model: str) -> None:
    the_slower_of_two().holds(10_000, model)


@pytest.mark.parametrize(
    ("mutation", "model", "how"),
    [
        ("no back-pressure", "sc", "record 0 is torn"),  # what a load of `released` without its acquire would allow
        ("given back before it is read", "sc", "is torn|not the record of"),  # and a store of it without its release
        ("committed before it is written", "sc", "not the record of"),
        ("no skip", "sc", "not the record of"),
        ("ends before all is read", "sc", "of 2 records"),
        ("no fence after releasing", "tso", ASLEEP),
    ],
)
def test_each_part_of_the_ring_is_needed(mutation: str, model: str, how: str) -> None:
    channel(3, (2, 2), mutation=mutation).fails(how, model)


def test_publishing_needs_no_more_than_stores_in_order() -> None:
    channel(3, (2, 2)).without("publish", "release").holds(500, "tso")
    channel(3, (2, 2)).without("publish", "release").fails("not the record of", "weak")


# ── the sender dies ──────────────────────────────────────────────────────────────────────────────────────────────────
def dying_sender(mutation: str = "") -> Scene:
    needs, cells = (2, 2), 3

    def at_end(view: View) -> None:
        how, n = view.result("receiver 0")
        ends = {0: 0, 2: 1, 5: 2}
        must(n == ends[view["committed"]], f"{n} records were read, and {view['committed']} cells committed")
        must(how == ("died" if view["word"] == "dead" else "end"), f"told {how}, and the sender is {view['word']}")

    processes = [
        sending(cells, 1, needs, mutation, may_die=True),
        receiving(0, cells, 1, mutation),
        Process("reaper", partial(reap_sender, mutation), is_daemon=True),
    ]
    return Scene(lane(cells, 1), processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_sender_dead_anywhere_leaves_whole_committed_records(model: str) -> None:
    dying_sender().holds(3_000, model)


@pytest.mark.parametrize(
    ("mutation", "how"),
    [
        ("wakes nobody", ASLEEP),
        ("committed before it is written", "not the record of"),
        ("ends before all is read", "records were read"),
    ],
)
def test_each_part_of_the_death_of_a_sender_is_needed(mutation: str, how: str) -> None:
    dying_sender(mutation).fails(how)


# ── a receiver leaves, or dies ───────────────────────────────────────────────────────────────────────────────────────
def leaving(mutation: str = "", dies: bool = False) -> Scene:
    """The only receiver leaves after one record, or dies at any time; the sender is, or gets, parked on a full ring."""
    cells, needs = 2, (2, 2, 2)

    def at_end(view: View) -> None:
        outcome = view.result("sender")
        must(outcome in ("all", "no receiver"), f"the sender ended with {outcome}")

    processes = [sending(cells, 1, needs, mutation), receiving(0, cells, 1, mutation, 1, may_die=dies)]
    if dies:
        processes.append(Process("reaper", partial(reap_receiver, 0, mutation), is_daemon=True))
    return Scene(lane(cells, 1), processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize("dies", [False, True])
def test_a_parked_sender_is_told_when_its_last_receiver_goes(dies: bool) -> None:
    leaving(dies=dies).holds(500)


def test_last_receiver_leaving_silently_leaves_the_sender_asleep() -> None:
    leaving("leaves without a word").fails(ASLEEP)
    leaving("wakes nobody", dies=True).fails(ASLEEP)


def dies_while_it_comes(mutation: str = "") -> Scene:
    """A receiver that was expected, and so counted, dies while it takes its place."""
    words = lane(1, 1)
    words |= {("word", 0): ("expected", 0), ("mode", 0): ("counted", 0)}

    def comes() -> Step:
        yield cas(("word", 0), ("expected", 0), ("live", 1), orders.end.acq_rel)
        yield store(("mode", 0), ("counted", 1), orders.mode.release)
        yield fetch_add("changes", 1, orders.changes.acq_rel)
        outcome = yield from Receiver(0, 1, 1, mutation).receive()
        return outcome

    def at_end(view: View) -> None:
        if view["word", 0] != ("expected", 0):
            must(view.is_done("sender"), "the sender waits for a receiver that is dead")

    processes = [
        sending(1, 1, (1, 1), mutation, is_daemon=True),
        Process("receiver 0", comes, may_die=True),
        Process("reaper", partial(reap_receiver, 0, mutation), is_daemon=True),
    ]
    return Scene(words, processes, at_end=at_end)


def test_receiver_dead_before_it_is_counted_does_not_block_the_sender() -> None:
    dies_while_it_comes().holds(500)


def test_reaper_with_its_own_epoch_alone_leaves_a_dead_receiver_counted() -> None:
    dies_while_it_comes("only its own epoch").fails("dead")


# ── a receiver joins late ────────────────────────────────────────────────────────────────────────────────────────────
def joining(mutation: str = "", leaves_at_once: bool = False) -> Scene:
    """A receiver takes a place that was closed; the sender, which sent one record before, gives up, or sends it all."""
    cells, needs = 1, (1, 1, 1)

    def sends() -> Step:
        me = Sender(cells, 1, mutation)
        me.committed = 1
        outcome = yield from me.send_all(needs)
        if outcome != "all":
            yield from me.close()
        return outcome

    def joins() -> Step:
        me = Receiver(0, cells, 1, mutation)
        yield from me.join(("closed", 1))
        if leaves_at_once:
            yield from me.let_go()
            return None
        outcome, following = yield from me.receive()
        return outcome, me.first, following

    def at_end(view: View) -> None:
        sent, actual = view.result("sender"), view.result("receiver 0")
        must(sent in ("all", "no receiver"), f"the sender ended with {sent}")
        if not leaves_at_once:
            expected = ("end", 0, 3) if sent == "all" else ("end", None, None)
            must(actual == expected, f"the sender ended with {sent}, and the receiver has {actual}")

    words = lane(cells, 1)
    words |= {("word", 0): ("closed", 1), ("mode", 0): ("out", 1), "committed": 1, ("cell", 0): (0, "bytes", 1, -1)}
    processes = [Process("sender", sends), Process("receiver 0", joins)]
    return Scene(words, processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_a_receiver_that_joins_late_gets_every_record_from_then_on(model: str) -> None:
    joining().holds(1_000, model)


def test_receiver_that_joins_and_leaves_does_not_block_the_sender() -> None:
    joining(leaves_at_once=True).holds(300)


def test_leaving_with_one_try_loses_against_being_admitted() -> None:
    """Mode is read as joining; the sender makes it counted; the exchange fails; the ring waits for the gone one."""
    joining("one try", leaves_at_once=True).fails(ASLEEP)


def test_receiver_counted_before_its_position_reads_missing_records() -> None:
    joining("counted before it knows where").fails("not the record of|the receiver has")


def test_receiver_that_has_not_asked_is_admitted_before_the_next_record() -> None:
    joining("look_at_ends does not ask for it").fails("ended with all, and the receiver has")


# ── a place is taken again while a slow reaper is still at it ────────────────────────────────────────────────────────
def succession(mutation: str = "") -> Scene:
    """Receiver 0 has died; two reap it; a successor may come as soon as one of them has said that it is dead."""
    words = lane(1, 1)
    words["identity"] = "dying"

    def reaps() -> Step:
        identity = yield load("identity", orders.identity.acquire)
        if identity == "dying":
            yield from end_receiver(0, mutation)
            yield cas("identity", "dying", "dead", orders.identity.acq_rel)

    def successor() -> Step:
        yield until("identity", is_dead)
        before = yield load(("word", 0), orders.end.acquire)
        yield from Receiver(0, 1, 1, mutation).join(before)

    def at_end(view: View) -> None:
        must(view["mode", 0] == ("joining", 2), f"the successor is {view['mode', 0]}")

    processes = [Process("reaper 0", reaps), Process("reaper 1", reaps), Process("successor", successor)]
    return Scene(words, processes, at_end=at_end)


def is_dead(identity: str) -> bool:
    return identity == "dead"


def test_a_slow_reaper_does_not_take_a_successor_for_the_dead() -> None:
    succession().holds(100)


def test_an_epoch_that_is_read_twice_is_that_of_the_successor() -> None:
    succession("epoch is read again").fails("the successor is")


# ── the hint ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_full_ring(*others: Process) -> Scene:
    """A ring of 8, full of records that were read and are kept, as views; a sender that has one more, and wants two."""

    def sends() -> Step:
        me = Sender(8, 1)
        me.committed = 8
        outcome = yield from me.send(8, 1)
        return outcome

    words = lane(8, 1)
    words |= {"committed": 8, ("read", 0): 8}
    return Scene(words, [Process("sender", sends), *others])


def a_view_is_let_go(is_late: bool) -> Scene:
    """By another thread, while the receiver waits."""

    def reads() -> Step:
        me = Receiver(0, 8, 1)
        me.position = 8
        me.seen_changes = 0
        yield from me.wait()

    def lets_go() -> Step:
        yield from Receiver(0, 8, 1).give_back(1, is_late=is_late)  # Receiver::release_record

    return a_full_ring(Process("receiver 0", reads), Process("another thread", lets_go))


def test_a_view_that_is_let_go_wakes_a_sender_that_has_room_now() -> None:
    a_view_is_let_go(is_late=True).holds(50)


def test_a_view_that_is_let_go_below_the_hint_leaves_both_asleep() -> None:
    """A quarter of the ring is wanted, one record would fit, and the receiver waits for it: until they look up."""
    a_view_is_let_go(is_late=False).fails(ASLEEP)


def slow_receiver(mutation: str = "") -> Scene:
    """It gives one record back when the sender has waited for long, and then does something else."""

    def time() -> Step:
        yield until("since", bool)
        yield cas("since", "waits", "waits for long")

    def reads() -> Step:
        yield until("since", is_long)
        yield from Receiver(0, 8, 1, mutation).give_back(1)

    return a_full_ring(Process("time", time), Process("receiver 0", reads))


def is_long(since: str) -> bool:
    return since == "waits for long"


def test_a_sender_that_has_waited_for_long_is_woken_for_any_room() -> None:
    slow_receiver().holds(30)


def test_sender_without_patience_sleeps_although_the_ring_has_room() -> None:
    slow_receiver("no patience").fails(ASLEEP)
