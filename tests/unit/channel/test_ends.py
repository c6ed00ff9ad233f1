"""The four classes of ends: what is an instance of them, how they look, and that the ends of bytes have all of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import penstock
from penstock import AsyncReceiver, AsyncSender, Buffer, Receiver, Sender
from penstock.lowlevel import ByteReceiver, ByteSender, FrameReceiver, FrameSender
from tests.support.loops import in_a_loop


class Step(msgspec.Struct, array_like=True):
    number: int


class Stop(msgspec.Struct, array_like=True):
    reason: str


CARRIED = [(bytes, "bytes"), (Buffer, "Buffer"), (Step, "Step"), (Step | Stop, "Step | Stop")]


@pytest.mark.parametrize("type", [type for type, _ in CARRIED])
@in_a_loop
async def test_ends_are_instances_of_the_public_classes(type: Any) -> None:
    with penstock.Ring(type) as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
        assert isinstance(sender, Sender) and not isinstance(sender, (Receiver, AsyncSender))
        assert isinstance(receiver, Receiver) and not isinstance(receiver, (Sender, AsyncReceiver))
    ring = penstock.Ring(type)
    async with ring.open_async_sender() as sender, ring.open_async_receiver() as receiver:
        assert isinstance(sender, AsyncSender) and not isinstance(sender, Sender)
        assert isinstance(receiver, AsyncReceiver) and not isinstance(receiver, Receiver)


@pytest.mark.parametrize(("type", "carries"), CARRIED)
def test_repr_of_channels_and_ends_names_the_carried_type(type: Any, carries: str) -> None:
    inbox = penstock.Inbox(type, senders=2, name="replies")
    sender, receiver = inbox.open_sender(1), inbox.open_receiver()
    ends = inbox.open_async_sender(0), penstock.Ring(type).open_async_receiver()
    assert repr(inbox) == f"Inbox('replies', {carries})"
    assert [repr(end) for end in (sender, receiver, *ends)] == [
        f"Sender(1 of 'replies', {carries})",
        f"Receiver(0 of 'replies', {carries})",
        f"AsyncSender(0 of 'replies', {carries})",
        f"AsyncReceiver(0 of 'ring', {carries})",
    ]
    for closable in (inbox, sender, receiver, *ends):
        closable.close()
        assert repr(closable).endswith(f"{carries}, closed)")


def test_repr_of_frame_ends_names_index_and_channel() -> None:
    with FrameReceiver(ring := penstock.Ring(Step)) as receiver, FrameSender(ring) as sender:
        assert (repr(receiver), repr(sender)) == ("FrameReceiver(0 of 'ring')", "FrameSender(0 of 'ring')")


@pytest.mark.parametrize(("native", "cls"), [(ByteSender, Sender), (ByteReceiver, Receiver)])
def test_ends_of_bytes_have_each_public_method_and_parameter(native: type, cls: type) -> None:
    public = {name for name in dir(cls) if not name.startswith("_")} | {"__enter__", "__exit__"}
    assert public <= set(dir(native)), public - set(dir(native))
    with penstock.Ring() as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
        sender.send(message=b"a", timeout=1)
        sender.send_nowait(message=b"b")
        assert (receiver.receive(timeout=1), receiver.receive_nowait()) == (b"a", b"b")
