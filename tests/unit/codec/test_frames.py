"""Messages to frames and back: what comes out is what went in, and what is not a message is a DecodeError."""

from __future__ import annotations

import array
import enum
import random
import types
import typing
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import Buffer, DecodeError
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.codec.dtypes import DTYPES
from penstock.codec.frame import HEAD, INLINE_NBYTES, LONG_NBYTES, split
from tests import tiers


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct, array_like=True, frozen=True):
    label: str
    weights: NDArray[np.float32]


class Settings(msgspec.Struct, array_like=True, frozen=True):
    heat: float = 1.0
    words: tuple[str, ...] = ()


class Plain(msgspec.Struct, array_like=True, frozen=True):
    number: int
    text: str = ""
    ratio: float = 0.0
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    counts: dict[str, int] = {}
    small: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0


class Arrays(msgspec.Struct, array_like=True, frozen=True):
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_] | None = None
    wide: NDArray[np.float64] | None = None
    inner: tuple[Inner, ...] = ()
    image: Buffer | None = None


class Asking(msgspec.Struct, array_like=True, frozen=True):
    name: str
    settings: Settings
    other: Settings | None = None


CATALOGUE = Catalogue(Plain, Arrays, Asking)


def joined(frame: Any) -> bytes:
    return b"".join(bytes(piece) for piece in frame) if isinstance(frame, list) else bytes(frame)


class Wire:
    """An encoder, and the decoder of a receiver of all its frames."""

    def __init__(self, catalogue: Catalogue = CATALOGUE) -> None:
        self.encoder = FrameEncoder(catalogue)
        self.decoder = FrameDecoder(catalogue)

    def frame(self, message: msgspec.Struct) -> bytes:
        return joined(self.encoder.encode(message))

    def over(self, message: msgspec.Struct) -> Any:
        return self.decoder.decode(self.frame(message))


def test_a_plain_message_is_its_number_and_its_fields_without_their_names() -> None:
    wire = Wire()
    message = Plain(7, "x", 0.5, Colour.BLUE, "b", {"k": 1}, 3)
    frame = wire.frame(message)
    assert wire.decoder.decode(frame) == message
    assert frame[0] == 1
    assert b"number" not in frame and b"colour" not in frame
    assert frame[1:] == msgspec.msgpack.encode(message)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 100, 5000])
def test_every_kind_of_number_arrives_as_it_was_sent(dtype: np.dtype[Any], count: int) -> None:
    cls = msgspec.defstruct("Carrier", [("it", np.ndarray[Any, np.dtype[dtype.type]])], array_like=True)  # type: ignore[name-defined]
    wire = Wire(Catalogue(cls))
    sent = np.random.default_rng(count).integers(0, 2, count).astype(dtype)
    actual = wire.over(cls(sent)).it
    assert actual.dtype == dtype and actual.shape == (count,)
    assert np.array_equal(actual, sent)
    assert not actual.flags.writeable


def test_arrays_are_parts_of_the_frame_and_views_of_it() -> None:
    wire = Wire()
    sent = np.arange(3000, dtype=np.int32)
    frame = wire.encoder.encode(Arrays(sent, wide=np.ones(700)))
    assert any(piece is sent for piece in frame), "the array was copied before it was sent"
    whole = joined(frame)
    text = wire.decoder.decode(whole)
    inside = np.frombuffer(whole, np.uint8)
    assert np.shares_memory(text.ids, inside) and np.shares_memory(text.wide, inside)
    assert np.array_equal(text.ids, sent) and np.array_equal(text.wide, np.ones(700))


def test_received_arrays_are_read_only_in_a_writable_frame() -> None:
    wire = Wire()
    sent = Arrays(np.arange(3, dtype=np.int32), wide=np.ones(700), image=Buffer(b"x" * 300))
    text = wire.decoder.decode(bytearray(wire.frame(sent)))
    assert not text.ids.flags.writeable and not text.wide.flags.writeable and text.image.view.readonly


def test_a_million_numbers_never_become_python_objects() -> None:
    class Ids(msgspec.Struct, array_like=True):
        ids: NDArray[np.int32]

    import tracemalloc

    cls = msgspec.defstruct("Ids", [("ids", NDArray[np.int32])], array_like=True)
    wire = Wire(Catalogue(cls))
    sent = np.arange(1_000_000, dtype=np.int32)
    wire.over(cls(sent[:1000]))
    tracemalloc.start()
    try:
        frame = wire.encoder.encode(cls(sent))
        encoding = tracemalloc.get_traced_memory()[1]
        whole = joined(frame)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        text = wire.decoder.decode(whole)
        decoding = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert np.array_equal(text.ids, sent)
    assert encoding < 20_000 and decoding < 20_000, (encoding, decoding)


