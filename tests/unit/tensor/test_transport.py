"""Values that travel with requests: where each lies, how long it is held, and what happens when it is gone."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import ClosedError, DecodeError, Incoming, Item, Missing, Outgoing, Part, Store, lowlevel
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.lowlevel import Ref, UnsupportedTensor
from penstock.tensor import OutgoingStats, plan, transport
from penstock.tensor.tree import Plan
from tests.conftest import eventually
from tests.support.processes import program

MB = 1 << 20


class Request(msgspec.Struct, array_like=True, frozen=True):
    number: int
    items: tuple[Item, ...] = ()


CATALOGUE = Catalogue(Request)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def image(number: int, nbytes: int = 100_000) -> dict[str, Any]:
    return {"pixels": np.full(nbytes // 4, number, np.int32), "grid": [1, 2, number]}


def shows(value: Any, number: int) -> bool:
    return bool((value["pixels"] == number).all() and value["grid"] == [1, 2, number])


def frame_of(*items: Item) -> bytes:
    frame = FrameEncoder(CATALOGUE).encode(Request(7, items))
    return b"".join(memoryview(piece).cast("B") for piece in frame) if isinstance(frame, list) else bytes(frame)


def travelled(item: Item) -> Item:
    """What arrives."""
    (arrived,) = FrameDecoder(CATALOGUE).decode(frame_of(item)).items
    assert isinstance(arrived, Item) and arrived == item
    return arrived


def is_held_by_nobody(store: Store) -> bool:
    stats = store.stats()
    return not any(one.holders for one in stats.items) and store.stats().blocks == len(stats.items)


def images() -> Store:
    return Store(4 * MB, name="images")


# ── what is sent ──
@pytest.mark.parametrize("its", [key(1), None], ids=["with a key", "without a key"])
def test_a_value_is_copied_once_and_seen_where_it_lies(its: bytes | None) -> None:
    with images() as store:
        outgoing = Outgoing(store)
        with Store.attach(store.ticket) as other, outgoing.scope() as scope:
            incoming = Incoming(other)
            item = travelled(scope.put(image(1, MB), its))
            assert item.key == its and not item.is_inline and item.nbytes > MB
            with incoming.open(item) as held:
                pixels = held.value()["pixels"]
                assert shows(held.value(), 1)
            assert not pixels.flags.writeable and not pixels.flags.owndata
            assert store.stats().blocks == 1
            scope.release()
            assert (pixels == 1).all(), "gone while somebody looks at it"
            del pixels
            assert store.stats().blocks == (1 if its else 0), "a value without a key goes with its last lease"
            assert incoming.stats().opened == 1
        assert outgoing.stats() == OutgoingStats(items=1, nbytes=item.nbytes, puts=1)


def test_an_item_of_the_store_takes_at_most_200_bytes_of_a_message() -> None:
    with images() as store:
        largest = Item(b"\xff" * 32, Ref((1 << 64) - 1, 65535, (1 << 32) - 1, 0, 1 << 44))
        assert len(frame_of(travelled(largest))) - len(frame_of()) <= 70
        with Outgoing(store).scope() as scope:
            items = [scope.put(image(number), key(number)) for number in range(20)]
            assert len(frame_of(*items)) <= 20 * 200


def test_what_is_in_the_store_is_not_looked_at_again() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        store.put(key(1), image(1)).release()

        class Untouchable:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError(f"somebody asked for its {name}")

        with outgoing.scope() as scope:
            taken = store.stats().takes
            item = scope.put(Untouchable(), key(1))
            assert shows(Incoming(store).open(item).value(), 1)
            assert store.stats().takes == taken
        assert outgoing.stats().hits == 1 and outgoing.stats().puts == 0


def test_what_was_found_in_the_store_is_added_and_held_by_the_scope() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        store.put(key(1), image(1)).release()
        scope = outgoing.scope()
        with store.get(key(1)) as found:
            item = scope.add(found, key(1))
        store.clear()
        assert shows(Incoming(store).open(item).value(), 1), "the scope did not hold it by itself"
        scope.release()
        assert store.stats().blocks == 0
        with pytest.raises(ClosedError):
            outgoing.scope().add(found)
        assert outgoing.stats().hits == 1


# ── what travels inline, and why ──
def test_a_small_value_travels_inline_and_nothing_is_held() -> None:
    with images() as store:
        outgoing = Outgoing(store, inline_nbytes=1000)
        with outgoing.scope() as scope:
            item = travelled(scope.put(image(1, 400), key(1)))
            assert item.is_inline and item.key == key(1)
            assert shows(Incoming(None).open(item).value(), 1)
            assert not scope.put(image(2, 1000), key(2)).is_inline
        stats = outgoing.stats()
        assert (stats.inline_small, stats.inline, stats.puts, stats.inline_nbytes) == (1, 1, 1, item.nbytes)


def test_without_a_store_everything_travels_inline_and_a_key_once_for_each_scope() -> None:
    outgoing = Outgoing(None)
    with outgoing.scope() as scope:
        made = scope.put(image(1), key(1))
        assert scope.put(object(), key(1)) is made, "it was looked at again"
        item = travelled(made)
    with Incoming(None).open(item) as held:
        assert shows(held.value(), 1) and held.nbytes == item.nbytes
        pixels = held.value()["pixels"]
        assert not pixels.flags.writeable and pixels.ctypes.data % 8 == 0
        assert held.value(writable=True)["pixels"].flags.writeable
    with pytest.raises(ClosedError):
        held.value()
    assert shows({"pixels": pixels, "grid": [1, 2, 1]}, 1)
    assert outgoing.stats() == OutgoingStats(
        items=2, nbytes=2 * item.nbytes, hits=1, inline_without_store=1, inline_nbytes=item.nbytes
    )


def test_a_value_of_no_bytes_travels_too() -> None:
    with images() as store:
        for value in (None, 5, {"nothing": np.zeros((0, 3))}, []):
            with Outgoing(None).scope() as scope:
                seen = Incoming(None).open(travelled(scope.put(value))).value()
                assert seen["nothing"].shape == (0, 3) if isinstance(value, dict) else seen == value
            with Outgoing(store, inline_nbytes=0).scope() as scope:
                seen = Incoming(store).open(travelled(scope.put(value, key(1)))).value()
                assert seen["nothing"].shape == (0, 3) if isinstance(value, dict) else seen == value
            store.clear()


@pytest.mark.parametrize("its", [key(9), None], ids=["with a key", "without a key"])
def test_a_value_for_which_there_is_no_room_travels_inline(its: bytes | None) -> None:
    with images() as store:
        outgoing = Outgoing(store, timeout=0.01)
        with outgoing.scope() as holds, outgoing.scope() as scope:
            holds.put(image(1, 3 * MB), key(1))
            item = travelled(scope.put(image(2, 2 * MB), its))
            assert item.is_inline and shows(Incoming(None).open(item).value(), 2)
            assert outgoing.stats().inline_full == 1
            holds.release()
            assert not scope.put(image(3, 2 * MB)).is_inline, "there is room again"
        assert outgoing.stats().inline == 1


def test_a_value_that_somebody_else_is_writing_for_too_long_travels_inline() -> None:
    with images() as store:
        outgoing = Outgoing(store, timeout=0.01)
        with Store.attach(store.ticket) as other, outgoing.scope() as scope:
            _, lease = other._store.begin(key(1), 1000, 0)
            assert scope.put(image(1), key(1)).is_inline
            assert outgoing.stats().inline_full == 1
            other._store.abandon(lease)
            lease.release()


def test_an_object_larger_than_the_store_travels_inline_is_counted_and_warned_of_once() -> None:
    with Store(MB, name="small") as store:
        outgoing, another = Outgoing(store), Outgoing(store)
        with outgoing.scope() as scope, another.scope() as other_scope:
            with pytest.warns(RuntimeWarning, match="does not fit the store 'small'.*travels inline.*raise") as warned:
                items = [scope.put(image(number, 2 * MB), key(number)) for number in range(3)]
                items.append(other_scope.put(image(3, 2 * MB)))
            assert len(warned) == 1
            assert warned[0].filename == __file__, "the warning does not point at who put it"
            for number, item in enumerate(items):
                assert shows(Incoming(store).open(travelled(item)).value(), number)
        assert outgoing.stats().inline_too_large == 3 and another.stats().inline_too_large == 1
        assert store.stats().evictions == 0


def test_what_cannot_be_sent_is_refused_and_nothing_is_held() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        with outgoing.scope() as scope:
            with pytest.raises(UnsupportedTensor):
                scope.put([object()], key(1))
        assert store.stats().blocks == 0 and outgoing.stats().items == 0
        with pytest.raises(ValueError, match="inline_nbytes"):
            Outgoing(store, inline_nbytes=-1)


# ── for how long ──
def test_a_scope_ends_once_however_often_it_is_released() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        scope = outgoing.scope()
        assert outgoing.stats().open_scopes == 1 and not scope.is_released
        scope.put(image(1), key(1))
        assert store.stats().items[0].holders == 1
        threads = [threading.Thread(target=scope.release) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert scope.is_released and outgoing.stats().open_scopes == 0 and is_held_by_nobody(store)
        with pytest.raises(ClosedError, match="its request has ended"):
            scope.put(image(1), key(1))
        with pytest.raises(ClosedError):
            scope.put(image(2), key(2))
        assert store.stats().puts == 1 and is_held_by_nobody(store)


def test_a_scope_that_is_forgotten_holds_nothing() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        scope = outgoing.scope()
        scope.put(image(1))
        del scope
        assert store.stats().blocks == 0 and outgoing.stats().open_scopes == 0


def test_an_abort_while_a_value_is_being_copied_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with images() as store:
        outgoing = Outgoing(store)
        write = Plan.write
        for its in (key(1), None):
            scope = outgoing.scope()

            def released_meanwhile(planned: Plan, *where: Any, scope: transport.Scope = scope) -> None:
                scope.release()
                write(planned, *where)

            with monkeypatch.context() as patch:
                patch.setattr(Plan, "write", released_meanwhile)
                with pytest.raises(ClosedError) as kept:
                    scope.put(image(1), its)
            assert is_held_by_nobody(store), f"held for as long as somebody looks at {kept!r}"
            assert outgoing.stats().open_scopes == 0


def test_the_same_item_delivered_twice_is_one_value_held_until_the_last_lets_go() -> None:
    """Several samples of one request, retries, another route."""
    with images() as store:
        outgoing, incoming = Outgoing(store), Incoming(store)
        scope, retry = outgoing.scope(), outgoing.scope()
        first = scope.put(image(1), key(1))
        assert scope.put(image(2), key(1)) == first, "the same key in one request is one value"
        again = retry.put(image(1), key(1))
        assert again == first and store.stats().puts == 1 and store.stats().blocks == 1
        opened = [incoming.open(item) for item in (first, first, travelled(first), again)]
        scope.release()
        assert shows(incoming.open(first).value(), 1), "the retry holds it"
        retry.release()
        store.clear()
        while opened:
            assert shows(opened[-1].value(), 1)
            opened.pop().release()
        assert store.stats().blocks == 0
        with pytest.raises(Missing):
            incoming.open(first)
        assert outgoing.stats().hits == 2 and outgoing.stats().items == 3


def test_many_threads_put_one_key_in_one_scope_and_have_one_item() -> None:
    with images() as store:
        outgoing = Outgoing(store)
        items: list[Item] = []
        with outgoing.scope() as scope:
            threads = [
                threading.Thread(target=lambda: items.append(scope.put(image(1, MB), key(1), detach=True)))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(items) == 8 and len(set(map(frame_of, items))) == 1
            assert store.stats().puts == 1
        assert is_held_by_nobody(store) and outgoing.stats().items == 8


def test_an_item_that_nobody_ever_opens_is_let_go_without_being_read() -> None:
    """The prefix is cached, so no worker needs the image."""
    with images() as store:
        outgoing, incoming = Outgoing(store), Incoming(store)
        with outgoing.scope() as scope:
            travelled(scope.put(image(1), key(1)))
            travelled(scope.put(image(2)))
        assert incoming.stats().opened == 0 and is_held_by_nobody(store)
        assert store.clear() == 1 and store.stats().blocks == 0


# ── what is gone, and what never was ──
@pytest.mark.parametrize("its", [key(1), None], ids=["with a key", "without a key"])
def test_who_opens_too_late_misses_that_one_value_and_can_have_it_again(its: bytes | None) -> None:
    """Evicted, or the store was cleared, between the server and the worker."""
    with images() as store:
        outgoing, incoming = Outgoing(store), Incoming(store)
        scope, other = outgoing.scope(), outgoing.scope()
        item, fine = scope.put(image(1), its), other.put(image(2), key(2))
        store.clear()
        assert shows(incoming.open(item).value(), 1), "what a request holds is neither evicted nor cleared"
        scope.release()
        with pytest.raises(Missing, match=r"'images' has not got the value .* any more.*send that again") as missed:
            incoming.open(item)
        assert isinstance(missed.value.__cause__, lowlevel.StaleRef)
        assert shows(incoming.open(fine).value(), 2), "another request has suffered"
        with outgoing.scope() as again:
            assert shows(incoming.open(again.put(image(1), its)).value(), 1)
            if its is not None:
                assert shows(incoming.open(item).value(), 1), "it is there again, under its key"
        other.release()
        stats = incoming.stats()
        assert (stats.missing, stats.found_by_key) == (1, 1 if its else 0)


def test_a_miss_keeps_nothing_that_its_caller_has_opened() -> None:
    with images() as store:
        incoming = Incoming(store)
        with Outgoing(store).scope() as scope:
            gone, there = scope.put(image(1)), scope.put(image(2), key(2))

        def look() -> None:
            value = incoming.open(there).value()
            with contextlib.suppress(Missing):
                incoming.open(gone)
            assert shows(value, 2)

        gc.disable()
        try:
            look()
            assert is_held_by_nobody(store)
        finally:
            gc.enable()


def test_a_value_that_was_evicted_to_make_room_is_a_miss_and_never_another_value() -> None:
    with images() as store:
        outgoing, incoming = Outgoing(store), Incoming(store)
        with outgoing.scope() as scope:
            old = scope.put(image(0, MB), key(0))
        for number in range(1, 9):
            with outgoing.scope() as scope:
                scope.put(image(number, MB), key(number))
        assert store.stats().evictions >= 4
        with pytest.raises(Missing):
            incoming.open(old)


def test_an_item_of_another_store_or_of_none_is_refused() -> None:
    with images() as store:
        with Store(MB) as another, Outgoing(store).scope() as scope:
            keyed, unkeyed = scope.put(image(1), key(1)), scope.put(image(2))
            for item in (keyed, unkeyed):
                with pytest.raises(Missing):
                    Incoming(another).open(item)
                with pytest.raises(ValueError, match="no store here"):
                    Incoming(None).open(item)


WHERE = Ref(1 << 40, 5, 7, 0, 4096)
LAID = plan(image(1, 400))
NUMBERS = Part(b"x" * 400)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ((b"k" * 31, WHERE), "expected a key of 32 bytes"),
        ((b"k" * 33, WHERE), "expected a key of 32 bytes"),
        ((b"", WHERE), "expected a key of 32 bytes"),
        ((None, Ref(1 << 40, 5, 7, 8, 4096)), "the block of a value"),
        ((None, Ref(1 << 40, 5, 7, -64, 4096)), "a reference to a block"),
        ((None, Ref(1 << 40, 5, 7, 0, 7)), "the block of a value"),
        ((None, Ref(1 << 40, 5, 7, 0, -1)), "the block of a value"),
        ((None, Ref(1 << 40, 5, 7, 0, (1 << 44) + 1)), "the block of a value"),
        ((None, Ref(-1, 5, 7, 0, 4096)), "a reference to a block"),
        ((None, Ref(1, -5, 7, 0, 4096)), "a reference to a block"),
        ((None, Ref(1, 1 << 16, 7, 0, 4096)), "a reference to a block"),
        ((None, Ref(1, 5, 1 << 32, 0, 4096)), "a reference to a block"),
        ((None, WHERE, NUMBERS), "in the store or inline"),
        ((None, LAID.layout), "the tensors of a value that travels inline"),
    ],
)
def test_an_item_that_contradicts_itself_is_refused_where_it_is_made_and_where_it_arrives(
    fields: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Item(*fields)

    class Loose(msgspec.Struct, array_like=True):
        number: int
        items: tuple[Any, ...]

    encoder = FrameEncoder(Catalogue(Request))
    fake = Loose(7, ([fields[0], fields[1], None if len(fields) == 2 else msgspec.msgpack.Ext(0, b"xyz")],))
    frame = b"\x01" + msgspec.msgpack.Encoder(enc_hook=encoder._hook).encode(fake)
    with pytest.raises(DecodeError, match=rf"{why}.* at \$\.items\[0\]"):
        FrameDecoder(CATALOGUE).decode(frame)


def test_a_forged_item_shows_the_value_of_its_key_or_is_refused_before_anything_is_read() -> None:
    with images() as store:
        incoming = Incoming(store)
        with Outgoing(store).scope() as scope:
            keyed, unkeyed = scope.put(image(1), key(1)), scope.put(image(2))
            for item, number in ((keyed, 1), (unkeyed, 2)):
                where = item.where
                assert isinstance(where, Ref)
                stale_before = store.stats().stale_refs
                for name, wrong in (
                    ("segment", where.segment ^ 1),
                    ("block", where.block + 50),
                    ("block", 65535),
                    ("generation", where.generation + 1),
                    ("generation", 0),
                    ("offset", where.offset + 64),
                    ("offset", (where.offset - 64) % (4 * MB)),
                    ("offset", 1 << 43),
                    ("nbytes", where.nbytes + 1),
                    ("nbytes", 1 << 44),
                ):
                    forged = msgspec.structs.replace(item, where=msgspec.structs.replace(where, **{name: wrong}))
                    if item.key is not None:
                        assert shows(incoming.open(travelled(forged)).value(), number)
                    else:
                        with pytest.raises(Missing):
                            incoming.open(travelled(forged))
                assert store.stats().stale_refs > stale_before
                shorter = msgspec.structs.replace(item, where=msgspec.structs.replace(where, nbytes=where.nbytes - 4))
                with pytest.raises(DecodeError):
                    incoming.open(shorter).value()
            with pytest.raises(Missing):
                incoming.open(Item(key(77), Ref(store.ticket.nonce, 60, 1, 0, 4096)))
        assert is_held_by_nobody(store)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b"", lambda b: b"\xc1" + b[1:], lambda b: b + b"\0"])
def test_an_inline_value_whose_layout_was_forged_is_refused(change: Callable[[bytes], bytes]) -> None:
    numbers = bytearray(LAID.nbytes)
    LAID.write(numbers)
    assert shows(Incoming(None).open(Item(None, LAID.layout, Part(numbers))).value(), 1)
    with pytest.raises(DecodeError):
        Incoming(None).open(Item(None, change(LAID.layout), Part(numbers))).value()
    with pytest.raises(DecodeError):
        Incoming(None).open(Item(None, LAID.layout, Part(numbers[:-64]))).value()


# ── processes ──
FORWARDING = """
    import msgspec
    from penstock import Item, Ring
    import penstock

    class Request(msgspec.Struct, array_like=True, frozen=True):
        number: int
        items: tuple[Item, ...] = ()

    inbox = penstock.attach(sys.argv[1], messages=(Request,)).open_receiver()
    steps = penstock.attach(sys.argv[2], messages=(Request,)).open_sender()
    say("ready")
    for _ in range(int(sys.argv[3])):
        got = inbox.receive(timeout=20)
        steps.send(got, timeout=20)
    with open("/proc/self/maps") as maps:
        segments = {line.split(None, 5)[5].strip() for line in maps if "memfd:penstock" in line}
    say(*sorted(segments))
    hear()
