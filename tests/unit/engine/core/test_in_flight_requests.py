"""The list of requests in the steps in flight, as servers find it on the verdict board."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from penstock.engine.cluster.topology import MAX_BESIDE, Cluster, ProcessId
from penstock.engine.cluster.verdict_board import Cause, VerdictBoard
from penstock.engine.core.in_flight_requests import InFlightRequests
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import Joined, Resumed, SamplingParams, Step

NONE = np.zeros(0, np.int32)


def step(*, left: tuple[int, ...] = (), preempted: tuple[int, ...] = (), resumed: tuple[int, ...] = (),
         joined: dict[int, tuple[int, int]] | None = None) -> Step:  # fmt: skip
    """`joined`: server and request of each slot."""
    rows = joined or {}
    slots = np.array([*rows], np.uint16)
    return Step(
        1,
        1,
        left=np.array(left, np.uint16) if left else None,
        preempted=np.array(preempted, np.uint16) if preempted else None,
        joined=Joined(
            slots,
            np.array([request for _, request in rows.values()], np.int32),
            (SamplingParams(),),
            NONE,
            NONE,
            NONE,
            NONE,
            servers=np.array([server for server, _ in rows.values()], np.uint16),
        )
        if rows
        else None,
        resumed=Resumed(np.array(resumed, np.uint16), NONE, NONE) if resumed else None,
    )


class Scene:
    def __init__(self, cluster: Cluster) -> None:
        self.undelivered: list[tuple[int, int]] = []
        self.requests = InFlightRequests(cluster, ProcessId("core", 0, 0, 1), 4, lambda: self.undelivered)
        self.board = VerdictBoard(cluster.verdicts, writable=True)
        self.board.write_cause(0, 1, Cause.ITSELF)

    def listed(self) -> set[tuple[int, int]]:
        verdict = self.board.verdict(0, 1)
        assert verdict is not None
        return set(verdict.in_flight)


@contextmanager
def playing() -> Iterator[Scene]:
    with closing(Cluster.open(EngineConfig(simulated=SimulatedDevice(), max_num_seqs=4))) as cluster:
        yield Scene(cluster)


def test_list_has_the_requests_of_all_steps_in_flight() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5), 2: (1, 6)}), False)
        assert scene.listed() == {(0, 5), (1, 6)}
        scene.requests.on_step(step(left=(0,), joined={0: (0, 7)}), False)
        assert scene.listed() == {(0, 5), (1, 6), (0, 7)}, "the first step is not done"
        scene.requests.on_result()
        scene.requests.on_step(step(), False)
        assert scene.listed() == {(1, 6), (0, 7)}


def test_list_leaves_out_preempted_requests_until_they_are_resumed() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5), 1: (0, 6)}), False)
        scene.requests.on_result()
        scene.requests.on_step(step(preempted=(1,)), False)
        assert scene.listed() == {(0, 5)}
        scene.requests.on_result()
        scene.requests.on_step(step(resumed=(1,)), False)
        assert scene.listed() == {(0, 5), (0, 6)}


def test_list_is_empty_when_no_step_is_in_flight() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5)}), False)
        scene.requests.on_result()
        assert scene.listed() == {(0, 5)}
        scene.requests.on_idle()
        assert scene.listed() == set()
        scene.requests.on_step(step(), True)
        assert scene.listed() == {(0, 5)} and scene.board.verdict(0, 1).is_trial


def test_list_has_admitted_requests_until_the_next_step() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5)}), False)
        scene.requests.on_admit([(0, 6), (1, 7)], False)
        assert scene.listed() == {(0, 5), (0, 6), (1, 7)}
        scene.requests.on_step(step(), False)
        assert scene.listed() == {(0, 5)}, "they have no slot yet"
        scene.requests.on_result()
        scene.requests.on_result()
        scene.requests.on_admit([(0, 8)], True)
        assert scene.listed() == {(0, 8)} and scene.board.verdict(0, 1).is_trial


def test_list_has_room_for_full_steps_and_some_requests_beside_them() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={slot: (0, slot) for slot in range(4)}), False)
        scene.requests.on_step(step(left=(0, 1, 2, 3), joined={slot: (1, slot) for slot in range(4)}), False)
        scene.undelivered += [(3, number) for number in range(2 * MAX_BESIDE)]
        scene.requests.on_admit([(2, number) for number in range(2 * MAX_BESIDE)], False)
        listed = scene.listed()
        assert len(listed) == 8 + 2 * MAX_BESIDE and {(0, 3), (1, 3), (2, 0), (3, 0)} <= listed


def test_list_has_requests_that_have_ended_until_that_is_delivered() -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5), 1: (0, 6)}), False)
        scene.requests.on_result()
        scene.undelivered.append((0, 5))
        for left in ((0,), ()):
            scene.requests.on_step(step(left=left), False)
            assert scene.listed() == {(0, 5), (0, 6)}
            scene.requests.on_result()
        scene.undelivered.clear()
        scene.requests.on_step(step(), False)
        assert scene.listed() == {(0, 6)}


def test_steady_steps_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing() as scene:
        scene.requests.on_step(step(joined={0: (0, 5)}), False)
        monkeypatch.setattr(VerdictBoard, "write_requests", None)
        for _ in range(3):
            scene.requests.on_step(step(), False)
            scene.requests.on_result()
