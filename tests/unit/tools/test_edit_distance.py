"""The edit distance: exact where that is affordable, and else an upper bound that says so."""

import random

import pytest

from penstock.installing import how_to_install
from penstock.tools.capture import edit_distance
from penstock.tools.capture.edit_distance import between, most_between, without_common_ends
from penstock.tools.capture.measure_error import MeasureError, required


def by_the_book(first: bytes, second: bytes) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        before, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


@pytest.mark.parametrize("cells", [edit_distance.CELLS, 0], ids=["short", "long"])
def test_the_distance_is_that_of_the_book(cells: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Common ends of long messages are taken off first."""
    monkeypatch.setattr(edit_distance, "CELLS", cells)
    chance = random.Random(seed)
    for _ in range(200):
        first = bytes(chance.choices(b"abc"[: chance.choice((2, 3))], k=chance.randrange(40)))
        second = bytes(chance.choices(b"abc"[: chance.choice((2, 3))], k=chance.randrange(40)))
        assert between(first, second) == (by_the_book(first, second), True)


def test_edit_distance_of_a_small_change_is_exact(seed: int) -> None:
    before = random.Random(seed).randbytes(100_000)
    after = before[:50] + b"12345" + before[50:90_000] + before[90_003:]
    assert before[90_000:90_003] != b"" and between(before, before).edits == 0
    result = between(before, after)
    assert result.is_exact
    assert result.edits <= 8


def test_long_messages_that_have_little_in_common_get_a_bound(seed: int) -> None:
    chance = random.Random(seed)
    before, after = chance.randbytes(20_000), chance.randbytes(19_000)
    result = between(before, after)
    assert not result.is_exact
    assert 15_000 < result.edits <= 20_000
    assert between(before, after, near=20_000).is_exact


def test_the_bound_is_never_below_the_distance(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        first = bytes(chance.choices(b"ab", k=chance.randrange(30)))
        second = bytes(chance.choices(b"ab", k=chance.randrange(30)))
        assert most_between(first, second) >= by_the_book(first, second)


def test_common_ends_are_taken_off_once() -> None:
    assert without_common_ends(b"aaa", b"aaaa") == (b"", b"a")
    assert without_common_ends(b"abXcd", b"abYYcd") == (b"X", b"YY")
    assert without_common_ends(b"", b"x") == (b"", b"x")
    assert without_common_ends(b"same", b"same") == (b"", b"")


def test_missing_library_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(MeasureError, match="needs nowhere, which is not installed: ") as caught:
        required("nowhere.distance", "the edit distance")
    assert how_to_install("measure") in str(caught.value)
