"""What several of the models have in common: the parts of the native core that every end of every channel goes through.

here                native
wait                wait.h     penstock::wait, from "for (;;)" on; no spinning, no deadline and no look-up, so
                               that a sleeper sleeps until it is woken. clears=False is wait<false>
ring, ring_all      wait.h     of the same names: order bell
put_out             channel.h  put_out
reap                peers.h    Attachment::reap, up to the identity that says dead; what it does in between is given
"""

from collections.abc import Callable

from tests.model import orders
from tests.model.explorer import (
    EVERYBODY,
    RELAXED,
    Step,
    cas,
    fence,
    fetch_add,
    fetch_and,
    fetch_or,
    futex_wait,
    futex_wake,
    load,
)
from tests.model.explorer import exchange as take_bits

HAND_ON_WAKES = 2


def lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


# ── bells ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def nobody(others: int) -> Step:
    yield from ()


def wait(
    bit: int,
    ready: Callable[[], Step],
    hand_on: Callable[[int], Step] = nobody,
    clears: bool = True,
    without: str = "",
    bell: str = "",
) -> Step:
    while True:
        if without != "rings read first":
            rings = yield load(
                bell + "rings", orders.bell.seq_cst_then
            )  # first: a ringer that takes our bit moves rings after
        yield fetch_or(bell + "parked", bit, orders.bell.seq_cst_then)  # before the second look
        if without == "rings read first":
            rings = yield load(bell + "rings", orders.bell.seq_cst_then)
        yield fence(orders.bell.seq_cst_then)
        is_ready = False
        if without != "second look":
            is_ready = yield from ready()
        actual = 0
        if not is_ready:
            actual = yield futex_wait(bell + "rings", rings, mask=bit)
        del rings
        others = 0
        if clears:
            others = yield fetch_and(bell + "parked", ~bit, orders.bell.seq_cst_then)
            others &= ~bit
        if others != 0 and actual == 0 and not is_ready:
            yield from hand_on(others)
        del others, actual
        if is_ready:
            return
        is_ready = yield from ready()
        if is_ready:
            return


def ring(most: int = HAND_ON_WAKES, without: str = "", clears: bool = False, bell: str = "") -> Step:
    if without != "fence":
        yield fence(orders.bell.seq_cst_first)  # published before parked is read
    if clears:  # never so: test_bell.py shows what it costs
        parked = yield take_bits(bell + "parked", 0, orders.bell.seq_cst_first)
    else:
        parked = yield load(bell + "parked", RELAXED)
    if parked == 0:
        return
    yield fetch_add(bell + "rings", 1, orders.bell.seq_cst_first)
    yield futex_wake(bell + "rings", most, parked)


def ring_all(bell: str = "") -> Step:
    yield fetch_add(bell + "rings", 1, orders.bell.seq_cst_first)
    yield futex_wake(bell + "rings", EVERYBODY)


# ── ends that go ─────────────────────────────────────────────────────────────────────────────────────────────────────
def put_out(at: tuple[str, int], end_epoch: int, mutation: str = "") -> Step:
    """The sender may just be admitting it, which moves the word: then once more. Never that of a successor."""
    mode, epoch = yield load(at, orders.mode.acquire)
    while epoch <= end_epoch and (mode, epoch) != ("out", end_epoch):
        if mutation == "only its own epoch" and epoch != end_epoch:
            break
        actual = yield cas(at, (mode, epoch), ("out", end_epoch), orders.mode.acq_rel)
        if actual == (mode, epoch) or mutation == "one try":
            break
        mode, epoch = actual
    yield fence(orders.pend.seq_cst_first)  # out, then look for what is still pending


def reap(peer: str, slot: int, holdings: Callable[[tuple[str, str]], Step]) -> Step:
    """Gives back the holdings of one that died; several may, and the slot may be another's by then."""
    state, owner = yield load(("identity", slot), orders.identity.acquire)
    if owner != peer:
        return
    if state == "live":
        yield cas(("identity", slot), ("live", peer), ("dying", peer), orders.identity.acq_rel)
    del state, owner
    identity = yield load(("identity", slot), orders.identity.acquire)
    if identity != ("dying", peer):
        return
    yield from holdings(identity)
    yield cas(("identity", slot), identity, ("dead", peer), orders.identity.acq_rel)
