"""How the messages of two channels differ, as a link between nodes and `attach` list it."""

import msgspec
import pytest

from penstock.codec.catalogue import Catalogue, Schema, schema_differences
from penstock.errors import LayoutMismatch


class Ask(msgspec.Struct, array_like=True):
    number: int
    text: str


class Stop(msgspec.Struct, array_like=True):
    pass


def longer() -> type[msgspec.Struct]:
    class Ask(msgspec.Struct, array_like=True):
        number: int
        text: str
        more: bytes

    return Ask


def encoded(*messages: type[msgspec.Struct]) -> bytes:
    return Catalogue(*messages).schema.encode()


def test_schema_differences_are_none_for_the_same_messages() -> None:
    assert schema_differences(encoded(Ask, Stop), encoded(Ask, Stop)) == []
    assert schema_differences(b"", b"") == []


def test_schema_differences_name_the_field_on_the_side_that_has_it() -> None:
    (missing,) = schema_differences(encoded(Ask), encoded(longer()))
    (more,) = schema_differences(encoded(longer()), encoded(Ask))
    assert "more" in missing and missing.endswith("here")
    assert "more" in more and more.endswith("there")


def test_schema_differences_say_which_side_carries_bytes() -> None:
    assert schema_differences(b"", encoded(Ask)) == ["it carries bytes here, messages there"]
    assert schema_differences(encoded(Ask), b"") == ["it carries messages here, bytes there"]


def test_schema_differences_refuse_a_description_that_is_none() -> None:
    with pytest.raises(LayoutMismatch, match="no description of its messages"):
        schema_differences(b"{}", b"[[[")
    with pytest.raises(LayoutMismatch, match="no description of its messages"):
        Schema.decode(b"\xff")


def test_schemas_of_one_fingerprint_are_the_same_however_written() -> None:
    assert schema_differences(encoded(Ask), encoded(Ask) + b" ") == []