def test_parts_lie_at_multiples_of_8_and_long_ones_of_64() -> None:
    wire = Wire()
    for lengths in ((200, 33, 1), (LONG_NBYTES, 200, 5000), (INLINE_NBYTES + 1,) * 3):
        inner = tuple(Inner("x" * n, np.zeros(n, np.float32)) for n in lengths)
        whole = np.zeros(20_000_0 // 64 * 64, np.uint8)
        frame = joined(
            wire.encoder.encode(Arrays(np.zeros(lengths[0], np.int32), inner=inner, image=Buffer(b"y" * 999)))
        )
        at = -whole.ctypes.data % 64
        whole[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        text = wire.decoder.decode(whole[at : at + len(frame)].data)
        for result in (text.ids, *(item.weights for item in text.inner)):
            if result.nbytes > INLINE_NBYTES:
                assert result.ctypes.data % (64 if result.nbytes >= LONG_NBYTES else 8) == 0
                assert result.flags.aligned


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 4), (2, 3, 4), (1, 1, 1, 1), (100, 70)])
def test_shapes_arrive(shape: tuple[int, ...]) -> None:
    sent = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    actual = Wire().over(Arrays(sent)).ids
    assert actual.shape == shape
    assert np.array_equal(actual, sent)


def test_non_contiguous_arrays_are_compacted() -> None:
    wire = Wire()
    square = np.arange(10_000, dtype=np.int32).reshape(100, 100)
    for sent in (square[:, 3], square.T, square[::2, ::-1], square[5:6, :2], square.astype(">i4")):
        message = Arrays(sent)
        if sent.dtype != np.int32:
            with pytest.raises(TypeError, match=r"expected an array of (>i4|int32) at \$\.ids of \w+, got"):
                wire.over(message)
            continue
        assert np.array_equal(wire.over(message).ids, sent)


def test_an_array_of_other_numbers_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match=r"expected an array of int32 at \$\.ids of Arrays, got int64"):
        Wire().frame(Arrays(np.arange(3)))


def test_an_array_of_other_numbers_deep_inside_is_refused_where_it_arrives() -> None:
    wire = Wire()
    for n in (3, 3000):
        wrong = Arrays(np.zeros(1, np.int32), inner=(Inner("a", np.zeros(1, np.float32)), Inner("b", np.zeros(n))))  # type: ignore[arg-type]
        with pytest.raises(
            DecodeError, match=r"expected an array of float32, got one of float64 at \$\.inner\[1\]\.weights"
        ):
            wire.over(wrong)


@pytest.mark.parametrize("stand_in", [5, 0, True, [5], b"abc", "x"], ids=repr)
def test_value_that_looks_like_an_array_or_part_is_refused_by_send(stand_in: Any) -> None:
    wire = Wire()
    name = type(stand_in).__name__
    for message, why in (
        (Arrays(stand_in), rf"expected an array of int32 at \$\.ids of Arrays, got {name}"),
        (Arrays(np.zeros(1, np.int32), image=stand_in), rf"expected Buffer at \$\.image of Arrays, got {name}"),
    ):
        with pytest.raises(TypeError, match=why):
            wire.frame(message)


def test_an_array_that_is_more_than_its_numbers_is_refused() -> None:
    sent = np.arange(3, dtype=np.int32)
    assert np.array_equal(Wire().over(Arrays(sent.view(np.recarray))).ids, sent)
    with pytest.raises(TypeError, match="expected an array without a mask, got a masked array"):
        Wire().frame(Arrays(np.ma.masked_array(sent, [True, False, False])))
    with pytest.raises(TypeError, match=r"expected an array of int32 at \$\.ids of Arrays, got float64"):
        Wire().frame(Arrays(array.array("d", [1.0])))  # type: ignore[arg-type]


def test_a_number_wider_than_python_s_is_refused() -> None:
    with pytest.raises(TypeError, match="got a longdouble"):
        Wire().frame(Plain(1, ratio=np.longdouble(1)))  # type: ignore[arg-type]


