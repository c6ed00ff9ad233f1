"""Which bytes of a frame belong to which field: together they are the frame, to the byte."""

import enum
import random

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.codec import Buffer, Catalogue, FrameEncoder
from penstock.errors import DecodeError
from penstock.tools.capture.frame_fields import HEAD, PADDING, FrameFields, FrameLayout


class Kind(enum.Enum):
    NEW = "new [1, 2]"
    OLD = "old"


class Params(msgspec.Struct, array_like=True, frozen=True):
    temperature: float = 0.8
    top_p: float = 0.95


class Inner(msgspec.Struct, array_like=True, frozen=True):
    lengths: NDArray[np.int32]
    note: str = ""


class Step(msgspec.Struct, array_like=True, frozen=True):
    number: int
    rows: NDArray[np.int32]
    inner: Inner | None = None
    many: list[Inner] = []
    images: dict[str, Buffer] = {}
    params: Params | None = None
    pair: tuple[int, NDArray[np.float32]] | None = None
    kind: Kind = Kind.OLD


class Stop(msgspec.Struct, array_like=True, frozen=True):
    reason: str


CATALOGUE = Catalogue(Step, Stop)
LAYOUT = FrameLayout(CATALOGUE.schema.encode())


def frame_of(message: msgspec.Struct) -> bytes:
    encoded = FrameEncoder(CATALOGUE).encode(message)
    return b"".join(map(bytes, encoded)) if isinstance(encoded, list) else bytes(encoded)


def sizes(message: FrameFields) -> dict[str, int]:
    return {piece.name: len(piece.content) for piece in message.pieces}


def numbers(count: int, dtype: str = "int32") -> np.ndarray:
    return np.arange(count, dtype=dtype)


def test_a_short_frame_is_its_head_and_its_fields() -> None:
    frame = frame_of(Stop("done"))
    message = LAYOUT.take_apart(frame)
    assert message.name == "Stop"
    assert sizes(message) == {"reason": 5, HEAD: 2}  # the number of the message, and that there is one field
    assert len(frame) == 7


def test_the_bytes_of_an_array_belong_to_its_field_wherever_they_lie() -> None:
    for count in (0, 3, 32, 33, 1000, 5000):
        frame = frame_of(Step(7, numbers(count)))
        result = sizes(LAYOUT.take_apart(frame))
        assert sum(result.values()) == len(frame)
        assert 4 * count <= result["rows"] <= 4 * count + 6


def test_arrays_inside_of_containers_have_their_own_fields() -> None:
    message = Step(
        1,
        numbers(100),
        Inner(numbers(200)),
        [Inner(numbers(300)), Inner(numbers(2)), Inner(numbers(400))],
        {"a": Buffer(bytes(5000)), "b": Buffer(b"xyz")},
        None,
        (5, numbers(600, "float32")),
        Kind.NEW,
    )
    frame = frame_of(message)
    result = sizes(LAYOUT.take_apart(frame))
    assert sum(result.values()) == len(frame)
    assert 400 < result["rows"] < 410
    assert 800 < result["inner.lengths"] < 810
    assert result["inner"] == 1  # that it has two fields
    assert 2808 < result["many"] < 2850
    assert 5003 < result["images"] < 5020
    assert 2400 < result["pair"] < 2410
    assert result["kind"] == 1 + len(Kind.NEW.value)
    assert PADDING in result


def test_the_pieces_are_the_frame_to_the_byte_whatever_the_message(seed: int) -> None:
    chance = random.Random(seed)

    def some() -> np.ndarray:
        return numbers(int(chance.expovariate(1 / 200)))

    for _ in range(200):
        message = Step(
            chance.randrange(2**40),
            some(),
            chance.choice([None, Inner(some(), "x" * chance.randrange(300))]),
            [Inner(some()) for _ in range(chance.randrange(5))],
            {str(index): Buffer(bytes(chance.randrange(9000))) for index in range(chance.randrange(4))},
            chance.choice([None, Params(chance.random())]),
            chance.choice([None, (1, some().astype("float32"))]),
        )
        frame = frame_of(message)
        result = sizes(LAYOUT.take_apart(frame))
        assert sum(result.values()) == len(frame)
        assert result.get(PADDING, 0) < 64 * 12


def test_plain_bytes_are_one_field() -> None:
    message = FrameLayout(b"").take_apart(b"anything")
    assert (message.name, sizes(message)) == ("bytes", {"": 8})


def test_frame_of_another_layout_is_a_decode_error() -> None:
    good = frame_of(Step(7, numbers(100)))
    for bad in (b"", b"\x03\x90", b"\x00\x90", b"\x01", b"\x01\xc0", b"\x01\xdd\xff\xff\xff\xff", b"\x81", good[:-1]):
        with pytest.raises(DecodeError):
            LAYOUT.take_apart(bad)


def test_a_damaged_frame_is_a_decode_error_or_adds_up(seed: int) -> None:
    chance = random.Random(seed)
    good = frame_of(Step(7, numbers(100), Inner(numbers(50)), [Inner(numbers(60))], {"a": Buffer(bytes(5000))}))
    apart = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            bad[min(int(chance.expovariate(1 / 30)), len(bad) - 1)] = chance.randrange(256)
        del bad[chance.randrange(len(bad)) + 1 if chance.random() < 0.2 else len(bad) :]
        try:
            message = LAYOUT.take_apart(bytes(bad))
        except DecodeError:
            continue
        apart += 1
        assert sum(sizes(message).values()) == len(bad)
    assert apart, "nothing survived, so nothing was added up"
