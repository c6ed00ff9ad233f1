"""An inbox, step by step: its lanes, their senders, its one receiver, and their reapers. For test_ready.py (a receiver
that is there from the first record on) and test_replaced.py (one that comes later).

    here                  native
    Sender.come           sender.h    the constructor: claims the lane, looks for a receiver that wants to join
    Sender.try_reserve, look_at_ends, admit: sender.h, of the same names, with receiver_death = 1
    Sender.commit         sender.h    Pool::pend's receiver; then from lane_->committed.store on: order publish,
                                      order ready, order bell
    Sender.close          sender.h    Sender::close
    Receiver.come         receiver.h  the constructor, for a place that was closed, or left by a dead receiver
    Receiver.try_find     receiver.h  Receiver::try_find for an inbox: order ready. find_in is a look at committed
    Receiver.was_admitted, look_at_ends (with sender_death = 0), is_awaited, let_go: receiver.h, of the same names
    reap_sender, reap_receiver
                          reap.h      reap_holdings for lanes, and for a receiver; Attachment::reap: identity,
                                      header.changes, wake_everybody

A position counts records. `committed` of a lane has one number for each of its records: the epoch of the receiver that
was counted when it was sent, or NO_RECEIVER. There is always room, and one receiver: the rest is test_ring.py's.
"""

from collections.abc import Callable

from tests.model import orders
from tests.model.explorer import (
    RELAXED,
    Step,
    cas,
    exchange,
    fetch_add,
    fetch_and,
    fetch_or,
    load,
    must,
    store,
    until,
    until_gone,
)
from tests.model.native import lowest, put_out, ring, ring_all, wait
from tests.model.scene import Words

LANES = 2
NO_RECEIVER = 0
FIRST = 1  # the epoch of the first in every place


def inbox(senders: tuple[str, ...] = ("live", "live"), receiver: str = "live") -> Words:
    """The peer of each slot; a receiver that is live is counted in every lane, one that is dead or closed in none."""
    words: Words = {"ready": 0, "changes": 0, "rings": 0, "parked": 0, "receiver": (receiver, FIRST)}
    for lane, state in enumerate(senders):
        words["word", lane] = (state, 0 if state == "expected" else FIRST)
        words["committed", lane] = ()
        words["joining", lane] = 0
        words["mode", lane] = ("counted" if receiver == "live" else "out", FIRST)
        words["released", lane] = words["read", lane] = 0
    return words


