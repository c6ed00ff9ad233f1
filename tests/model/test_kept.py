"""What is kept under a key: there once, whole, found by all; written by another when its writer is gone; never lost.

    here                  native
    begin, commit, abandon, get    store.h   of the same names; give_up too, which is release here, without its abandon
    look, find, link, unlink, let_go, rebuild, drop_filling, is_given_up: of the same names
    evict                 store.h   of the one block that is in the way, chosen without a look at its worth
    keep_no_longer, return_if_last, open_kept, release, give_back, try_take      pool.h, for blocks of one size
    announce_fill         store.h   until_filled is the sleep in wait_for_fill: it ends when `fills` moves, and at no
                                    other time. What a bell does beneath is in test_bell.py.
    lock, take_over       peers.h   as in test_blocks.py

The row of a block's holders is one word here, for it is changed under the block's lock, one count at a time. All keys
are in one bucket, and a chain is a word for its head and one for each next, so that each link is changed in
two steps and a death comes in between.
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
    fetch_add,
    is_gone,
    load,
    must,
    store,
    until,
    until_gone,
)
from tests.model.native import reap
from tests.model.scene import BUSY, WAITS, Scene, Words

FREE, LIVE, RETURNED = "free", "live", "returned"
NONE, FILLING, READY = "none", "filling", "ready"
FULL = "full"
MAX_ATTEMPTS = 3  # to take what was made free; 64 over there


def segment(*names: str, blocks: int = 2) -> Words:
    """So many blocks, all free; the peer of each slot."""
    words: Words = {"store lock": 0, "pool lock": 0, "head": 0, "fills": 0, "returns": 0}
    for b in range(blocks):
        words |= {("lock", b): 0, ("state", b): FREE, ("kept", b): NONE, ("key", b): "", ("next", b): 0}
        words |= {("taker", b): 0, ("bytes", b): "", ("generation", b): 0}
        words["held", b] = (0,) * len(names)
    for slot, name in enumerate(names):
        words["identity", slot] = ("live", name)
    return words


def put_there(words: Words, block: int, key: str) -> Words:
    """A peer has written it long ago, and holds it no more."""
    return words | {
        "head": block + 1,
        ("state", block): LIVE,
        ("kept", block): READY,
        ("key", block): key,
        ("bytes", block): key,
        ("next", block): words["head"],
        ("generation", block): 1,
    }


def with_one_more(held: tuple[int, ...], slot: int, by: int) -> tuple[int, ...]:
    return (*held[:slot], held[slot] + by, *held[slot + 1 :])


class Peer:
    """What every process does. `mutation` leaves one thing out."""

    def __init__(self, slot: int, peers: int, blocks: int = 2, mutation: str = "") -> None:
        self.slot, self.peers, self.blocks, self.mutation = slot, peers, blocks, mutation

    # ── LOCK store, LOCK pool, LOCK block ──
    def lock(self, word: Any) -> Step:
        while True:
            actual = yield cas(word, 0, self.slot + 1, orders.lock.acquire)
            if actual == 0:
                return False
            _, peer = yield load(("identity", actual - 1), orders.identity.acquire)
            gone = yield is_gone(peer)
            if gone:
                again = yield cas(word, actual, self.slot + 1, orders.lock.acquire)
                if again == actual:
                    return True
                del again
            del actual, peer, gone

    def unlock(self, word: Any) -> Step:
        yield exchange(word, 0, orders.lock.release)

    def take_over(self, word: Any, slot: int) -> Step:
        actual = yield load(word, orders.lock.acquire)
        if actual != slot + 1:
            return False
        again = yield cas(word, actual, self.slot + 1, orders.lock.acquire)
        return again == actual

    def lock_store(self) -> Step:
        has_died = yield from self.lock("store lock")
        if has_died and self.mutation != "no rebuild":
            yield from self.rebuild()

    # ── chains; LOCK store is held ──
    def rebuild(self) -> Step:
        yield store("head", 0)
        for b in range(self.blocks):
            state = yield load(("state", b), orders.block.acquire)
            if state == LIVE:
                kept_state = yield load(("kept", b))
                if kept_state != NONE:
                    yield from self.link(b)
                del kept_state
            del state

    def link(self, b: int) -> Step:
        head = yield load("head")
        yield store(("next", b), head)
        yield store("head", b + 1)

    def unlink(self, b: int) -> Step:
        at: Any = "head"
        for _ in range(self.blocks + 1):
            link = yield load(at)
            if link == 0:
                return
            if link - 1 == b:
                after = yield load(("next", b))
                yield store(at, after)
                return
            at = ("next", link - 1)
            del link

    def find(self, key: str) -> Step:
        link = yield load("head")
        for _ in range(self.blocks + 1):
            if link == 0:
                return None
            kept_state = yield load(("kept", link - 1))
            if kept_state != NONE:
                key_there = yield load(("key", link - 1))
                if key_there == key:
                    return link - 1
                del key_there
            del kept_state
            link = yield load(("next", link - 1))
        return None

    # ── blocks ──
    def is_unheld(self, b: int) -> Step:
        held = yield load(("held", b))
        return not any(held)

    def return_if_last(self, b: int) -> Step:
        is_unheld = yield from self.is_unheld(b)
        if not is_unheld:
            return False
        kept_state = yield load(("kept", b))
        if kept_state != NONE:
            return self.mutation != "no return of what is kept"
        yield store(("state", b), RETURNED, orders.block.release)
        return True

    def try_take(self) -> Step:
        """A block, or None. Sweeping is left to the look itself: what is returned is free."""
        yield from self.lock("pool lock")
        for b in range(self.blocks):
            state = yield load(("state", b), orders.block.acquire)
            if state == LIVE:
                del state
                continue
            del state
            generation = yield load(("generation", b))
            yield store(("generation", b), generation + 1)
            del generation
            yield store(("kept", b), NONE)
            yield store(("taker", b), self.slot)
            yield store(("held", b), with_one_more((0,) * self.peers, self.slot, 1))
            yield store(("state", b), LIVE, orders.block.release)
            yield from self.unlock("pool lock")
            return b
        yield from self.unlock("pool lock")
        return None

    def open_kept(self, b: int) -> Step:
        yield from self.lock(("lock", b))
        state = yield load(("state", b), orders.block.acquire)
        must(state == LIVE, f"block {b} was given away while it was kept")
        held = yield load(("held", b))
        yield store(("held", b), with_one_more(held, self.slot, 1))
        yield from self.unlock(("lock", b))

    def open_by_ref(self, b: int, generation: int) -> Step:
        yield from self.lock(("lock", b))
        state = yield load(("state", b), orders.block.acquire)
        current = yield load(("generation", b))
        is_there = state == LIVE and current == generation
        if is_there:
            held = yield load(("held", b))
            yield store(("held", b), with_one_more(held, self.slot, 1))
            del held
        yield from self.unlock(("lock", b))
        return is_there

    def release(self, b: int) -> Step:
        yield from self.lock(("lock", b))
        held = yield load(("held", b))
        held = with_one_more(held, self.slot, -1)
        yield store(("held", b), held)
        is_last = False
        if held[self.slot] == 0:
            del held
            is_last = yield from self.return_if_last(b)
        yield from self.unlock(("lock", b))
        if is_last:
            yield fetch_add("returns", 1, orders.returns.release)

    def keep_no_longer(self, b: int, only_if_unheld: bool) -> Step:
        yield from self.lock(("lock", b))
        if only_if_unheld:
            is_unheld = yield from self.is_unheld(b)
            if not is_unheld:
                yield from self.unlock(("lock", b))
                return False
            del is_unheld
        yield store(("kept", b), NONE)
        is_last = yield from self.return_if_last(b)
        yield from self.unlock(("lock", b))
        if is_last:
            yield fetch_add("returns", 1, orders.returns.release)
        return True

    # ── store ──
    def is_given_up(self, b: int) -> Step:
        taker = yield load(("taker", b))
        kept_state = yield load(("kept", b))
        held = yield load(("held", b))
        return kept_state == FILLING and held[taker] == 0 and self.mutation != "only a commit ends it"

    def look(self, key: str) -> Step:
        """The block and whether it is ready, or None."""
        b = yield from self.find(key)
        if b is None:
            return None
        is_over = yield from self.is_given_up(b)
        if is_over:
            yield from self.let_go(b)
            return None
        kept_state = yield load(("kept", b))
        if kept_state == READY:
            yield from self.open_kept(b)
        return b, kept_state == READY

    def begin(self, key: str) -> Step:
        """("hit", block), ("fill", block), ("wait", fills) or ("full", returns)."""
        returns = yield load("returns", orders.returns.acquire)
        ours, is_full = None, False
        for attempts in range(MAX_ATTEMPTS + 1):
            yield from self.lock_store()
            fills = yield load("fills", orders.fills.acquire)
            entry = yield from self.look(key)
            yield from self.unlock("store lock")
            if entry is not None:
                return ("hit", entry[0]) if entry[1] else ("wait", fills)
            del fills, entry
            if is_full:
                return FULL, returns
            ours = yield from self.try_take()
            if ours is not None:
                break
            has_room = yield from self.evict()
            is_full = not has_room or attempts + 1 == MAX_ATTEMPTS
            del has_room
        yield from self.lock_store()
        fills = yield load("fills", orders.fills.acquire)
        entry = None
        if self.mutation != "one look":
            entry = yield from self.look(key)
        if entry is None:
            yield store(("key", ours), key)
            yield store(("kept", ours), FILLING)
            yield from self.link(ours)
            yield from self.unlock("store lock")
            return "fill", ours
        yield from self.unlock("store lock")
        yield from self.release(ours)
        return ("hit", entry[0]) if entry[1] else ("wait", fills)

    def commit(self, b: int) -> Step:
        yield from self.lock_store()
        yield store(("kept", b), READY)
        yield from self.unlock("store lock")
        yield from self.announce_fill()

    def abandon(self, b: int) -> Step:
        yield from self.lock_store()
        yield from self.let_go(b)
        yield from self.unlock("store lock")
        yield from self.announce_fill()

    def give_up(self, b: int) -> Step:
        """Where the lock cannot be had: the release alone says it."""
        yield from self.release(b)
        if self.mutation != "given up in silence":
            yield from self.announce_fill()

    def let_go(self, b: int) -> Step:
        yield from self.unlink(b)
        yield from self.keep_no_longer(b, False)

    def evict(self) -> Step:
        """Any block that no peer holds. Whether there was one, or there is room by now. Chosen without a lock."""
        chosen = None
        for b in range(self.blocks):
            generation = yield load(("generation", b))
            state = yield load(("state", b), orders.block.acquire)
            if state != LIVE:
                return True
            del state
            may_go = yield from self.may_go(b, generation)
            if may_go:
                chosen = b, generation
                break
            del may_go, generation
        if chosen is None:
            return False
        b, generation = chosen
        del chosen
        yield from self.lock_store()
        may_go = yield from self.may_go(b, generation)
        del generation
        if may_go or self.mutation == "chosen for good":
            yield from self.unlink(b)
            has_gone = yield from self.keep_no_longer(b, True)
            if not has_gone and self.mutation != "not linked again":
                yield from self.link(b)
            del has_gone
        yield from self.unlock("store lock")
        return True

    def may_go(self, b: int, generation: int) -> Step:
        state = yield load(("state", b), orders.block.acquire)
        current = yield load(("generation", b))
        if state != LIVE or current != generation:
            return False
        del state, current, generation
        kept_state = yield load(("kept", b))
        may_go = kept_state == READY
        if kept_state == FILLING:
            may_go = yield from self.is_given_up(b)
        del kept_state
        if may_go:
            may_go = yield from self.is_unheld(b)
        return may_go

    def announce_fill(self) -> Step:
        yield fetch_add("fills", 1, orders.fills.release)

    def put(self, key: str, gives_up: bool = False) -> Step:
        """Has it, by reading or writing it, and looks whether it is whole; as the binding does."""
        while True:
            how, what = yield from self.begin(key)
            if how == "wait":
                yield until("fills", differs_from(what))
            elif how == FULL:
                yield until("returns", differs_from(what))
            else:
                break
            del how, what
        if how == "fill":
            yield store(("bytes", what), f"half of {key}")
            if gives_up:
                yield from self.give_up(what)
                return "gave up"
            yield store(("bytes", what), key)
            yield from self.commit(what)
        yield from self.use(what, key)
        return "had it"

    def use(self, b: int, key: str) -> Step:
        """While it is held it is what it was."""
        content = yield load(("bytes", b))
        must(content == key, f"the block of {key} is found to be {content!r}")
        del content
        yield from self.release(b)

    # ── reaping ──
    def reap(self, peer: str, slot: int) -> Step:
        yield from reap(peer, slot, lambda identity: self.reap_holdings(slot, identity))
        yield fetch_add("returns", 1, orders.returns.release)

    def reap_holdings(self, slot: int, identity: Any) -> Step:
        has_it = yield from self.take_over("pool lock", slot)
        if has_it:
            yield from self.unlock("pool lock")
        del has_it
        if self.mutation != "fills are not dropped":
            yield from self.drop_filling(slot, identity)
        for b in range(self.blocks):
            yield from self.give_back(b, slot)

    def drop_filling(self, slot: int, identity: Any) -> Step:
        has_it = yield from self.take_over("store lock", slot)
        if not has_it:
            has_it = yield from self.lock("store lock")
        if has_it and self.mutation != "no rebuild":
            yield from self.rebuild()
        del has_it
        is_any = False
        for b in range(self.blocks):
            now = yield load(("identity", slot), orders.identity.acquire)
            if now != identity:
                break
            del now
            kept_state = yield load(("kept", b))
            taker = yield load(("taker", b))
            if kept_state == FILLING and taker == slot:
                yield from self.let_go(b)
                is_any = True
            del kept_state, taker
        yield from self.unlock("store lock")
        if is_any or self.mutation != "announced only what it dropped":
            yield from self.announce_fill()

    def give_back(self, b: int, slot: int) -> Step:
        has_it = yield from self.take_over(("lock", b), slot)
        if not has_it:
            state = yield load(("state", b), orders.block.acquire)
            if state != LIVE:
                return
            del state
            yield from self.lock(("lock", b))
        del has_it
        is_last = False
        state = yield load(("state", b))
        if state == LIVE:
            held = yield load(("held", b))
            yield store(("held", b), with_one_more(held, slot, -held[slot]))
            del held
            is_last = yield from self.return_if_last(b)
        yield from self.unlock(("lock", b))
        if is_last:
            yield fetch_add("returns", 1, orders.returns.release)


DIFFERS: dict[int, Callable[[int], bool]] = {}


def differs_from(before: int) -> Callable[[int], bool]:
    return DIFFERS.setdefault(before, lambda value: value != before)


def reaper(slot: int, peers: int, blocks: int, peer: str, mutation: str) -> Step:
    yield until_gone(peer)
    yield from Peer(slot, peers, blocks, mutation).reap(peer, 0)


# ── what must be true ────────────────────────────────────────────────────────────────────────────────────────────────
def each_key_once(blocks: int) -> Callable[[View], None]:
    def invariant(view: View) -> None:
        there = [view["key", b] for b in range(blocks) if view["kept", b] != NONE and view["state", b] == LIVE]
        must(len(set(there)) == len(there), f"{there[0] if there else ''} is there twice")

    return invariant


def nothing_is_lost(blocks: int, may_be_given_up: bool = False) -> Callable[[View], None]:
    """may_be_given_up: what a peer gave up without its lock goes when its room or its key is wanted, not before."""

    def at_end(view: View) -> None:
        must(view["store lock"] == 0 and view["pool lock"] == 0, "a lock is left")
        chain, link = [], view["head"]
        while link != 0 and len(chain) <= blocks:
            chain.append(link - 1)
            link = view["next", link - 1]
        for b in range(blocks):
            must(view["lock", b] == 0, "the lock of a block is left")
            if view["state", b] != LIVE:
                must(b not in chain, f"block {b} is linked, and free")
                continue
            must(not any(view["held", b]), f"block {b} is held by nobody who lives")
            must(view["kept", b] != NONE, f"block {b} is lost: it is neither held nor kept")
            is_given_up = view["kept", b] == FILLING
            must(not is_given_up or may_be_given_up, f"block {b} is being written by nobody")
            must(is_given_up or view["bytes", b] == view["key", b], f"block {b} is torn")
            must(chain.count(b) == 1, f"block {b} is kept, and not found")

    return at_end


# ── two put one key, one of them dies ────────────────────────────────────────────────────────────────────────────────
def one_key(mutation: str = "", blocks: int = 2, reapers: int = 1, gives_up: bool = False) -> Scene:
    """Slot 0 writes, and may die anywhere (or lets its lease go); the other wants the same key, and must get it."""
    names = ["dies", "wants", *(f"reaper {i}" for i in range(reapers))]
    peers = len(names)
    processes = [
        Process("dies", lambda: Peer(0, peers, blocks, mutation).put("k", gives_up), may_die=not gives_up),
        Process("wants", lambda: Peer(1, peers, blocks, mutation).put("k")),
        *(
            Process(f"reaper {i}", partial(reaper, 2 + i, peers, blocks, "dies", mutation), is_daemon=True)
            for i in range(reapers)
        ),
    ]
    return Scene(
        segment(*names, blocks=blocks),
        processes,
        at_end=nothing_is_lost(blocks),
        invariant=each_key_once(blocks),
        must_end=True,
    )


@pytest.mark.parametrize(("blocks", "model"), [*tiers.only_in_all((1, "sc"), (2, "sc")), (1, "weak")])
def test_waiter_for_a_dying_writer_gets_the_key_once_and_whole(blocks: int, model: str) -> None:
    one_key(blocks=blocks).holds(3_000, model)


def test_a_writer_that_lets_its_lease_go_has_given_up_and_another_writes() -> None:
    one_key(gives_up=True, reapers=0).holds(500)


@pytest.mark.parametrize(
    ("mutation", "gives_up", "how"),
    [
        ("one look", False, "is there twice"),
        ("announced only what it dropped", False, WAITS),
        ("fills are not dropped", False, f"{WAITS}|{BUSY}|is being written by nobody"),
        ("no rebuild", False, "not found|is there twice|linked, and free"),
        ("given up in silence", True, WAITS),
        ("only a commit ends it", True, f"{WAITS}|is being written by nobody"),
    ],
)
def test_each_part_of_the_protocol_of_one_writer_is_needed(mutation: str, gives_up: bool, how: str) -> None:
    one_key(mutation, gives_up=gives_up, reapers=0 if gives_up else 1).fails(how)


# ── two keys and room for one ────────────────────────────────────────────────────────────────────────────────────────
def room_for_one(mutation: str = "", reapers: int = 1) -> Scene:
    """One is there. Slot 0 wants another in its place, and may die anywhere; a reader opens the first by key."""
    names = ["dies", "reads", *(f"reaper {i}" for i in range(reapers))]
    peers = len(names)

    def dies() -> Step:
        yield from Peer(0, peers, 1, mutation).put("new")

    def reads() -> Step:
        yield from Peer(1, peers, 1, mutation).put("old")

    processes = [
        Process("dies", dies, may_die=True),
        Process("reads", reads),
        *(
            Process(f"reaper {i}", partial(reaper, 2 + i, peers, 1, "dies", mutation), is_daemon=True)
            for i in range(reapers)
        ),
    ]
    return Scene(
        put_there(segment(*names, blocks=1), 0, "old"),
        processes,
        at_end=nothing_is_lost(1),
        invariant=each_key_once(1),
        must_end=True,
    )


def test_two_takers_of_the_same_room_take_turns_when_one_dies() -> None:
    room_for_one().holds(3_000)


def test_waiter_for_room_hangs_without_news_of_released_values() -> None:
    room_for_one("no return of what is kept").fails(WAITS)


# ── given up, and in the way ─────────────────────────────────────────────────────────────────────────────────────────
def given_up(mutation: str = "") -> Scene:
    """Slot 0 lets the lease of what it writes go, slot 1 wants the only block for another key, slot 2 for that one."""
    names, peers = ["gives up", "another", "the same"], 3

    def puts(slot: int, key: str, gives_up: bool = False) -> Step:
        yield from Peer(slot, peers, 1, mutation).put(key, gives_up)

    return Scene(
        segment(*names, blocks=1),
        [
            Process("gives up", partial(puts, 0, "k", True)),
            Process("another", partial(puts, 1, "new")),
            Process("the same", partial(puts, 2, "k")),
        ],
        at_end=nothing_is_lost(1, may_be_given_up=True),
        invariant=each_key_once(1),
        must_end=True,
    )


def test_abandoned_key_is_evicted_or_written_by_another_process() -> None:
    given_up().holds(1_000)


def test_waiter_for_room_hangs_unless_it_sees_an_abandoned_write() -> None:
    given_up("only a commit ends it").fails(WAITS)


# ── opened by its reference while it is evicted ──────────────────────────────────────────────────────────────────────
def by_reference(mutation: str = "") -> Scene:
    """Slot 1 opens what is kept by a reference; slot 0 evicts it for another, and finds it held or not."""
    names, peers = ["evicts", "opens"], 2

    def evicts() -> Step:
        me = Peer(0, peers, 1, mutation)
        how, what = yield from me.begin("new")
        if how == "fill":
            yield store(("bytes", what), "new")
            yield from me.commit(what)
            yield from me.release(what)
        return how

    def opens() -> Step:
        me = Peer(1, peers, 1, mutation)
        is_there = yield from me.open_by_ref(0, 1)
        if is_there:
            yield from me.use(0, "old")
        return is_there

    return Scene(
        put_there(segment(*names, blocks=1), 0, "old"),
        [Process("evicts", evicts), Process("opens", opens)],
        at_end=nothing_is_lost(1),
        invariant=each_key_once(1),
        must_end=True,
    )


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_value_opened_during_its_eviction_stays_or_is_stale(model: str) -> None:
    by_reference().holds(200, model)


def test_value_opened_during_its_eviction_is_lost_unless_linked_again() -> None:
    by_reference("not linked again").fails("kept, and not found")


# ── chosen by two ────────────────────────────────────────────────────────────────────────────────────────────────────
def two_evict(mutation: str = "") -> Scene:
    """Both want room, and there is one value that may go for it."""
    names, peers = ["one", "two"], 2

    def evicts(slot: int) -> Step:
        me = Peer(slot, peers, 1, mutation)
        how, what = yield from me.begin(names[slot])
        if how == "fill":
            yield store(("bytes", what), names[slot])
            yield from me.commit(what)
            yield from me.release(what)
        return how

    return Scene(
        put_there(segment(*names, blocks=1), 0, "old"),
        [Process(name, partial(evicts, slot)) for slot, name in enumerate(names)],
        at_end=nothing_is_lost(1),
        invariant=each_key_once(1),
        must_end=True,
    )


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_value_chosen_by_two_evictions_is_evicted_once(model: str) -> None:
    two_evict().holds(200, model)


def test_victim_of_eviction_must_be_checked_again_under_the_lock() -> None:
    two_evict("chosen for good").fails("kept")
