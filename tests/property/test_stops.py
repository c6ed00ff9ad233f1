"""Stop strings against the plainest search: any text, cut anywhere, with any stop strings."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.text.detokenizer import StopStringFilter, Vocabulary
from tests import tiers

LETTERS = st.text("abé€", min_size=0, max_size=24)
STOPS = st.lists(st.text("abé€", min_size=1, max_size=5), min_size=0, max_size=4, unique=True)


def plainly(text: str, free: int, stops: list[str], includes: bool) -> tuple[str, str | None]:
    """Looks at every end in turn; the first `free` characters end nothing."""
    for end in range(free + 1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if includes else end - len(stop)], stop
    return text, None


@settings(max_examples=tiers.STOPS_EXAMPLES, deadline=None)
@given(LETTERS, st.lists(st.integers(1, 9), max_size=40), STOPS, st.booleans(), st.integers(0, 6))
@example("aab", [1, 1, 1], ["aab", "ab"], False, 0)
def test_stop_strings_match_a_plain_search_however_a_text_is_cut(
    text: str, cuts: list[int], stops: list[str], includes: bool, least: int
) -> None:
    encoded = text.encode()
    pieces = []
    for length in [*cuts, len(encoded)]:
        pieces.append(encoded[:length])
        encoded = encoded[length:]
    pieces = [piece for piece in pieces if piece]
    ours = StopStringFilter(Vocabulary(pieces).stream([], True), tuple(stops), includes)
    free = len(b"".join(pieces[:least]).decode(errors="ignore"))
    expected, stop = plainly(text, free, stops, includes)
    shown = ""
    for number in range(len(pieces)):
        shown += ours.add(number, number >= least)
        assert expected.startswith(shown), "what is shown cannot be taken back"
        if ours.stop is not None:
            break
        # No more is held back than what a stop string may begin with.
        certain = b"".join(pieces[: number + 1]).decode(errors="ignore")
        held = certain[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    if ours.stop is None:
        shown += ours.end(len(pieces) > least)
    assert (shown, ours.stop) == (expected, stop)
