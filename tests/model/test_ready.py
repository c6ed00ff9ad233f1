"""The ready bits of an inbox: no record is forgotten when a sender dies between committing and saying so.

The code is inbox.py's; the receiver is there, and counted in every lane, from the first record on.
"""

from functools import partial

import pytest

from tests import tiers
from tests.model.explorer import Process, Step, View, must
from tests.model.inbox import FIRST, LANES, Receiver, Sender, inbox, reap_sender
from tests.model.scene import ASLEEP, Scene


def sending(records: tuple[int, int] = (2, 1), *, dies: bool = False, mutation: str = "") -> Scene:
    """Each sends so many and closes; the first may die anywhere. The receiver reads until the end."""

    def at_end(view: View) -> None:
        read, deaths = view.result("receiver")
        for lane in range(LANES):
            committed = len(view["committed", lane])
            must(read[lane] == committed, f"{read[lane]} records of lane {lane} were read and {committed} committed")
            has_died = view["word", lane] == ("dead", FIRST)
            must(
                (deaths[lane] == FIRST) == has_died,
                f"of a death of sender {lane} the receiver was told: {deaths[lane]}",
            )

    processes = [
        *(
            Process(f"sender {i}", partial(sends, i, n, mutation), may_die=dies and i == 0)
            for i, n in enumerate(records)
        ),
        Process("receiver", lambda: Receiver(mutation).receive()),
    ]
    if dies:
        processes.append(
            Process("reaper", partial(reap_sender, "sender 0", 0, mutation, is_followed=False), is_daemon=True)
        )
    return Scene(inbox(), processes, at_end=at_end, must_end=True, limit=800_000)


def sends(lane: int, records: int, mutation: str) -> Step:
    me = Sender(lane, mutation)
    me.seen_changes = 0
    for _ in range(records):
        yield from me.commit()
    yield from me.close()


@pytest.mark.parametrize(("model", "records"), [("sc", (2, 1)), *tiers.only_in_all(("tso", (1, 1))), ("weak", (1, 1))])
def test_no_record_of_two_senders_is_forgotten(model: str, records: tuple[int, int]) -> None:
    sending(records).holds(10_000, model)


@pytest.mark.parametrize(("model", "records"), [*tiers.only_in_all(("sc", (1, 1))), ("weak", (1, 0))])
def test_a_sender_that_dies_anywhere_loses_nothing_that_it_had_committed(model: str, records: tuple[int, int]) -> None:
    sending(records, dies=True).holds(10_000, model)


# ── what each part is there for ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("mutation", ["looks before clearing", "no last look", "ready before committed"])
def test_the_bit_is_set_after_committing_and_cleared_before_the_last_look(mutation: str) -> None:
    sending((2, 1), mutation=mutation).fails(f"{ASLEEP}|were read and")


def test_ready_bit_releases_the_records_committed_before() -> None:
    sending((1, 1)).without("ready", "release").holds(10_000, "tso")
    sending((1, 1)).without("ready", "release").fails(f"{ASLEEP}|were read and", "weak")


def test_a_reaper_that_wakes_nobody_leaves_the_receiver_asleep() -> None:
    sending((1, 0), dies=True, mutation="the reaper wakes nobody").fails(ASLEEP)


def test_last_records_are_received_before_the_death_is_reported() -> None:
    """The word says dead before the bit is set; so a channel with all other lanes closed would end too early."""
    sending((1, 0), dies=True, mutation="the reaper says nothing").holds(10_000)
    sending((1, 0), dies=True, mutation="look_at_ends does not look after it").fails("were read and")