"""


def test_a_core_without_a_store_forwards_items_and_never_maps_what_they_refer_to() -> None:
    with images() as store:
        outgoing, incoming = Outgoing(store, inline_nbytes=1000), Incoming(store)
        with (
            penstock.Ring(Request, name="inbox") as inbox,
            penstock.Ring(Request, name="steps") as steps,
            program(FORWARDING, inbox.ticket, steps.ticket, 3) as core,
        ):
            assert core.hear() == "ready"
            sender, receiver = inbox.open_sender(), steps.open_receiver()
            with outgoing.scope() as scope, Outgoing(None).scope() as storeless:
                sent = [
                    Request(0, (scope.put(image(0, MB), key(0)), scope.put(image(1, MB)))),
                    Request(1, (scope.put(image(2, 500), key(2)),)),
                    Request(2, (storeless.put(image(3, MB), key(3)),)),
                ]
                for request in sent:
                    sender.send(request, timeout=20)
                number = 0
                for _ in sent:
                    got = receiver.receive(timeout=20)
                    for item in got.items:
                        assert shows(incoming.open(item).value(), number)
                        number += 1
                assert number == 4 and incoming.stats().inline == 2
                segments = core.hear()
                assert "inbox" in segments and "steps" in segments and "images" not in segments
                assert {peer.pid for peer in store.peers() if peer.state == "live"} == {store.peer.pid}
            del got, item
            sender.close()
            receiver.close()
        assert is_held_by_nobody(store)


def test_a_server_that_dies_gives_up_what_its_requests_held() -> None:
    with images() as store:
        source = """
            import numpy as np
            from penstock import Outgoing, Store
            store = Store.attach(sys.argv[1], peer_name="server")
            scope = Outgoing(store).scope()
            items = [scope.put(np.full(50_000, 1, np.int32), bytes(32)), scope.put(np.full(50_000, 2, np.int32))]
            for item in items:
                say(*[getattr(item.where, name) for name in item.where.__struct_fields__])
            hear()
        """
        incoming = Incoming(store)
        with program(source, store.ticket) as server:
            keyed, unkeyed = (Item(its, Ref(*map(int, server.hear().split()))) for its in (bytes(32), None))
            held = incoming.open(unkeyed)
            server.kill()
            server.process.wait()
            eventually(lambda: [one.name for one in store.stats().holders if one.name == "server"] == [])
            assert (held.value() == 2).all(), "what a worker had opened is its own"
            held.release()
            assert (incoming.open(keyed).value() == 1).all(), "the key outlives who put it"
            with pytest.raises(Missing):
                incoming.open(unkeyed)
        assert is_held_by_nobody(store)


def test_no_warning_comes_from_what_is_ordinary() -> None:
    with images() as store:
        with warnings.catch_warnings(), Outgoing(store, timeout=0.01).scope() as scope:
            warnings.simplefilter("error")
            for number in range(8):
                scope.put(image(number, MB), key(number))
