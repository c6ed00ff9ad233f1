"""The errors: one tree, by the side at fault, each also what Python's own hierarchy would call it."""

import pytest

import penstock
from penstock import errors, lowlevel

TREE = {
    "PenstockError": (Exception,),
    "ChannelError": (errors.PenstockError,),
    "ClosedError": (errors.ChannelError, RuntimeError),
    "EndOfChannel": (errors.ChannelError,),
    "WouldBlock": (errors.ChannelError,),
    "CorruptRecord": (errors.ChannelError,),
    "Timeout": (errors.PenstockError, TimeoutError),
    "PeerDied": (errors.PenstockError,),
    "MemoryExhausted": (errors.PenstockError, MemoryError),
    "Missing": (errors.PenstockError, KeyError),
    "StaleRef": (errors.PenstockError,),
    "OutOfStep": (errors.PenstockError,),
    "LayoutMismatch": (errors.PenstockError,),
    "DecodeError": (errors.PenstockError, ValueError),
    "UnsupportedTensor": (errors.PenstockError, TypeError),
}


def test_tree_of_error_classes() -> None:
    result = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert {name: cls.__bases__ for name, cls in result.items()} == TREE


@pytest.mark.parametrize("name", TREE)
def test_every_error_is_public_and_has_a_docstring(name: str) -> None:
    module = penstock if name in penstock.__all__ else lowlevel
    assert getattr(module, name) is getattr(errors, name)
    assert name in module.__all__
    assert getattr(errors, name).__doc__


def test_an_error_that_was_made_by_hand_has_its_fields() -> None:
    assert (errors.Timeout("x").receiver, errors.Timeout("x").pid) == (None, None)
    assert (errors.PeerDied("x").name, errors.PeerDied("x").how) == ("", "")
    assert (errors.MemoryExhausted("x").requested, errors.MemoryExhausted("x").free) == (0, 0)
    assert (errors.StaleRef("x").expected, errors.StaleRef("x").actual) == (0, 0)


def test_a_time_out_is_also_pythons_own() -> None:
    with penstock.Ring() as channel, channel.open_receiver() as receiver, pytest.raises(TimeoutError):
        receiver.receive(timeout=0)


def test_public_names_exist_and_are_sorted() -> None:
    for module in (penstock, lowlevel):
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert module.__all__ == sorted(module.__all__)
