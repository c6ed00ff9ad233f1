"""Messages of vLLM as records: what comes back, what is copied, and records that are none."""

import pickle
import random
from typing import Any

import numpy as np
import pytest

from penstock import Broadcast, DecodeError, LongRecords
from penstock.integrations.vllm import records
from penstock.integrations.vllm.records import ALIGN, BESIDE_NBYTES, HEAD, decode, encode


def joined(body: Any, **options: Any) -> bytes:
    return b"".join(encode(body, **options))


def large(value: int = 7, *, nbytes: int = BESIDE_NBYTES, is_writable: bool = True) -> Any:
    array = np.full(nbytes, value, np.uint8)
    array.flags.writeable = is_writable
    return array


@pytest.mark.parametrize("body", [None, 0, "text", ("execute_model", ([1, 2],), {"a": b"b"}, 0), np.arange(3)])
def test_a_record_returns_the_message_without_a_section(body: Any) -> None:
    section, received = decode(joined(body))
    assert section == b""
    np.testing.assert_equal(received, body)


def test_a_record_carries_a_section_and_a_body_only_where_there_is_one() -> None:
    section, body = decode(joined(None, section=b"what is new"))
    assert (section, body) == (b"what is new", None)
    section, body = decode(joined({"logprobs": [1.5]}, section=b"what is new"))
    assert (section, body) == (b"what is new", {"logprobs": [1.5]})


def test_record_has_large_buffers_beside_the_pickle_aligned_to_64_bytes() -> None:
    record = joined([large(1), "between", large(2, nbytes=BESIDE_NBYTES + 5), large(3)])
    address = np.frombuffer(record, np.uint8).ctypes.data
    _, body = decode(record, "all")
    assert [int(array[0]) for array in body if not isinstance(array, str)] == [1, 2, 3]
    assert all((array.ctypes.data - address) % ALIGN == 0 for array in body if not isinstance(array, str))


def test_a_record_refers_to_large_buffers_and_does_not_copy_them() -> None:
    array = large()
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in encode(array) if len(part))
    small = large(nbytes=BESIDE_NBYTES - 1)
    assert not any(np.shares_memory(np.frombuffer(part, np.uint8), small) for part in encode(small) if len(part))


@pytest.mark.parametrize(
    ("views", "is_writable", "is_shown"),
    [
        ("none", True, False),
        ("none", False, False),
        ("readonly", True, False),
        ("readonly", False, True),
        ("all", True, True),
        ("all", False, True),
    ],
)
def test_a_buffer_is_shown_where_it_lies_or_copied_as_views_say(
    views: records.Views, is_writable: bool, is_shown: bool
) -> None:
    record = joined(large(is_writable=is_writable))
    _, received = decode(record, views)
    assert np.shares_memory(received, np.frombuffer(record, np.uint8)) == is_shown
    assert received.flags.writeable == (is_writable and not is_shown)
    np.testing.assert_array_equal(received, large())


def test_records_of_a_channel_leave_the_pool_when_the_last_view_is_gone() -> None:
    channel = Broadcast(receivers=1, long_records=LongRecords(max_records=1))
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        for value in range(3):
            sender.send(encode(large(value, is_writable=False)), timeout=1)
            _, received = decode(receiver.receive_view(timeout=1), "readonly")  # type: ignore[attr-defined]
            assert received[-1] == value
            del received


# ── records that are none ──
def test_a_record_that_is_cut_off_anywhere_says_so() -> None:
    record = joined({"a": large(), "b": "text"}, section=b"section")
    lengths = [*range(64), *range(0, len(record), 65_536), len(record) - 1]
    for length in lengths:
        with pytest.raises(DecodeError, match=r"a record of [\d,]+ bytes (is cut off|has no room)"):
            decode(record[:length])


def test_a_record_that_is_longer_than_its_parts_says_so() -> None:
    with pytest.raises(DecodeError, match="is longer than its parts, which end at"):
        decode(joined("text") + b"x")


@pytest.mark.parametrize("head", [(1 << 31, 0, 0), (0, 1 << 31, 0), (0, 0, 1 << 63), (1, 0, 5)])
def test_a_record_whose_head_promises_more_than_there_is_says_so(head: tuple[int, int, int]) -> None:
    with pytest.raises(DecodeError, match="is cut off: its head names"):
        decode(HEAD.pack(*head) + b"short")


def test_a_pickle_that_cannot_be_loaded_names_its_cause() -> None:
    pickled = pickle.dumps("text", protocol=5)[:-1]
    with pytest.raises(DecodeError, match=r"the pickle of \d+ bytes cannot be loaded: \w+: "):
        decode(HEAD.pack(0, 0, len(pickled)) + pickled)


def test_random_bytes_in_place_of_a_record_raise_nothing_but_decode_errors(seed: int) -> None:
    chance = random.Random(seed)
    good = bytearray(joined({"a": list(range(20)), "b": "text"}, section=b"section"))
    for _ in range(2_000):
        wrong = bytearray(good)
        for _ in range(chance.randint(1, 4)):  # in the head, as a pickle that was changed could do anything
            wrong[chance.randrange(HEAD.size)] = chance.randrange(256)
        try:
            decode(bytes(wrong))
        except DecodeError:
            pass
