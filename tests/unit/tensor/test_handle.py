"""Handles: plain data that travels in messages and as bytes, checked where it is made, received and opened."""

from __future__ import annotations

import contextlib
import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import Buffer, DecodeError, Handle, Missing, Scope, Store
from penstock.codec import FrameDecoder, FrameEncoder
from penstock.lowlevel import Ref, StaleRef
from penstock.tensor import plan
from tests.support.values import CATALOGUE, MB, frame_of, image, is_not_held, key, shows, travelled

WAYS = pytest.mark.parametrize("value_key", [key(1), None], ids=["with a key", "without a key"])


def images() -> Store:
    return Store(4 * MB, name="images")


# ── in messages, and as bytes ──
def test_a_handle_of_the_store_takes_at_most_200_bytes_of_a_message() -> None:
    with images() as store:
        largest = Handle(b"\xff" * 32, Ref((1 << 64) - 1, 65535, (1 << 32) - 1, 0, 1 << 44))
        assert len(frame_of(travelled(largest))) - len(frame_of()) <= 70
        assert len(bytes(largest)) <= 70
        with Scope(store) as scope:
            handles = [scope.put(image(number), key=key(number)) for number in range(20)]
            assert len(frame_of(*handles)) <= 20 * 200


@WAYS
def test_a_handle_of_the_store_is_the_same_after_bytes(value_key: bytes | None) -> None:
    with images() as store, Scope(store) as scope:
        handle = scope.put(image(1), key=value_key)
        back = Handle.from_bytes(bytes(handle))
        assert back == handle and back.key == value_key and not back.is_inline
        assert shows(back.open(store).value(), 1)
        assert Handle.from_bytes(memoryview(bytes(handle))) == handle


@WAYS
@pytest.mark.parametrize("value", [image(1), {"nothing": np.zeros((0, 3)), "grid": [1, 2, 1]}, None, b"text"])
def test_a_handle_of_an_inline_value_is_the_same_after_bytes(value_key: bytes | None, value: Any) -> None:
    handle = Scope().put(value, key=value_key)
    back = Handle.from_bytes(bytes(handle))
    assert back == handle and back.key == value_key and back.is_inline and back.nbytes == handle.nbytes
    value_back = back.open().value()
    if not isinstance(value, dict):
        assert value_back == value
    else:
        assert list(value_back) == list(value) and value_back["grid"] == [1, 2, 1]
        for name in set(value) - {"grid"}:
            assert np.array_equal(value_back[name], value[name]) and not value_back[name].flags.writeable


def test_a_handle_that_came_in_a_message_can_go_on_as_bytes() -> None:
    with images() as store, Scope(store) as scope:
        for handle in (scope.put(image(1), key=key(1)), scope.put(image(2, 400)), Scope().put(image(3))):
            assert Handle.from_bytes(bytes(travelled(handle))) == handle


