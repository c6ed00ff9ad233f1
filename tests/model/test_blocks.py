"""The counts of a block: never free while a peer holds it or was granted it, never lost when none does.

    here                native
    lock, unlock        peers.h   as test_lock.py has them, without sleeping: it looks at the holder of a taken lock
    take                pool.h    Pool::try_take for a pool with room for one block: sweep, order block, entries
    open_block          pool.h    Pool::open with a grant; grant, release: Pool::grant, Pool::release_within
    pend, open_pending  pool.h    Pool::pend, Pool::open_pending
    return_if_last, announce_return, drop_receiver, give_back, recover_block, rebuild: of the same names
    reap_holdings       reap.h    of the same name; reap and put_out are in native.py
    let_go, fail        receiver.h  of the same names;  leave: Attachment::leave (peers.h)
    claim               channel.h Channel::claim

Three things must be as here, and the tests that leave them out show why: a reaper that finds another peer in the slot
after it has read the epoch goes no further (reap_holdings); a receiver that leaves looks at pending under the lock
(drop_receiver); and it closes its word last, after which no peer gives anything back in its name (let_go, end_it).

Two reapers work on the same dead peer, one of them as slowly as can be, and its slot is taken again meanwhile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests import tiers
from tests.model import orders
from tests.model.explorer import (
    Process,
    Step,
    View,
    cas,
    exchange,
    fence,
    fetch_add,
    is_gone,
    load,
    must,
    store,
    until,
    until_gone,
)
from tests.model.native import put_out, reap
from tests.model.scene import WAITS, Scene, Words

FREE, LIVE, RETURNED = "free", "live", "returned"


def segment(*names: str) -> Words:
    """One block, live, generation 1; the peer of each slot."""
    words: Words = {"lock": 0, "pool lock": 0, "state": LIVE, "generation": 1, "units": 0, "returns": 0, "swept": 0}
    words |= {"entries": (0,), "taker": 0, "pending": 0, "position": 0, "committed": 0}
    for slot, name in enumerate(names):
        words["identity", slot] = ("live", name)
        words["epoch", slot] = 1
        words["held", slot] = 0
        for to in range(len(names)):
            words["grants", slot, to] = 0
    return words


class Peer:
    """What every process does with the block. `mutation` leaves one thing out."""

    def __init__(self, slot: int, peers: int, mutation: str = "", epoch: int = 1) -> None:
        self.slot, self.peers, self.mutation, self.epoch = slot, peers, mutation, epoch

    # ── LOCK pool, LOCK block ──
    def lock(self, word: str) -> Step:
        while True:
            actual = yield cas(word, 0, (self.slot, self.epoch), orders.lock.acquire)
            if actual == 0:
                return False
            state, peer = yield load(("identity", actual[0]), orders.identity.acquire)
            gone = state not in ("live", "dying")
            if not gone:
                gone = yield is_gone(peer)
            if gone:
                again = yield cas(word, actual, (self.slot, self.epoch), orders.lock.acquire)
                if again == actual:
                    return True
                del again

    def unlock(self, word: str) -> Step:
        yield exchange(word, 0, orders.lock.release)

    def take_over(self, word: str, slot: int, epoch: int) -> Step:
        actual = yield load(word, orders.lock.acquire)
        if actual != (slot, epoch):
            return False
        again = yield cas(word, actual, (self.slot, self.epoch), orders.lock.acquire)
        return again == actual

    def lock_block(self) -> Step:
        has_died = yield from self.lock("lock")
        if has_died:
            yield from self.recount()

    # ── counts; LOCK block is held ──
    def recount(self) -> Step:
        units = 0
        for pair in range(self.peers * self.peers):
            many = yield load(("grants", pair // self.peers, pair % self.peers))
            units += many
        yield store("units", units)

    def add_held(self, by: int) -> Step:
        many = yield load(("held", self.slot))
        yield store(("held", self.slot), many + by)
        return many

    def return_if_last(self) -> Step:
        pending = yield load("pending")
        if pending != 0:
            return False
        units = yield load("units")
        if units != 0:
            return False
        for p in range(self.peers):
            held = yield load(("held", p))
            if held != 0:
                return False
        yield store("state", RETURNED, orders.block.release)
        return True

    def announce_return(self) -> Step:
        yield fetch_add("returns", 1, orders.returns.release)

    def is_current(self, generation: int) -> Step:
        state = yield load("state", orders.block.acquire)
        current = yield load("generation")
        return state == LIVE and current == generation

    # ── take, grant, open, release ──
    def take(self) -> Step:
        """The generation, or None: no room now."""
        has_died = yield from self.lock("pool lock")
        if has_died:
            yield from self.rebuild()
        swept = yield load("swept")
        returns = yield load("returns", orders.returns.acquire)
        if swept != returns:
            yield from self.sweep()
        del swept, returns
        entries = yield load("entries")
        state = yield load("state", orders.block.acquire)
        if entries != () or state != FREE:
            yield from self.unlock("pool lock")
            return None
        generation = yield load("generation")
        yield store("generation", generation + 1)
        yield store("pending", 0)
        yield store("units", 0)
        yield store("taker", self.slot)
        for p in range(self.peers):
            yield store(("held", p), 0)
        yield store(("held", self.slot), 1)
        yield store("state", LIVE, orders.block.release)  # the fields before
        yield store("entries", (0,))
        yield from self.unlock("pool lock")
        return generation + 1

    def sweep(self) -> Step:
        returns = yield load("returns", orders.returns.acquire)
        entries = yield load("entries")
        state = yield load("state", orders.block.acquire)
        if entries != () and state == RETURNED:
            yield cas("state", RETURNED, FREE, orders.block.acq_rel)
            entries = ()
        yield store("entries", entries)
        yield store("swept", returns)

    def rebuild(self) -> Step:
        returns = yield load("returns", orders.returns.acquire)
        state = yield load("state", orders.block.acquire)
        if state == RETURNED:
            yield store("state", FREE, orders.block.release)
        yield store("entries", (0,) if state == LIVE else ())
        yield store("swept", returns)

    def grant(self, to: int) -> Step:
        yield from self.lock_block()
        state, _ = yield load(("identity", to), orders.identity.acquire)
        if state == "live" or self.mutation == "grant to anybody":
            units = yield load("units")
            yield store("units", units + 1)  # derived: may be too high, never too low
            many = yield load(("grants", self.slot, to))
            yield store(("grants", self.slot, to), many + 1)
        yield from self.unlock("lock")

    def open_block(self, generation: int) -> Step:
        yield from self.lock_block()
        is_ours = yield from self.is_current(generation)
        if is_ours:
            is_granted = yield from self.use_grant()
            if not is_granted:
                yield from self.add_held(1)
        yield from self.unlock("lock")
        return is_ours

    def use_grant(self) -> Step:
        for giver in range(self.peers):
            many = yield load(("grants", giver, self.slot))
            if many != 0:
                yield from self.add_held(1)
                yield store(("grants", giver, self.slot), many - 1)
                units = yield load("units")
                yield store("units", units - 1)
                return True
        return False

    def release(self, generation: int) -> Step:
        yield from self.lock_block()
        is_last = False
        is_ours = yield from self.is_current(generation)
        if is_ours:
            many = yield from self.add_held(-1)
            if many == 1:
                is_last = yield from self.return_if_last()
        yield from self.unlock("lock")
        if is_last:
            yield from self.announce_return()

    def hold(self, generation: int) -> Step:
        """While it holds a lease, it finds the block as it left it."""
        is_ours = yield from self.is_current(generation)
        must(is_ours, f"the block was given away while the peer in slot {self.slot} held it")

    # ── channel ──
    def pend(self, receivers: int) -> Step:
        yield from self.lock_block()
        committed = yield load("committed")
        yield store("position", committed)
        yield fence(orders.pend.seq_cst_then)  # see put_out
        mask = 0
        for r in range(receivers):
            mode, _ = yield load(("mode", r), orders.mode.acquire)
            if mode == "counted":
                mask |= 1 << r
        yield store("pending", mask)
        yield from self.unlock("lock")

    def open_pending(self, generation: int, r: int) -> Step:
        yield from self.lock_block()
        is_ours = yield from self.is_current(generation)
        pending = yield load("pending")
        is_granted = is_ours and pending >> r & 1 == 1
        if is_granted:
            yield from self.add_held(1)
            yield store("pending", pending & ~(1 << r))
        yield from self.unlock("lock")
        return is_granted

    def drop_receiver(self, r: int) -> Step:
        if self.mutation == "drop without the lock":
            pending = yield load("pending")
            if pending >> r & 1 == 0:
                return
            del pending
        else:
            state = yield load("state", orders.block.acquire)
            if state != LIVE:
                return
            del state
        yield from self.lock_block()
        pending = yield load("pending")
        yield store("pending", pending & ~(1 << r))
        state = yield load("state")
        is_last = False
        if state == LIVE:
            is_last = yield from self.return_if_last()
        yield from self.unlock("lock")
        if is_last:
            yield from self.announce_return()

    def fail(self, r: int) -> Step:
        """The word says failed at once, and the keeper holds the place until all is given back."""
        mine = ("failed", self.slot, self.epoch)
        yield store(("keeper", r), mine, orders.end.release)
        yield cas(("word", r), ("live", self.slot, self.epoch), mine, orders.end.acq_rel)
        yield from put_out(("mode", r), 1)
        yield from self.drop_receiver(r)
        yield cas(("keeper", r), mine, None, orders.end.acq_rel)

    def claim(self, r: int) -> Step:
        """Takes the place of a receiver that has closed or failed. Returns whether it was free."""
        state, owner, epoch = yield load(("word", r), orders.end.acquire)
        if state == "live":
            return False
        if state == "failed":
            keeper = yield load(("keeper", r), orders.end.acquire)
            if keeper is not None and self.mutation != "no keeper":
                return False
            del keeper
            peer_state, _ = yield load(("identity", owner), orders.identity.acquire)
            if peer_state == "dying":
                return False
            del peer_state
        actual = yield cas(("word", r), (state, owner, epoch), ("live", self.slot, self.epoch), orders.end.acq_rel)
        return actual == (state, owner, epoch)

    def let_go(self, r: int) -> Step:
        """The word is closed last: from then on the place may be another peer's."""
        if self.mutation == "closed before all is given back":
            yield cas(
                ("word", r), ("live", self.slot, self.epoch), ("closed", self.slot, self.epoch), orders.end.acq_rel
            )
        yield from put_out(("mode", r), 1)
        yield from self.drop_receiver(r)
        yield cas(("word", r), ("live", self.slot, self.epoch), ("closed", self.slot, self.epoch), orders.end.acq_rel)

    # ── reaping ──
    def reap(self, peer: str, slot: int, receivers: int = 0) -> Step:
        yield from reap(peer, slot, lambda identity: self.reap_all(slot, identity, receivers))

    def reap_all(self, slot: int, identity: Any, receivers: int) -> Step:
        yield from self.reap_holdings(slot, identity, receivers)
        if self.mutation != "reaper announces nothing":
            yield from self.announce_return()  # it may have died between giving a block back and saying so

    def leave(self, me: str, receivers: int) -> Step:
        yield cas(("identity", self.slot), ("live", me), ("dying", me), orders.identity.acq_rel)
        yield from self.reap_holdings(self.slot, ("dying", me), receivers)
        yield cas(("identity", self.slot), ("dying", me), ("left", me), orders.identity.acq_rel)

    def reap_holdings(self, slot: int, identity: Any, receivers: int) -> Step:
        epoch = yield load(("epoch", slot))
        now = yield load(("identity", slot), orders.identity.acquire)
        if now != identity and self.mutation != "epoch of whoever is there":
            return  # what was read as its epoch may be that of the next one
        if now == identity:
            has_it = yield from self.take_over("pool lock", slot, epoch)
            if has_it:
                yield from self.rebuild()
                yield from self.unlock("pool lock")
            del has_it
        del now
        dead_receivers = 0
        for r in range(receivers):
            is_its = yield from self.end_it(r, slot, epoch, identity)
            if is_its:
                dead_receivers |= 1 << r
                yield from put_out(("mode", r), 1)
            del is_its
        yield from self.give_back(slot, epoch, identity, dead_receivers)
        for r in range(receivers):
            keeper = yield load(("keeper", r), orders.end.acquire)
            if keeper is not None and keeper[1:] == (slot, epoch):
                yield cas(("keeper", r), keeper, None, orders.end.acq_rel)
            del keeper

    def end_it(self, r: int, slot: int, epoch: int, identity: Any) -> Step:
        """A closed end has given everything back, and may be another peer's already."""
        state, owner, its_epoch = yield load(("word", r), orders.end.acquire)
        if (owner, its_epoch) != (slot, epoch):
            return False
        now = yield load(("identity", slot), orders.identity.acquire)
        if now != identity:
            return False
        if state == "failed" and self.mutation != "failed ends are reaped":
            keeper = yield load(("keeper", r), orders.end.acquire)
            return keeper == (state, owner, its_epoch)
        if state == "live":
            yield cas(("word", r), (state, owner, its_epoch), ("dead", owner, its_epoch), orders.end.acq_rel)
        return state != "closed" or self.mutation == "closed ends are reaped"

    def give_back(self, slot: int, epoch: int, identity: Any, dead_receivers: int) -> Step:
        has_it = yield from self.take_over("lock", slot, epoch)
        if has_it:
            yield from self.recount()
        else:
            state = yield load("state", orders.block.acquire)
            if state != LIVE:
                return
            del state
            yield from self.lock_block()
        del has_it
        is_last = False
        state = yield load("state")
        now = yield load(("identity", slot), orders.identity.acquire)
        if state == LIVE and (now == identity or self.mutation == "no look whether it is still that peer"):
            del state, now
            yield from self.clear(slot, dead_receivers)
            is_last = yield from self.return_if_last()
        yield from self.unlock("lock")
        if is_last:
            yield from self.announce_return()

    def clear(self, slot: int, dead_receivers: int) -> Step:
        yield store(("held", slot), 0)
        units = yield load("units")
        if units != 0:
            for p in range(self.peers):
                yield store(("grants", slot, p), 0)
                yield store(("grants", p, slot), 0)
            yield from self.recount()
        pending = yield load("pending")
        if pending != 0:
            pending &= ~dead_receivers
            taker = yield load("taker")
            if taker == slot:
                position = yield load("position")
                committed = yield load("committed", orders.publish.acquire)
                if position >= committed and self.mutation != "unpublished is kept":
                    pending = 0
                if position < committed and self.mutation == "published is withdrawn":
                    pending = 0
            yield store("pending", pending)