def test_interrupted_encoding_leaves_nothing_in_the_next_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    part = wire.encoder._part

    def interrupted(kind: int, nbytes: int, at: Any) -> int:
        part(kind, nbytes, at)
        wire.encoder._end = 0  # as it was when the array had been put among the parts, and not been counted
        raise KeyboardInterrupt

    monkeypatch.setattr(wire.encoder, "_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wire.encoder.encode(Arrays(np.arange(5000, dtype=np.int32)))
    monkeypatch.undo()
    assert np.array_equal(wire.over(Arrays(np.arange(200, dtype=np.int32))).ids, np.arange(200))


def test_encoding_in_a_signal_handler_keeps_the_interrupted_message(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, inner = Wire(), []
    part = wire.encoder._part

    def interrupted(kind: int, nbytes: int, at: Any) -> int:
        result = part(kind, nbytes, at)
        if not inner:
            inner.append(b"")  # once
            inner[0] = wire.frame(Arrays(np.arange(5000, dtype=np.int32)))
        return result

    monkeypatch.setattr(wire.encoder, "_part", interrupted)
    outer = wire.frame(Arrays(np.arange(3000, dtype=np.int32), wide=np.ones(700)))
    assert wire.decoder.decode(inner[0]).ids.size == 5000
    text = wire.decoder.decode(outer)
    assert np.array_equal(text.ids, np.arange(3000)) and text.wide.sum() == 700


def test_arrays_of_the_standard_library_and_numbers_of_numpy_are_taken() -> None:
    wire = Wire()
    actual = wire.over(Arrays(array.array("i", [1, 2, 3])))  # type: ignore[arg-type]
    assert actual.ids.tolist() == [1, 2, 3]
    assert wire.over(Arrays(array.array("i"))).ids.size == 0  # type: ignore[arg-type]
    assert wire.over(Plain(np.int64(5), ratio=np.float32(0.5))) == Plain(5, ratio=0.5)  # type: ignore[arg-type]


def test_parts_carry_bytes_of_anything() -> None:
    wire = Wire()
    for sent in (b"", b"abc", bytes(100_000), bytearray(b"x" * 300), memoryview(np.arange(6.0).reshape(2, 3))):
        actual = wire.over(Arrays(np.zeros(1, np.int32), image=Buffer(sent)))
        assert bytes(actual.image) == bytes(sent) and len(actual.image) == memoryview(sent).nbytes
        assert actual.image.view.readonly


def test_decode_error_has_the_kind_and_fields_of_the_message() -> None:
    def meant(frame: bytes) -> tuple[type | None, tuple[object, ...]]:
        with pytest.raises(DecodeError) as caught:
            FrameDecoder(CATALOGUE).decode(frame)
        return caught.value.kind, caught.value.fields

    wrong: Any = "much"
    plain = joined(FrameEncoder(CATALOGUE).encode(Plain(7, "seven", wrong)))
    assert meant(plain) == (Plain, (7, "seven", "much", "red", "a", None, 0))
    asking = FrameEncoder(CATALOGUE).encode(Asking("who", Settings(wrong)))
    assert meant(joined(asking)) == (Asking, ("who", None, None))
    assert meant(b"") == meant(b"\x09\x90") == meant(b"\x81") == (None, ())
    assert meant(b"\x01\xc1") == meant(b"\x01\x05") == (Plain, ())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "expected a frame, got no bytes"),
        (b"\x00", "expected the number of a message, 1 to 3 .Plain, Arrays, Asking., got 0"),
        (b"\x05\x90", "1 to 3 .* got 5"),
        (b"\x01", "Plain: input data was truncated"),
        (b"\x01\xc1", "Plain: "),
        (b"\x01\x91\xa1x", r"Plain: expected `int`, got `str` at \$\.number"),
        (b"\x01\x97\x01\xa0\x00\xa3red\xa1a\x80\x0a", r"Plain: expected `int` <= 9 at \$\.small"),
        (b"\x01\x90", "Plain: expected `array` of at least length 1, got 0"),
        (b"\x01\x92\x01\xa1\xff", r"Plain: .*utf"),
        (b"\x81", "expected a frame with parts, got 1 bytes"),
        (HEAD.pack(0x81, 0, 7, 0), "expected the head of a frame"),
        (HEAD.pack(0x81, 2, 0, 0), "expected the head of a frame"),
        (HEAD.pack(0x81, 0, 0, 5), "expected a frame of at least 13 bytes, got 8"),
        (HEAD.pack(0x81, 0, 0, (1 << 32) - 1), "expected a frame of at least"),
        (HEAD.pack(0x81, 0, 0, 2) + b"\x91\x01" + bytes(6) + b"x", "expected parts of 0 bytes, got 1"),
        (b"\x02\x91\x07", r"Arrays: expected an array of int32, got one of uint16 at \$\.ids"),
        (b"\x02\x91\xcd\x04\x05", r"Arrays: expected a part of 32 bytes, got 0 at \$\.ids"),
        (b"\x02\x91\xc3", r"Arrays: expected an array or part, got bool at \$\.ids"),
        (b"\x02\x91\xff", r"Arrays: expected an array or part, got int at \$\.ids"),
        (b"\x02\x91\xd5\x05ab", r"Arrays: expected numbers of 4 bytes each, got 2 bytes at \$\.ids"),
        (b"\x02\x91\xd6\x07abcd", r"Arrays: expected an array of int32, got one of uint16 at \$\.ids"),
        (b"\x02\x91\xd6\x7fabcd", r"got one of kind 127"),
        (b"\x02\x91\x92\xd6\x05abcd\x02", r"expected a shape of 1 numbers, got \[2\] at \$\.ids"),
        (b"\x02\x91\x92\xd6\x05abcd\xff", r"expected a shape, got \[-1\]"),
        (b"\x02\x91\x92\xd6\x05abcd\xc3", r"expected a shape, got \[True\]"),
        (b"\x02\x91\x90", r"expected an array or part, got list"),
        (b"\x02\x92\xd6\x05abcd\xd4\x02\x07", r"expected 0 and 1, got 7 at \$\.mask"),
        (b"\x03\x92\xa0\xa1x", r"Asking: expected `array`, got `str` at \$\.settings"),
    ],
)
def test_malformed_frame_raises_decode_error_with_the_reason(frame: bytes, why: str) -> None:
    decoder = FrameDecoder(CATALOGUE)
    with pytest.raises(DecodeError, match=why):
        decoder.decode(frame)
    assert decoder.decode(Wire().frame(Plain(1))) == Plain(1), "the next frame was the worse for it"