def hostile() -> dict[str, bytes]:
    """Bytes that are no handle."""
    encode = msgspec.msgpack.encode
    block = (1 << 40, 5, 7, 0, 4096)
    stored, inline = encode((b"k" * 32, block, None)), bytes(Scope().put(image(1, 400)))
    deep = b"\x91" * 100_000 + b"\xc0"
    fields = {
        "nothing": b"",
        "no msgpack": b"\xc1",
        "another value": encode({"key": None}),
        "text": encode("handle"),
        "two fields": encode((None, block)),
        "four fields": encode((None, block, None, None)),
        "a key of text": encode(("k" * 32, block, None)),
        "a key of numbers": encode((7, block, None)),
        "a short key": encode((b"k" * 31, block, None)),
        "a long key": encode((b"k" * 33, block, None)),
        "a reference of text": encode((None, "block", None)),
        "a reference of four numbers": encode((None, block[:4], None)),
        "a reference with a text": encode((None, (*block[:4], "4096"), None)),
        "a reference with a fraction": encode((None, (*block[:4], 4096.5), None)),
        "a reference with nothing": encode((None, (*block[:4], None), None)),
        "a negative size": encode((None, (*block[:4], -1), None)),
        "a size of less than a value": encode((None, (*block[:4], 7), None)),
        "a size of more than there is": encode((None, (*block[:4], (1 << 44) + 1), None)),
        "an odd place": encode((None, (*block[:3], 8, 4096), None)),
        "no such block": encode((None, (1, 1 << 16, 7, 0, 4096), None)),
        "no such generation": encode((None, (1, 5, 1 << 32, 0, 4096), None)),
        "a block and tensors": encode((None, block, b"x" * 64)),
        "a layout and no tensors": encode((None, b"layout", None)),
        "tensors of text": encode((None, b"layout", "x" * 64)),
        "an extension": encode((None, msgspec.msgpack.Ext(1, b"x"), None)),
        "more after it": stored + b"\xc0",
        "a layout without end": b"\x93\xc0" + deep + b"\xc0",
        "a reference without end": b"\x93\xc0\x96" + b"".join(map(encode, block)) + deep + b"\xc0",
        "a key without end": b"\x93" + deep + b"\xc0\xc0",
    }
    return fields | {
        f"{what} cut to {end}": whole[:end]
        for what, whole in (("stored", stored), ("inline", inline))
        for end in range(1, len(whole), 1 + len(whole) // 20)
    }


@pytest.mark.parametrize("what", hostile())
def test_bytes_that_are_no_handle_are_refused(what: str) -> None:
    with pytest.raises(DecodeError, match="expected the bytes of a Handle: "):
        Handle.from_bytes(hostile()[what])


def test_handles_with_bytes_changed_at_random_show_a_value_or_are_refused(seed: int) -> None:
    chance = random.Random(seed)
    with images() as store:
        with Scope(store, inline_nbytes=1000) as scope:
            handles = [scope.put(image(1, 4000)), scope.put(image(2, 4000), key=key(2)), scope.put(image(3, 40))]
            outcomes: Counter[str] = Counter()
            for _ in range(20_000):
                outcomes[opened(forged(chance, bytes(chance.choice(handles))), store)] += 1
        assert min(outcomes[what] for what in ("seen", "refused", "missing")) > 10, outcomes
        assert is_not_held(store)


def forged(chance: random.Random, encoded: bytes) -> bytes:
    changed = bytearray(encoded)
    for _ in range(chance.randrange(1, 3)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def opened(encoded: bytes, store: Store) -> str:
    try:
        value = Handle.from_bytes(encoded).open(store).value("bits")
    except DecodeError:
        return "refused"
    except Missing:
        return "missing"
    if isinstance(value, dict) and isinstance(pixels := value.get("pixels"), np.ndarray):
        assert pixels.nbytes <= 4000
        pixels.sum()
    return "seen"


# ── what is gone, and what never was ──
@WAYS
def test_handle_opened_too_late_is_missing_until_put_again(value_key: bytes | None) -> None:
    """Evicted, or the store was cleared, between the server and the worker."""
    with images() as store:
        scope, other = Scope(store), Scope(store)
        handle, fine = scope.put(image(1), key=value_key), other.put(image(2), key=key(2))
        store.clear()
        assert shows(handle.open(store).value(), 1), "what a request holds is neither evicted nor cleared"
        scope.release()
        with pytest.raises(Missing, match=r"'images' no longer has the value .*Send the request again") as missed:
            handle.open(store)
        assert isinstance(missed.value.__cause__, StaleRef)
        assert shows(fine.open(store).value(), 2), "another request has suffered"
        with Scope(store) as again:
            assert shows(again.put(image(1), key=value_key).open(store).value(), 1)
            if value_key is not None:
                assert shows(handle.open(store).value(), 1), "it is there again, under its key"
            else:
                with pytest.raises(Missing):
                    handle.open(store)
        other.release()


def test_missing_value_keeps_no_lease_of_the_caller() -> None:
    with images() as store:
        with Scope(store) as scope:
            gone, there = scope.put(image(1)), scope.put(image(2), key=key(2))

        def look() -> None:
            value = there.open(store).value()
            with contextlib.suppress(Missing):
                gone.open(store)
            assert shows(value, 2)

        gc.disable()
        try:
            look()
            assert is_not_held(store)
        finally:
            gc.enable()


def test_evicted_value_is_a_miss_and_never_another_value() -> None:
    with images() as store:
        with Scope(store) as scope:
            old = scope.put(image(0, MB), key=key(0))
        for number in range(1, 9):
            with Scope(store) as scope:
                scope.put(image(number, MB), key=key(number))
        assert store.stats().evictions >= 4
        with pytest.raises(Missing):
            old.open(store)


def test_a_handle_of_another_store_or_of_none_is_refused() -> None:
    with images() as store:
        with Store(MB) as another, Scope(store) as scope:
            keyed, unkeyed = scope.put(image(1), key=key(1)), scope.put(image(2))
            for handle in (keyed, unkeyed):
                with pytest.raises(Missing):
                    handle.open(another)
                with pytest.raises(ValueError, match=r"expected a store, .*: Handle\.open\(store\)"):
                    handle.open()


WHERE = Ref(1 << 40, 5, 7, 0, 4096)
LAID = plan(image(1, 400))
NUMBERS = Buffer(b"x" * 400)


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
def test_contradictory_handle_is_refused_at_creation_and_on_arrival(fields: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Handle(*fields)

    class Loose(msgspec.Struct, array_like=True):
        number: int
        handles: tuple[Any, ...]

    encoder = FrameEncoder(CATALOGUE)
    fake = Loose(7, ([fields[0], fields[1], None if len(fields) == 2 else msgspec.msgpack.Ext(0, b"xyz")],))
    frame = b"\x01" + msgspec.msgpack.Encoder(enc_hook=encoder._hook).encode(fake)
    with pytest.raises(DecodeError, match=rf"{why}.* at \$\.handles\[0\]"):
        FrameDecoder(CATALOGUE).decode(frame)


def test_forged_handle_shows_the_value_of_its_key_or_is_refused() -> None:
    with images() as store:
        with Scope(store) as scope:
            keyed, unkeyed = scope.put(image(1), key=key(1)), scope.put(image(2))
            for handle, number in ((keyed, 1), (unkeyed, 2)):
                where = handle.where
                assert isinstance(where, Ref)
                stale_before = store.stats().pool.stale_refs
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
                    forged = msgspec.structs.replace(handle, where=msgspec.structs.replace(where, **{name: wrong}))
                    for arrived in (travelled(forged), Handle.from_bytes(bytes(forged))):
                        if handle.key is not None:
                            assert shows(arrived.open(store).value(), number)
                        else:
                            with pytest.raises(Missing):
                                arrived.open(store)
                assert store.stats().pool.stale_refs > stale_before
                shorter = msgspec.structs.replace(handle, where=msgspec.structs.replace(where, nbytes=where.nbytes - 4))
                with pytest.raises(DecodeError):
                    shorter.open(store).value()
            with pytest.raises(Missing):
                Handle(key(77), Ref(store.ticket.nonce, 60, 1, 0, 4096)).open(store)
        assert is_not_held(store)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b"", lambda b: b"\xc1" + b[1:], lambda b: b + b"\0"])
def test_an_inline_value_whose_layout_was_forged_is_refused(change: Callable[[bytes], bytes]) -> None:
    numbers = bytearray(LAID.nbytes)
    LAID.write(numbers)
    assert shows(Handle(None, LAID.layout, Buffer(numbers)).open().value(), 1)
    for as_, writable in (("numpy", False), ("bits", False), ("numpy", True)):
        with pytest.raises(DecodeError):
            Handle(None, change(LAID.layout), Buffer(numbers)).open().value(as_, writable=writable)  # type: ignore[arg-type]
    with pytest.raises(DecodeError):
        Handle(None, LAID.layout, Buffer(numbers[:-64])).open().value()