def reaper(slot: int, peers: int, peer: str, mutation: str, receivers: int = 0) -> Step:
    yield until_gone(peer)
    yield from Peer(slot, peers, mutation).reap(peer, 0, receivers)


def nothing_is_left(view: View) -> None:
    must(view["lock"] == 0 and view["pool lock"] == 0, "a lock is left")
    must(view["state"] != LIVE, "the block is lost: nobody holds it, and it was not given back")


# ── two reapers, and the slot taken again ────────────────────────────────────────────────────────────────────────────
DIES, OTHER = 0, 1


def a_slot_taken_again(mutation: str = "") -> Scene:
    """Slot 0 dies holding a lease; two reap it; a newcomer in its slot opens the block, which another still holds."""
    peers = 4

    def dies() -> Step:
        yield from Peer(DIES, peers, mutation).release(1)

    def other() -> Step:
        me = Peer(OTHER, peers, mutation)
        yield until(("identity", DIES), is_over)
        yield from me.hold(1)
        yield from me.release(1)

    def newcomer() -> Step:
        yield until(("identity", DIES), is_over)
        yield cas(("identity", DIES), ("dead", "dies"), ("live", "newcomer"), orders.identity.acq_rel)
        before = yield fetch_add(("epoch", DIES), 1, orders.epoch.acq_rel)
        me = Peer(DIES, peers, mutation, before + 1)
        is_ours = yield from me.open_block(1)
        if is_ours:
            yield from me.hold(1)
            yield from me.release(1)
            return "held it"
        return "came too late"

    words = segment("dies", "other", "reaper 0", "reaper 1")
    words["held", DIES] = words["held", OTHER] = 1
    processes = [
        Process("dies", dies, may_die=True),
        Process("other", other, is_daemon=True),
        Process("newcomer", newcomer, is_daemon=True),
        *(Process(f"reaper {i}", partial(reaper, 2 + i, peers, "dies", mutation), is_daemon=True) for i in range(2)),
    ]

    def at_end(view: View) -> None:
        if view.is_dead("dies"):
            must(view.is_done("other") and view.is_done("newcomer"), "somebody is left waiting")
            nothing_is_left(view)

    return Scene(words, processes, at_end=at_end, must_end=True)


