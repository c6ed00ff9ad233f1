"""Each half of each order (native/atomic.h) is needed: a scene that holds breaks where the half is relaxed.

Where the protocol has a model of its own, that is the scene. The others are the two lines that the order joins, here:

    here           native
    announced      what is written, then the word that says so; and a reader of both, the other way round
    leaves         channel.h put_out, then pool.h Pool::drop_receiver;  pends: Pool::try_take, then Pool::pend
    gives_up       sender.h  Sender::abort;  drops: Sender::drop_view
    overwrites     pool.h    Pool::try_take;  taps: tap.h Tap::copy_block
    looks_up_epoch test_lock.py: a slot that is taken again

For the explorer a read-modify-write is one step, though a processor may make its store known later than a load that
follows. Where an order stands for that (pend, end, changes, joining, identity, returns, fills, epoch, granules,
mapping), the scene has a store in its place.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import tiers
from tests.model import orders, test_bell, test_blocks, test_lock, test_ready, test_ring
from tests.model.explorer import ACQUIRE, RELEASE, Process, Step, View, cas, exchange, fence, load, must, store
from tests.model.orders import ORDERS, Order
from tests.model.scene import ASLEEP, Scene
from tests.model.test_thread_team import claimed
from tests.model.test_trace import traced
from tests.test_orders import declared

TABLE = Path(__file__).parents[2] / "docs" / "design" / "orders.md"


def announced(order: Order) -> Scene:
    def announces() -> Step:
        yield store("what", "written")
        yield store("word", "says so", order.release)

    def looks() -> Step:
        word = yield load("word", order.acquire)
        what = yield load("what")
        must(word == "" or what == "written", "the word says so, and it is not there")

    return Scene({"what": "", "word": ""}, [Process("announces", announces), Process("looks", looks)])


def pending() -> Scene:
    """A receiver leaves while a block is taken and granted to the counted receivers."""

    def pends() -> Step:
        yield store("state", "live", orders.block.release)
        yield cas("lock", 0, 1, orders.lock.acquire)
        yield fence(orders.pend.seq_cst_then)
        mode = yield load("mode", orders.mode.acquire)
        yield store("pending", mode)
        yield exchange("lock", 0, orders.lock.release)

    def leaves() -> Step:
        yield store("mode", "out", orders.mode.release)
        yield fence(orders.pend.seq_cst_first)
        state = yield load("state", orders.block.acquire)
        if state != "live":
            return
        del state
        held = 1
        while held != 0:
            held = yield cas("lock", 0, 2, orders.lock.acquire)
        yield store("pending", "out")
        yield exchange("lock", 0, orders.lock.release)

    def at_end(view: View) -> None:
        must(view["pending"] != "counted", "the block waits for a receiver that has gone")

    words = {"state": "free", "mode": "counted", "pending": "", "lock": 0}
    return Scene(words, [Process("pends", pends), Process("leaves", leaves)], at_end=at_end)


def reservation() -> Scene:
    """It is given up while its last view is dropped, by another thread; one of them must free the room."""

    def gives_up() -> Step:
        yield store("given up", 1, orders.views.seq_cst_first)
        views = yield load("views")
        return views == 0

    def drops() -> Step:
        yield store("views", 0, orders.views.seq_cst_then)
        is_given_up = yield load("given up")
        return is_given_up == 1

    def at_end(view: View) -> None:
        must(view.result("gives up") or view.result("drops"), "the room is never free")

    return Scene({"given up": 0, "views": 1}, [Process("gives up", gives_up), Process("drops", drops)], at_end=at_end)


def tapped() -> Scene:
    """A block is taken anew while a tap copies what lay there."""

    def overwrites() -> Step:
        yield store("generation", 2)
        yield fence(orders.tap.release)
        yield store("bytes", "new")

    def taps() -> Step:
        copy = yield load("bytes")
        yield fence(orders.tap.acquire)
        generation = yield load("generation")
        must(copy == "old" or generation == 2, "what was overwritten is taken for the record")

    words = {"generation": 1, "bytes": "old"}
    return Scene(words, [Process("overwrites", overwrites), Process("taps", taps)])


NOT_THERE = "it is not there"
MESSAGES = [
    "joining",  # the mode says joining · the request
    "fills",  # the writer has committed, or let go · fills
    "granules",  # the pages · their bit
    "identity",  # what a dead peer held is given back · its slot says dead
    "members",  # a peer's identity · peers_version
    "ledger",  # the hash of a block · that it is valid
    "bell_pipe",  # the descriptor · the inode
    "watch_pipe",  # the descriptor · the inode
    "ranks",  # the numbers of a rank · how many operations it has written
    "mapping",  # the mapping · its address
    "watcher",  # the robust list · the thread
    "point",  # the name · that it is armed
]
Case = tuple[str, Callable[[], Scene], str]  # its name in the table, the scene, how it fails
channel = partial(test_ring.channel, 3, (2, 2))
admitted = test_ring.joining
opened = test_blocks.opening_what_is_gone
slot = partial(test_lock.a_slot_that_is_taken_again, "slot and epoch")
CASES: dict[tuple[str, str], Case] = {
    ("publish", "release"): ("ring.channel", channel, "not the record of"),
    ("publish", "acquire"): ("ring.channel", channel, "not the record of"),
    ("ready", "release"): ("ready.sending", partial(test_ready.sending, (1, 0)), "were read and"),
    ("ready", "acquire"): ("ready.sending", partial(test_ready.sending, (2, 0)), f"were read and|{ASLEEP}"),
    ("bell", "release"): ("bell.bell", partial(test_bell.bell, 1, 1), ASLEEP),
    ("bell", "acquire"): ("bell.bell", partial(test_bell.bell, 1, 1), ASLEEP),
    ("pend", "release"): ("orders.pending", pending, "has gone"),
    ("pend", "acquire"): ("orders.pending", pending, "has gone"),
    ("mode", "release"): ("ring.joining", admitted, "not the record of"),
    ("mode", "acquire"): ("ring.joining", admitted, "not the record of"),
    ("end", "release"): ("orders.announced", partial(announced, orders.end), NOT_THERE),
    ("end", "acquire"): ("ring.channel", channel, "of 2 records"),
    ("changes", "release"): ("orders.announced", partial(announced, orders.changes), NOT_THERE),
    ("changes", "acquire"): ("ring.channel", channel, ASLEEP),
    ("lock", "release"): ("lock.lockers", partial(test_lock.lockers, 2, 1), "half done|came in"),
    ("lock", "acquire"): ("lock.lockers", partial(test_lock.lockers, 2, 1), "half done|came in"),
    ("block", "release"): ("blocks.opening_what_is_gone", opened, "what is gone was opened"),
    ("block", "acquire"): ("blocks.opening_what_is_gone", opened, "what is gone was opened"),
    ("tap", "release"): ("orders.tapped", tapped, "is taken for the record"),
    ("tap", "acquire"): ("orders.tapped", tapped, "is taken for the record"),
    ("trace", "release"): ("trace.traced", traced, "is taken for another"),
    ("trace", "acquire"): ("trace.traced", traced, "is taken for another"),
    ("returns", "release"): ("orders.announced", partial(announced, orders.returns), NOT_THERE),
    ("returns", "acquire"): ("bell.memory_bell", partial(test_bell.memory_bell, (1,)), ASLEEP),
    ("epoch", "release"): ("orders.announced", partial(announced, orders.epoch), NOT_THERE),
    ("epoch", "acquire"): ("lock.a_slot_that_is_taken_again", slot, "half done|is inside|came in"),
    ("views", "release"): ("orders.reservation", reservation, "never free"),
    ("views", "acquire"): ("orders.reservation", reservation, "never free"),
    ("work", "release"): ("thread_team.claimed", claimed, "of another job|is not there"),
    ("work", "acquire"): ("thread_team.claimed", claimed, "of another job|is not there"),
}
for name in MESSAGES:
    for half in ("release", "acquire"):
        CASES[name, half] = ("orders.announced", partial(announced, getattr(orders, name)), NOT_THERE)

# What no walk finds, and why.
UNFOUND = {
    "room": "it keeps a load before a later store, and the explorer puts no load off; what relaxed would allow is "
    "written out as two mutations in test_ring.py",
    "robust": "its other half is the kernel's, which walks the list of a thread that has ended",
}


@pytest.mark.parametrize(("name", "half"), CASES)
def test_relaxed_half_of_a_memory_order_fails_its_scene(name: str, half: str) -> None:
    _, scene, how = CASES[name, half]
    scene().without(name, half).fails(how, "weaker")


LABELS = dict.fromkeys(label for label, _, _ in CASES.values())
OTHERS = [label for label in LABELS if not label.startswith("orders.")]  # their own tests walk them, too


@pytest.mark.parametrize("scene", [*(label for label in LABELS if label not in OTHERS), *tiers.only_in_all(*OTHERS)])
def test_scene_holds_with_both_halves_of_each_memory_order(scene: str) -> None:
    for build in dict.fromkeys(build for label, build, _ in CASES.values() if label == scene):
        build().holds(5, "weaker")


def test_every_order_has_a_model_or_a_reason() -> None:
    assert declared() == ORDERS
    assert {name for name, _ in CASES} | set(UNFOUND) == set(ORDERS)
    assert all((name, half) in CASES for name in ORDERS if name not in UNFOUND for half in ("release", "acquire"))


def test_design_names_the_model_of_each_half() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", TABLE.read_text(), re.MULTILINE)
    expected = {
        name: "none: see below"
        if name in UNFOUND
        else " · ".join(dict.fromkeys(f"`{CASES[name, half][0]}`" for half in ("release", "acquire")))
        for name in ORDERS
    }
    assert dict(rows[: len(ORDERS)]) == expected


def test_without_relaxes_only_the_named_order() -> None:
    assert (orders.publish.release, orders.publish.acquire) == (RELEASE, ACQUIRE)
    announced(orders.publish).without("room", "release").holds(5, "weaker")
