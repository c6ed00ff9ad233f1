"""What a channel carries: the types that it takes, processes that attach for another, and how it reaches them."""

from __future__ import annotations

import multiprocessing
import os
import re
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock import Buffer, LayoutMismatch
from penstock.channel import Channel
from penstock.lowlevel import Pool, Segment


class Inner(msgspec.Struct, array_like=True, frozen=True):
    label: str = ""


class Step(msgspec.Struct, array_like=True, frozen=True):
    number: int
    inner: Inner | None = None
    ids: NDArray[np.int32] | None = None


class Stop(msgspec.Struct, array_like=True, frozen=True):
    why: str = ""


class NoStruct:
    pass


CLASSES: tuple[type[Channel[Any]], ...] = (penstock.Ring, penstock.Broadcast, penstock.Inbox)
CARRIED: list[Any] = [bytes, Buffer, Step, Step | Stop]
MANY: dict[type[Channel[Any]], dict[str, int]] = {
    penstock.Ring: {},
    penstock.Broadcast: {"receivers": 2},
    penstock.Inbox: {"senders": 2},
}


def create(cls: type[Channel[Any]], *type: Any, **options: Any) -> Channel[Any]:
    return cls(*type, **MANY[cls], **options)


def example(type: Any) -> Any:
    """What a channel of this type can send."""
    if type is bytes:
        return b"record"
    return Buffer(b"record") if type is Buffer else Step(7, Inner("x"))


# ── the argument ──
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("type", CARRIED, ids=str)
def test_a_channel_carries_what_its_type_says(cls: type[Channel[Any]], type: Any) -> None:
    with create(cls, type) as channel, channel.open_sender() as sender:
        receivers = [channel.open_receiver() for _ in range(channel.receivers)]
        for send in (sender.send, sender.send_nowait):
            send(example(type))
            for receiver in receivers:
                message = receiver.receive(timeout=5)
                assert message == example(type) and message.__class__ is example(type).__class__
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize(
    "type",
    [
        (Step,),
        (Step, Stop),
        "Step",
        "bytes",
        5,
        b"bytes",
        str,
        int,
        list,
        tuple,
        dict,
        object,
        bytearray,
        memoryview,
        np.ndarray,
        list[Step],
        tuple[Step, Stop],
        NoStruct,
        NoStruct(),
        Step(1),
        msgspec.Struct(),
        Any,
        None,
        Step | bytes,
        Step | Buffer,
        Step | None,
        Step | NoStruct,
        bytes | Buffer,
        typing.Union[bytes, Step],  # noqa: UP007
        typing.Optional[Step],  # noqa: UP045
        typing.Annotated[Step, "note"],
    ],
    ids=lambda type: f"{type!r:.60}",
)
def test_unsupported_type_is_refused_with_the_supported_types(type: Any) -> None:
    accepted = "expected bytes, Buffer, a subclass of msgspec.Struct or a union of subclasses (Step | Stop), got "
    for cls in CLASSES:
        with pytest.raises(TypeError, match=re.escape(accepted + repr(type)[:100])):
            create(cls, type)
    for carried in CARRIED:
        with penstock.Ring(carried) as channel, pytest.raises(TypeError, match=re.escape(accepted)):
            penstock.attach(channel.ticket, type)


def test_a_union_that_is_made_with_typing_is_the_same_union() -> None:
    older = typing.Union[Step, Stop]  # noqa: UP007
    for type, other in ((older, Step | Stop), (Step | Stop, older), (older, older)):
        with penstock.Ring(type) as channel, penstock.attach(channel.ticket, other) as attached:
            with attached.open_sender() as sender:
                sender.send(Stop("x"))
                sender.send(Step(1))
            assert list(channel.open_receiver()) == [Stop("x"), Step(1)]