def is_over(identity: tuple[str, str]) -> bool:
    return (identity[0] != "live" and identity[0] != "dying") or identity[1] == "newcomer"


def test_a_slow_reaper_leaves_the_counts_of_the_next_peer_alone() -> None:
    a_slot_taken_again().holds(3_000)


def test_reaper_without_identity_check_ends_a_lease_of_the_next_peer() -> None:
    a_slot_taken_again("no look whether it is still that peer").fails("given away while")


def test_epoch_read_after_reuse_of_the_slot_steals_a_live_peers_lock() -> None:
    a_slot_taken_again("epoch of whoever is there").fails("given away while")


# ── grants ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def granting(who_dies: int, mutation: str = "", reapers: int = 1) -> Scene:
    """Slot 0 holds the block, grants it to the other and releases; the other opens it, holds it and releases."""
    names = ["gives", "gets"] if who_dies == 0 else ["gets", "gives"]
    dies = names[0]
    gives, gets = names.index("gives"), names.index("gets")
    peers = 2 + reapers

    def giving() -> Step:
        me = Peer(gives, peers, mutation)
        yield from me.grant(gets)
        yield store("sent", 1, orders.publish.release)
        yield from me.hold(1)
        yield from me.release(1)

    def getting() -> Step:
        me = Peer(gets, peers, mutation)
        yield until("sent", bool)
        is_ours = yield from me.open_block(1)
        if is_ours:
            yield from me.hold(1)
            yield from me.release(1)
        return is_ours

    words = segment(*names, *(f"reaper {i}" for i in range(reapers)))
    words["held", gives] = 1
    words["sent"] = 0
    processes = [
        Process("gives", giving, may_die=dies == "gives"),
        Process("gets", getting, may_die=dies == "gets", is_daemon=True),
        *(
            Process(f"reaper {i}", partial(reaper, 2 + i, peers, dies, mutation), is_daemon=True)
            for i in range(reapers)
        ),
    ]

    def at_end(view: View) -> None:
        nothing_is_left(view)
        if not view.is_dead("gives") and not view.is_dead("gets"):
            must(view.result("gets"), "what was granted could not be opened")

    return Scene(words, processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize(("who_dies", "model"), [(0, "sc"), (1, "sc"), (1, "tso")])
def test_granted_block_is_kept_until_opened_and_freed_after_any_death(who_dies: int, model: str) -> None:
    granting(who_dies).holds(500, model)


def test_a_grant_to_one_who_was_reaped_already_is_never_given_back() -> None:
    granting(1, "grant to anybody").fails("the block is lost")


# ── taking and sweeping ──────────────────────────────────────────────────────────────────────────────────────────────
def taking(mutation: str = "") -> Scene:
    """Room for one block. Slot 0 takes it and gives it back, if it lives; another wants it, and waits for a return."""
    peers = 3

    def dies() -> Step:
        me = Peer(0, peers, mutation)
        generation = yield from me.take()
        if generation is not None:
            yield from me.hold(generation)
            yield from me.release(generation)

    def wants() -> Step:
        me = Peer(1, peers, mutation)
        generation = None
        while generation is None:
            before = yield load("returns", orders.returns.acquire)
            generation = yield from me.take()
            if generation is None:
                yield until("returns", differs_from(before))
            del before
        yield from me.hold(generation)
        yield from me.release(generation)

    words = segment("dies", "wants", "reaper 0")
    words |= {"state": FREE, "generation": 0, "entries": ()}
    processes = [
        Process("dies", dies, may_die=True),
        Process("wants", wants),
        Process("reaper 0", partial(reaper, 2, peers, "dies", mutation), is_daemon=True),
    ]
    return Scene(words, processes, at_end=nothing_is_left, must_end=True)


def differs_from(before: int) -> Callable[[int], bool]:
    return DIFFERS.setdefault(before, lambda value: value != before)


DIFFERS: dict[int, Callable[[int], bool]] = {}


def test_a_death_anywhere_between_taking_and_giving_back_loses_no_memory() -> None:
    taking().holds(1_000)


def test_a_reaper_must_say_again_that_memory_came_back() -> None:
    taking("reaper announces nothing").fails(WAITS)


def opening_what_is_gone(mutation: str = "") -> Scene:
    """The block is taken anew while a peer opens it by a reference of the generation before."""

    def opens() -> Step:
        is_ours = yield from Peer(1, 2, mutation).open_block(1)
        must(not is_ours, "a reference to what is gone was opened")

    def takes() -> Step:
        generation = yield from Peer(0, 2, mutation).take()
        must(generation == 2, "there is room")

    words = segment("takes", "opens")
    words |= {"state": RETURNED, "returns": 1}
    return Scene(words, [Process("takes", takes), Process("opens", opens)], must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_stale_reference_is_refused_while_the_block_is_retaken(model: str) -> None:
    opening_what_is_gone().holds(100, model)


def test_block_live_before_its_generation_opens_by_a_stale_reference() -> None:
    opening_what_is_gone().without("block", "release").holds(100, "tso")
    opening_what_is_gone().without("block", "release").fails("what is gone", "weak")


# ── what a channel grants ────────────────────────────────────────────────────────────────────────────────────────────
def channel(*names: str, receivers: int = 1) -> Words:
    words = segment(*names)
    words["held", 0] = 1
    for r in range(receivers):
        words["mode", r] = ("counted", 1)
        words["word", r] = ("live", 1 + r, 1)
        words["keeper", r] = None
    return words


def sender(peers: int, mutation: str, receivers: int = 1) -> Step:
    """Has a block, with the bytes in it: Sender::commit."""
    me = Peer(0, peers, mutation)
    yield from me.pend(receivers)
    yield from me.hold(1)
    yield store("committed", 1, orders.publish.release)
    yield from me.release(1)


def receiver(r: int, peers: int, mutation: str) -> Step:
    me = Peer(1 + r, peers, mutation)
    yield until("committed", bool)
    is_granted = yield from me.open_pending(1, r)
    must(is_granted, f"receiver {r} reads the record, and what it refers to is gone")
    yield from me.hold(1)
    yield from me.release(1)


def spilling(mutation: str = "", reapers: int = 2) -> Scene:
    """The sender dies, and several reap it."""
    names = ["sender", "receiver 0", *(f"reaper {i}" for i in range(reapers))]
    processes = [
        Process("sender", partial(sender, len(names), mutation), may_die=True),
        Process("receiver 0", partial(receiver, 0, len(names), mutation), is_daemon=True),
        *(
            Process(f"reaper {i}", partial(reaper, 2 + i, len(names), "sender", mutation, 1), is_daemon=True)
            for i in range(reapers)
        ),
    ]

    def at_end(view: View) -> None:
        must(view.is_done("receiver 0") or view["committed"] == 0, "the receiver is left waiting")
        nothing_is_left(view)

    return Scene(channel(*names), processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize(("reapers", "model"), [*tiers.only_in_all((1, "sc")), (2, "sc"), (1, "weak")])
def test_published_records_of_a_dead_sender_stay_others_are_withdrawn(reapers: int, model: str) -> None:
    spilling(reapers=reapers).holds(500, model)


def test_the_position_of_the_record_decides() -> None:
    spilling("unpublished is kept", reapers=1).fails("the block is lost")
    spilling("published is withdrawn", reapers=1).fails("what it refers to is gone")


def leaving(mutation: str = "") -> Scene:
    """The receiver leaves while the sender sends."""
    names = ["sender", "receiver 0"]

    def leaves() -> Step:
        yield from Peer(1, 2, mutation).let_go(0)

    processes = [Process("sender", partial(sender, 2, mutation)), Process("receiver 0", leaves)]
    return Scene(channel(*names), processes, at_end=nothing_is_left, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_a_receiver_that_leaves_while_it_is_counted_leaves_no_block_behind(model: str) -> None:
    leaving().holds(100, model)


def test_leaving_receiver_without_locked_look_misses_a_new_grant() -> None:
    leaving("drop without the lock").fails("the block is lost")


def dying_receiver(mutation: str = "") -> Scene:
    names = ["receiver 0", "sender", "reaper 0"]
    words = channel(*names)
    words |= {("held", 0): 0, ("held", 1): 1, ("word", 0): ("live", 0, 1), "taker": 1}

    def sends() -> Step:
        me = Peer(1, 3, mutation)
        yield from me.pend(1)
        yield from me.hold(1)
        yield store("committed", 1, orders.publish.release)
        yield from me.release(1)

    def receives() -> Step:
        me = Peer(0, 3, mutation)
        yield until("committed", bool)
        is_granted = yield from me.open_pending(1, 0)
        must(is_granted, "the record is there, and what it refers to is gone")
        yield from me.hold(1)
        yield from me.release(1)

    processes = [
        Process("receiver 0", receives, may_die=True),
        Process("sender", sends),
        Process("reaper 0", partial(reaper, 2, 3, "receiver 0", mutation, 1), is_daemon=True),
    ]
    return Scene(words, processes, at_end=nothing_is_left, must_end=True)


def test_a_receiver_that_dies_anywhere_gives_back_what_was_granted_to_it() -> None:
    dying_receiver().holds(500)


def succession(mutation: str = "", fails: bool = False) -> Scene:
    """A receiver closes or fails, then its process leaves; another takes its place, and is sent a record."""
    names = ["sender", "first", "second"]
    peers = 3

    def sends() -> Step:
        me = Peer(0, peers, mutation)
        yield until(("mode", 0), is_joining)
        mode = yield load(("mode", 0))
        yield cas(("mode", 0), mode, ("counted", mode[1]), orders.mode.acq_rel)  # Sender::admit
        del mode
        yield from me.pend(1)
        yield store("committed", 1, orders.publish.release)
        yield from me.release(1)

    def first() -> Step:
        me = Peer(1, peers, mutation)
        yield from me.fail(0) if fails else me.let_go(0)
        yield from me.leave("first", 1)

    def second() -> Step:
        me = Peer(2, peers, mutation)
        is_mine = False
        while not is_mine:
            yield until(("word", 0), is_closed)
            is_mine = yield from me.claim(0)
        yield store(("mode", 0), ("joining", 2), orders.mode.release)
        yield until("committed", bool)
        is_granted = yield from me.open_pending(1, 0)
        must(is_granted, "its record is there, and what it refers to was taken from it")
        yield from me.hold(1)
        yield from me.release(1)

    processes = [Process("sender", sends), Process("first", first), Process("second", second)]
    return Scene(channel(*names), processes, at_end=nothing_is_left, must_end=True)


def is_joining(mode: tuple[str, int]) -> bool:
    return mode[0] == "joining"


def is_closed(word: tuple[str, int, int]) -> bool:
    return word[0] in ("closed", "failed")


def test_slowly_leaving_receiver_takes_nothing_from_its_successor() -> None:
    succession().holds(100)


@pytest.mark.parametrize("mutation", ["closed before all is given back", "closed ends are reaped"])
def test_place_freed_before_the_records_costs_the_successor_a_record(mutation: str) -> None:
    succession(mutation).fails("taken from it")


def test_a_receiver_that_fails_takes_nothing_from_the_next_in_its_place() -> None:
    succession(fails=True).holds(100)


@pytest.mark.parametrize("mutation", ["no keeper", "failed ends are reaped"])
def test_a_failed_receiver_needs_a_keeper_until_all_is_given_back(mutation: str) -> None:
    succession(mutation, fails=True).fails("taken from it")