def test_deep_nesting_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(DecodeError):
        FrameDecoder(CATALOGUE).decode(b"\x01\x92\x01" + b"\x91" * 100_000)


def test_mutated_frames_are_messages_or_decode_errors(seed: int) -> None:
    chance = random.Random(seed)
    wire = Wire()
    messages: list[msgspec.Struct] = [
        Plain(7, "x", 0.5, Colour.BLUE, "b", {"k": 1}, 3),
        Arrays(np.arange(3, dtype=np.int32), np.ones(200, np.bool_), np.ones((5, 8)), (Inner("a", np.ones(50, "f4")),)),
        Arrays(np.arange(2000, dtype=np.int32), image=Buffer(b"z" * 700)),
        Asking("a", Settings(0.1), Settings(0.2, ("w",))),
    ]
    frames = [wire.frame(message) for message in messages]
    decoded = 0
    for _ in range(tiers.FRAMES_MUTATIONS):
        frame = bytearray(chance.choice(frames))
        for _ in range(chance.choice((1, 1, 2, 5))):
            where = min(chance.randrange(len(frame)), chance.randrange(len(frame)))
            action = chance.random()
            if action < 0.6:
                frame[where] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
            elif action < 0.8:
                del frame[where : where + chance.randrange(1, 9)]
            else:
                frame[where:where] = chance.randbytes(chance.randrange(1, 9))
            if not frame:
                frame = bytearray(1)
        try:
            text = wire.decoder.decode(bytes(frame))
        except DecodeError:
            continue
        assert isinstance(text, (Plain, Arrays, Asking))
        decoded += 1
    assert 1 / 300 < decoded / tiers.FRAMES_MUTATIONS < 29 / 30, decoded
    for message, frame in zip(messages, frames, strict=True):
        assert type(wire.decoder.decode(frame)) is type(message)