# ── attaching ──
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("carried", "type", "why"),
    [
        (Step | Stop, bytes, "got 'steps', which carries messages: attach with type=Step | Stop"),
        (Step | Stop, Buffer, "got 'steps', which carries messages: attach with type=Step | Stop"),
        (Step, bytes, "got 'steps', which carries messages: attach with type=Step"),
        (bytes, Step, "expected a channel of Step, got 'steps', which carries bytes"),
        (Buffer, Step | Stop, "expected a channel of Step, Stop, got 'steps', which carries bytes"),
        (Step | Stop, Step, "Stop is not known here"),
        (Step | Stop, Stop, "Inner is not known here; Step is not known here"),
        (Step, Step | Stop, "Stop is not known there"),
        (Step | Stop, Stop | Step, "the order is Step, Stop there, Stop, Step here"),
        (Step | Stop, Step | Stop | Inner, "Inner is a message of its own here, and only part of one there"),
        (Step | Stop | Inner, Step | Stop, "Inner is a message of its own there, and only part of one here"),
        (Step, msgspec.defstruct("Step", [("number", int)], array_like=True), "Step has no 'inner: Inner | None' here"),
        (
            Step,
            msgspec.defstruct(
                "Step", [("number", float), ("inner", Inner | None), ("ids", NDArray[np.int64] | None)], array_like=True
            ),
            "Step has 'number: int' there, 'number: float' here; Step has 'ids: None | array[int32]' there, "
            "'ids: None | array[int64]' here",
        ),
        (
            Step,
            msgspec.defstruct("Step", [("number", int), ("inner", Inner | None), ("pixels", Buffer)], array_like=True),
            "Step has 'ids: None | array[int32]' there, 'pixels: buffer' here",
        ),
    ],
    ids=str,
)
def test_attach_with_another_type_raises_with_the_difference(
    cls: type[Channel[Any]], carried: Any, type: Any, why: str
) -> None:
    with create(cls, carried, name="steps") as channel:
        for where in (channel.ticket, str(channel.ticket)):
            with pytest.raises(LayoutMismatch, match=re.escape(why)):
                penstock.attach(where, type)
        if type is bytes:
            with pytest.raises(LayoutMismatch, match=re.escape(why)):
                penstock.attach(channel.ticket)
        assert channel.peers() == []


def test_refused_attach_leaves_descriptor_and_channel_unchanged() -> None:
    with penstock.Ring(Step) as channel:
        fd = os.dup(channel.fd)
        for type, error in ((bytes, LayoutMismatch), (Buffer, LayoutMismatch), (Stop, LayoutMismatch), (5, TypeError)):
            with pytest.raises(error):
                penstock.attach(fd, type)
        assert channel.peers() == []
        with penstock.attach(fd, Step) as attached, attached.open_sender() as sender:
            sender.send(Step(1))
            assert channel.open_receiver().receive(timeout=5) == Step(1)


def test_attach_with_a_type_refuses_stores_pools_and_segments() -> None:
    for shared in (
        penstock.Store(4096, name="other"),
        Pool.create(4096, name="other"),
        Segment.create(10, name="other"),
    ):
        assert type(penstock.attach(shared.ticket)) is type(shared)
        for carried in (Buffer, Step, Step | Stop):
            with pytest.raises(LayoutMismatch, match="expected a channel, got segment 'other'"):
                penstock.attach(shared.ticket, carried)


# ── another process ──
def echo_all(there: list[Channel[Any]], back: list[Channel[Any]]) -> None:
    for channel, answers in zip(there, back, strict=True):
        with channel.open_receiver() as receiver, answers.open_sender() as sender:
            assert channel.name in ("ring", "broadcast", "inbox")
            sender.send(receiver.receive(timeout=60))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_channel_reaches_a_spawned_process_with_its_type(cls: type[Channel[Any]]) -> None:
    context = multiprocessing.get_context("spawn")
    there = [create(cls, carried) for carried in CARRIED]
    back = [penstock.Ring(carried) for carried in CARRIED]
    child = context.Process(target=echo_all, args=(there, back))
    child.start()
    try:
        for channel, answers, carried in zip(there, back, CARRIED, strict=True):
            with answers.open_receiver() as receiver, channel.open_sender() as sender:
                sender.send(example(carried))
                message = receiver.receive(timeout=60)
                assert message == example(carried) and message.__class__ is example(carried).__class__
    finally:
        child.join(60)
    assert child.exitcode == 0


class Comparing(msgspec.Struct, array_like=True):
    number: int

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a message is compared")


def test_iteration_compares_no_message() -> None:
    channel = penstock.Ring(Comparing)
    with channel.open_receiver() as receiver:
        with channel.open_sender() as sender:
            for number in range(3):
                sender.send(Comparing(number))
        assert [message.number for message in receiver] == [0, 1, 2]
