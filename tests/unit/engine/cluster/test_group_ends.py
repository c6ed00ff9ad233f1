"""Ends of a group's processes: which deaths they pass over."""

import pytest

from penstock import PeerDied
from penstock.engine.cluster.group_ends import GroupReceiver, GroupSender
from penstock.engine.cluster.topology import ProcessId

ME = ProcessId("worker", 1, 0, 3)


class FakeEnd:
    """A sender or receiver that reports deaths, and then works."""

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.sent: list[object] = []

    def receive(self, timeout: float | None) -> str:
        if self.deaths:
            death = PeerDied("died")
            death.name = self.deaths.pop()
            raise death
        return "message"

    def send(self, message: object, timeout: float) -> None:
        self.receive(timeout)
        self.sent.append(message)

    def send_nowait(self, message: object) -> None:
        self.send(message, 0)


def test_end_passes_over_deaths_of_former_incarnations() -> None:
    end = FakeEnd()
    receiver, sender = GroupReceiver(end, ME, 10), GroupSender(end, ME, 10)
    end.deaths = ["core 1.0 #1", "?", "core 1.0 #2"]
    assert receiver.receive() == "message"
    end.deaths = ["core 1.0 #1"]
    sender.send(1, 10)
    end.deaths = ["core 1.0 #1"]
    sender.send_nowait(2)
    assert end.sent == [1, 2]


@pytest.mark.parametrize("name", ["core 1.0 #3", "core 0.0 #2", "launcher"])
def test_end_raises_other_deaths(name: str) -> None:
    end = FakeEnd()
    receiver, sender = GroupReceiver(end, ME, 10), GroupSender(end, ME, 10)
    for call in (receiver.receive, lambda: sender.send(1, 10), lambda: sender.send_nowait(1)):
        end.deaths = [name]
        with pytest.raises(PeerDied):
            call()
    assert not end.sent


def test_end_raises_stale_death_when_no_successor_comes() -> None:
    end = FakeEnd()
    end.deaths = ["core 1.0 #2"]
    with pytest.raises(PeerDied):
        GroupReceiver(end, ME, 0).receive()
    end.deaths = ["core 1.0 #2"]
    with pytest.raises(PeerDied):
        GroupSender(end, ME, 10).send(1, 0)