def test_frame_is_split_without_its_classes() -> None:
    wire = Wire()
    result = split(wire.frame(Asking("name", Settings(0.7))))
    assert result.number == 3
    assert msgspec.msgpack.decode(result.struct) == ["name", [0.7, []], None]
    assert len(result.parts) == 0
    result = split(wire.frame(Arrays(np.arange(2000, dtype=np.int32))))
    assert result.number == 2 and np.frombuffer(result.parts, np.int32).tolist() == list(range(2000))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Catalogue(), "1 to 127 classes"),
        (lambda: Catalogue(int), "expected a message to be a subclass of msgspec.Struct, got <class 'int'>"),  # type: ignore[arg-type]
        (lambda: Catalogue(msgspec.defstruct("M", ["a"])), "define it with array_like=True"),
        (lambda: Catalogue(struct(a=Any)), r"structs of these at M\.a, got typing\.Any"),
        (lambda: Catalogue(struct(a=object)), r"at M\.a, got <class 'object'>"),
        (lambda: Catalogue(struct(a=np.ndarray)), r"at M\.a, got <class 'numpy\.ndarray'>"),
        (lambda: Catalogue(struct(a=NDArray[Any])), r"expected an array with its dtype at"),
        (lambda: Catalogue(struct(a=NDArray[np.object_])), r"expected an array with its dtype at"),
        (lambda: Catalogue(struct(a=list[NDArray[np.datetime64]])), r"expected an array with its dtype at"),
        (lambda: Catalogue(struct(a=msgspec.defstruct("N", ["b"]))), r"struct without field names for N, in M\.a"),
        (lambda: Catalogue(struct(a=int), struct(b=int)), "got two named M"),
    ],
)
def test_catalogue_refuses_unsupported_types(make: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        make()


class Plain2(msgspec.Struct, array_like=True):
    number: int


def struct(**fields: Any) -> type[msgspec.Struct]:
    return msgspec.defstruct("M", list(fields.items()), array_like=True)


def test_send_refuses_a_message_of_another_channel() -> None:
    wire = Wire()
    with pytest.raises(TypeError, match="Plain2 is not a message of this channel, which carries Plain, Arrays, Asking"):
        wire.frame(Plain2(1))
    with pytest.raises(TypeError, match="got a complex"):
        wire.frame(Plain(1j))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got one of object"):
        wire.frame(Arrays(np.zeros(1, np.int32), inner=(Inner("x", np.array([object()])),)))
    assert wire.over(Plain(1)) == Plain(1)


def test_a_struct_that_is_too_long_for_its_head_is_refused() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 32

    encoder = FrameEncoder(CATALOGUE)
    with pytest.raises(ValueError, match="a struct of 4294967296 bytes does not fit a frame"):
        encoder._with_parts(1, Long())


def test_an_array_whose_numbers_are_unknown_is_no_field() -> None:
    numbers = TypeVar("numbers", bound=np.generic)
    cls = msgspec.defstruct("Unknown", [("values", np.ndarray[Any, np.dtype[numbers]])], array_like=True)  # type: ignore[valid-type]
    with pytest.raises(TypeError, match=r"expected an array with its dtype at Unknown\.values, as NDArray\[np.int32\]"):
        Catalogue(cls)


def test_a_note_beside_a_type_changes_no_schema() -> None:
    plain, noted = (
        msgspec.defstruct("Noted", [("number", kind)], array_like=True) for kind in (int, Annotated[int, "seconds"])
    )
    assert Catalogue(plain).schema.fingerprint == Catalogue(noted).schema.fingerprint


class Alias:
    """A type alias by its attributes, as NumPy 2.5 defines NDArray; `typing.TypeAliasType` is new in Python 3.12."""

    def __init__(self, name: str, value: Any, type_params: tuple[Any, ...] = ()) -> None:
        self.__name__, self.__value__, self.__type_params__ = name, value, type_params

    def __getitem__(self, arguments: Any) -> Any:
        return types.GenericAlias(self, arguments)  # type: ignore[arg-type]


Item = TypeVar("Item", bound=np.generic)
Key = TypeVar("Key")
TypeAliasType: Any = getattr(typing, "TypeAliasType", Alias)
Values = TypeAliasType("Values", np.ndarray[Any, np.dtype[Item]], type_params=(Item,))
Table = TypeAliasType("Table", dict[Key, Values[Item]], type_params=(Item, Key))
Noted = TypeAliasType("Noted", Annotated[int | None, msgspec.Meta(ge=0)])


@pytest.mark.parametrize(
    ("alias", "description"),
    [
        (Values[np.int32], "array[int32]"),
        (list[Values[np.int32]], "list[array[int32]]"),
        (Table[np.int32, str], "dict[str, array[int32]]"),
        (Noted, "None | int ge=0"),
    ],
)
def test_alias_is_described_as_the_type_behind_the_alias(alias: Any, description: str) -> None:
    assert CATALOGUE._describe(alias, "M.a") == description


def test_alias_that_contains_itself_is_refused() -> None:
    alias = Alias("Nested", None)
    alias.__value__ = types.GenericAlias(list, (alias,))
    with pytest.raises(TypeError, match="expected type aliases that do not contain themselves in M"):
        Catalogue(struct(a=types.GenericAlias(list, (alias,))))


def test_alias_of_a_union_of_messages_is_the_union() -> None:
    assert Catalogue.of(TypeAliasType("Message", Plain | Plain2)).messages == (Plain, Plain2)


def test_an_error_names_the_field_inside_of_a_pair_and_of_a_dict() -> None:
    class Nested(msgspec.Struct, array_like=True):
        pair: tuple[int, Settings]
        table: dict[str, Settings]

    catalogue = Catalogue(Nested)
    assert catalogue.named_path(Nested, "expected float - at `$[0][1][0]`") == "expected float at $.pair[1].heat"
    assert catalogue.named_path(Nested, "expected float - at `$[1][...][0]`") == "expected float at $.table[...].heat"