class Sender:
    def __init__(self, lane: int, mutation: str = "", epoch: int = FIRST) -> None:
        self.lane, self.mutation, self.epoch = lane, mutation, epoch
        self.committed: tuple[int, ...] = ()
        self.seen_changes = -1
        self.has_receivers = True

    def come(self, before: tuple[str, int]) -> Step:
        self.epoch = before[1] + 1
        yield cas(("word", self.lane), before, ("live", self.epoch), orders.end.acq_rel)  # Channel::claim
        self.committed = yield load(("committed", self.lane), orders.publish.acquire)
        mode, _ = yield load(("mode", self.lane), orders.mode.acquire)
        if mode == "joining" and "the constructor does not look who is joining" not in self.mutation:
            yield fetch_or(("joining", self.lane), 1, orders.joining.acq_rel)
        del mode
        yield fetch_add("changes", 1, orders.changes.acq_rel)

    def send_all(self, records: int) -> Step:
        """Waits for a receiver where there is none; then closes."""
        for _ in range(records):
            yield from self.send()
        yield from self.close()

    def send(self) -> Step:
        while True:
            is_sent = yield from self.try_send()
            if is_sent:
                return
            yield until(("mode", self.lane), is_in)  # the caller tries again

    def send_to(self, peer: str) -> Step:
        """Reserves, and aborts while it is not that receiver, which says its epoch there, that is counted."""
        while True:
            yield from self.try_reserve()
            mode, counted = yield load(("mode", self.lane), orders.mode.acquire)
            needed = yield load(peer)
            if mode == "counted" and counted == needed:
                yield from self.commit()
                return
            del mode, counted, needed

    def try_send(self) -> Step:
        yield from self.try_reserve()
        if self.has_receivers:
            yield from self.commit()
        return self.has_receivers

    def try_reserve(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes != self.seen_changes:
            yield from self.look_at_ends()
        del changes
        joining = yield load(("joining", self.lane), orders.joining.acquire)
        if joining != 0:
            yield from self.admit()

    def look_at_ends(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        mode, _ = yield load(("mode", self.lane), orders.mode.acquire)
        if mode == "joining" and "look_at_ends does not ask for it" not in self.mutation:
            yield fetch_or(("joining", self.lane), 1, orders.joining.acq_rel)  # it may not have asked yet
        self.has_receivers = mode != "out"
        self.seen_changes = changes

    def admit(self) -> Step:
        joining = yield exchange(("joining", self.lane), 0, orders.joining.acq_rel)
        if joining != 0:
            mode, epoch = yield load(("mode", self.lane), orders.mode.acquire)
            if mode == "joining":
                yield store(("released", self.lane), len(self.committed), RELAXED)
                yield cas(("mode", self.lane), ("joining", epoch), ("counted", epoch), orders.mode.acq_rel)
                self.has_receivers = True
            del mode, epoch
        del joining
        yield from ring_all()

    def commit(self) -> Step:
        mode, epoch = yield load(("mode", self.lane), orders.mode.acquire)  # Pool::pend: the counted receiver
        self.committed = (*self.committed, epoch if mode == "counted" else NO_RECEIVER)
        del mode, epoch
        if "ready before committed" in self.mutation:
            yield fetch_or("ready", 1 << self.lane, orders.ready.release)
            yield store(("committed", self.lane), self.committed, orders.publish.release)
        else:
            yield store(("committed", self.lane), self.committed, orders.publish.release)
            yield fetch_or("ready", 1 << self.lane, orders.ready.release)
        yield from ring()

    def close(self) -> Step:
        yield cas(("word", self.lane), ("live", self.epoch), ("closed", self.epoch), orders.end.acq_rel)
        yield fetch_or("ready", 1 << self.lane, orders.ready.release)
        yield fetch_add("changes", 1, orders.changes.acq_rel)
        yield from ring_all()


class Receiver:
    def __init__(self, mutation: str = "", epoch: int = FIRST, is_counted: bool = True) -> None:
        self.mutation, self.epoch = mutation, epoch
        self.position = [0] * LANES
        self.is_counted = [is_counted] * LANES
        self.deaths = [0] * LANES  # the epoch of the last sender that it was told has died
        self.last_lane = 0
        self.seen_changes = -1

    def come(self, before: tuple[str, int]) -> Step:
        self.epoch = before[1] + 1
        yield cas("receiver", before, ("live", self.epoch), orders.end.acq_rel)  # Channel::claim
        for i in range(LANES):
            yield store(("mode", i), ("joining", self.epoch), orders.mode.release)
            if "the constructor does not ask" not in self.mutation:
                yield fetch_or(("joining", i), 1, orders.joining.acq_rel)
        yield fetch_add("changes", 1, orders.changes.acq_rel)

    def receive(self, most: int = 1 << 30) -> Step:
        """Until the channel ends, or it has had enough and leaves: what it read, and the deaths that it was told of."""
        while most > 0:
            outcome = yield from self.try_find()
            if outcome == "end of channel":
                return tuple(self.position), tuple(self.deaths)
            if outcome == "found":
                most -= 1
            if outcome == "nothing":
                yield from wait(1, self.is_awaited)
        yield from self.let_go()
        return tuple(self.position), tuple(self.deaths)

    def try_find(self) -> Step:
        outcome = yield from self.look_at_ends()
        if outcome != "nothing":
            return outcome
        del outcome
        while True:
            ready = yield load("ready", orders.ready.acquire)
            if ready == 0:
                break
            later = ready & ~((2 << self.last_lane) - 1)
            i = lowest(later or ready)  # in turn: no sender starves another
            del ready, later
            self.last_lane = i
            is_found = yield from self.find_in(i)
            if is_found:
                return "found"
            del is_found
            is_unread = False
            if "looks before clearing" in self.mutation:
                is_unread = yield from self.is_unread(i)
            yield fetch_and("ready", ~(1 << i), orders.ready.acquire)  # cleared before the last look
            if "no second look who was admitted" in self.mutation and not self.is_counted[i]:
                continue
            if "looks before clearing" not in self.mutation and "no last look" not in self.mutation:
                is_unread = yield from self.is_unread(i)
            if is_unread:
                yield fetch_or("ready", 1 << i, orders.ready.release)
            del is_unread, i
        outcome = yield from self.look_at_ends()
        return outcome

    def find_in(self, i: int) -> Step:
        is_counted = yield from self.was_admitted(i)
        if not is_counted:
            return False
        committed = yield load(("committed", i), orders.publish.acquire)
        if len(committed) == self.position[i]:
            return False
        sent_to = committed[self.position[i]]
        must(sent_to == self.epoch, f"a record that was sent to receiver {sent_to} came to receiver {self.epoch}")
        del committed, sent_to
        self.position[i] += 1
        yield store(("read", i), self.position[i], RELAXED)  # pass
        return True

    def is_unread(self, i: int) -> Step:
        """Whether it is counted there, and has not read all."""
        is_counted = yield from self.was_admitted(i)
        if not is_counted:
            return False
        committed = yield load(("committed", i), orders.publish.acquire)
        return len(committed) != self.position[i]

    def was_admitted(self, i: int) -> Step:
        if self.is_counted[i]:
            return True
        mode, _ = yield load(("mode", i), orders.mode.acquire)
        if mode == "counted":
            self.position[i] = yield load(("released", i), orders.room.acquire)
            yield store(("read", i), self.position[i], RELAXED)
            self.is_counted[i] = True
        return self.is_counted[i]

    def look_at_ends(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes == self.seen_changes:
            return "nothing"
        is_all_ended = True
        for i in range(LANES):
            state, epoch = yield load(("word", i), orders.end.acquire)
            if state in ("live", "expected"):
                is_all_ended = False
            if state != "dead" or self.deaths[i] == epoch:
                continue
            is_unread = yield from self.is_unread(i)
            if is_unread and "look_at_ends does not look after it" not in self.mutation:
                yield fetch_or("ready", 1 << i, orders.ready.release)  # what it had committed comes first
                return "nothing"
            del is_unread, state
            self.deaths[i] = epoch
            return "told"  # there may be more to tell: seen_changes stays
        if is_all_ended:
            ready = yield load("ready", orders.ready.acquire)
            return "nothing" if ready != 0 else "end of channel"
        self.seen_changes = changes
        return "nothing"

    def is_awaited(self) -> Step:
        changes = yield load("changes", orders.changes.acquire)
        if changes != self.seen_changes:
            return True
        ready = yield load("ready", orders.ready.acquire)
        return ready != 0

    def let_go(self) -> Step:
        for i in range(LANES):
            yield from put_out(("mode", i), self.epoch)
        yield cas("receiver", ("live", self.epoch), ("closed", self.epoch), orders.end.acq_rel)
        yield fetch_add("changes", 1, orders.changes.acq_rel)


def reap_sender(peer: str, lane: int, mutation: str = "", epoch: int = FIRST, is_followed: bool = True) -> Step:
    yield until_gone(peer)
    actual = yield cas(("word", lane), ("live", epoch), ("dead", epoch), orders.end.acq_rel)
    if actual == ("live", epoch) and "the reaper says nothing" not in mutation:
        yield fetch_or("ready", 1 << lane, orders.ready.release)  # it may have died between committing and saying so
    del actual
    if is_followed:
        yield from bury(peer)
    yield from tell_of_a_death(mutation)


def reap_receiver(peer: str, mutation: str = "", epoch: int = FIRST) -> Step:
    yield until_gone(peer)
    actual = yield cas("receiver", ("live", epoch), ("dead", epoch), orders.end.acq_rel)
    if actual == ("live", epoch):
        for i in range(LANES):
            yield from put_out(("mode", i), epoch, mutation)
        yield fetch_and("parked", 0, orders.bell.seq_cst_then)
    del actual
    yield from bury(peer)
    yield from tell_of_a_death(mutation)


def bury(peer: str) -> Step:
    """From then on its places may be had: its identity says dead. Left out where no peer follows."""
    yield fetch_add("changes", 1, orders.changes.acq_rel)
    yield store(("is buried", peer), True, orders.identity.release)


def tell_of_a_death(mutation: str) -> Step:
    yield fetch_add("changes", 1, orders.changes.release)
    if "the reaper wakes nobody" not in mutation:
        yield from ring_all()


def is_in(mode: tuple[str, int]) -> bool:
    return mode[0] != "out"


def is_true(word: object) -> bool:
    return bool(word)


def follows(peer: str, at: tuple[str, int] | str, come: Callable[[tuple[str, int]], Step]) -> Step:
    """Takes the slot of a dead peer, when that is reaped."""
    yield until(("is buried", peer), is_true)
    before = yield load(at, orders.end.acquire)
    yield from come(before)
