"""Words that the other side mirrors: changes cross, each word by itself, and only to places that may be written."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.bridge import InboundWords, LinkSpec, OutboundWords
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.packets import WORD_PAIR
from penstock.bridge.word_mirror import WordMirror
from tests.conftest import eventually
from tests.support.links import running

LINK = LinkSpec("link")


def words(count: int = 8) -> "memoryview[int]":
    return memoryview(bytearray(8 * count)).cast("Q")


def are(mirror: "memoryview[int]", expected: list[int]) -> Callable[[], bool]:
    return lambda: mirror.tolist() == expected


def test_words_are_mirrored_when_they_change() -> None:
    source, mirror = words(4), words(4)
    source[2] = 7
    home = replace(LINK, words=[OutboundWords("row", source, period=0.01)])
    away = replace(LINK, words=[InboundWords("row", mirror)])
    with running(home, away) as links:
        eventually(are(mirror, [0, 0, 7, 0]))
        source[0], source[2] = (1 << 64) - 1, 0
        eventually(are(mirror, [(1 << 64) - 1, 0, 0, 0]))
        sent = links[0].link.stats().nbytes_sent
        mirror[3] = 9  # of this side
        source[1] = 5
        eventually(are(mirror, [(1 << 64) - 1, 5, 0, 9]))
        assert links[0].link.stats().nbytes_sent - sent < 200, "only what has changed"


def test_word_mirror_writes_only_the_named_words() -> None:
    source, mirror = words(4), words(4)
    source[0], source[1], source[3] = 1, 2, 4
    home = replace(LINK, words=[InboundWords("row", mirror, places=[1, 3])])
    away = replace(LINK, words=[OutboundWords("row", source, period=0.01)])
    with running(home, away):
        eventually(are(mirror, [0, 2, 0, 4]))


def test_several_rows_go_both_ways() -> None:
    sources, mirrors = [words(1) for _ in range(3)], [words(1) for _ in range(3)]
    home = [OutboundWords("a", sources[0], 0.01), InboundWords("b", mirrors[1]), OutboundWords("c", sources[2], 0.01)]
    away = [InboundWords("c", mirrors[2]), InboundWords("a", mirrors[0]), OutboundWords("b", sources[1], 0.01)]
    for number, source in enumerate(sources, 1):
        source[0] = number
    with running(replace(LINK, words=home), replace(LINK, words=away)):
        for number, mirror in enumerate(mirrors, 1):
            eventually(are(mirror, [number]))


def test_words_that_do_not_exist_or_are_cut_break_the_protocol() -> None:
    mirror = WordMirror(InboundWords("row", words(2)))
    with pytest.raises(ProtocolError, match="words 'row' are 2: word 2 came"):
        mirror.store(memoryview(WORD_PAIR.pack(2, 1)))
    with pytest.raises(ProtocolError, match="came in 15 bytes, not in pairs"):
        mirror.store(memoryview(bytes(15)))
