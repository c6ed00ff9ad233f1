"""The processes that others wait for, found in channels that are made up."""

from typing import Any

from penstock.server.status.snapshot import AwaitedView, ChannelView, EndView, awaited_processes
from tests.unit.server.status.test_snapshot_rates import zero

CORE, WORKER, OUTPUT, SERVER, LAUNCHER = "core 0.0", "worker 0.0", "output 0.0", "server 0", "launcher"
NOTHING_IDLE: frozenset[str] = frozenset()


def channel(kind: str, senders: dict[str, float], receivers: dict[str, float], **behind: int) -> ChannelView:
    """A channel with the seconds that each end waits. `behind`: records, by the role of a receiver."""
    ends = [EndView(process, True, waits, 0) for process, waits in senders.items()]
    ends += [EndView(name, False, waits, behind.get(name.split()[0], 0)) for name, waits in receivers.items()]
    view: Any = zero(ChannelView, kind=kind, ends=tuple(ends))
    return view  # type: ignore[no-any-return]


def engine(core: float = 0.0, worker: float = 0.0, output: float = 0.0, server: float = 0.0) -> list[ChannelView]:
    """The channels of an engine. Each argument: seconds that a process waits for records."""
    return [
        channel("inbox", {SERVER: 0.0, WORKER: 0.0, LAUNCHER: 0.0}, {CORE: 0.0}),
        channel("broadcast", {CORE: 0.0}, {WORKER: worker}),
        channel("ring", {WORKER: 0.0}, {CORE: core}),
        channel("ring", {CORE: 0.0}, {OUTPUT: output}),
        channel("inbox", {CORE: 0.0, OUTPUT: 0.0}, {SERVER: server}),
    ]


def test_awaited_process_is_at_the_end_of_the_chain() -> None:
    (awaited,) = awaited_processes(engine(core=3.0, output=2.0, server=1.0), NOTHING_IDLE)
    assert awaited == AwaitedView(WORKER, (CORE, OUTPUT, SERVER), 3.0)
    (awaited,) = awaited_processes(engine(worker=0.5, output=0.25), NOTHING_IDLE)
    assert awaited == AwaitedView(CORE, (OUTPUT, WORKER), 0.5)


def test_awaited_process_is_the_worker_that_owes_a_result() -> None:
    """The worker waits for the next step while the device computes, and its core for the result of this step."""
    (awaited,) = awaited_processes(engine(core=3.0, worker=2.9, output=2.0, server=1.0), NOTHING_IDLE)
    assert awaited == AwaitedView(WORKER, (CORE, OUTPUT, SERVER), 3.0)


def test_awaited_process_is_none_without_requests() -> None:
    """All wait for work: the worker for steps, the core for requests."""
    channels = engine(worker=9.0, output=9.0, server=9.0)
    channels[0] = channel("inbox", {SERVER: 0.0, LAUNCHER: 0.0}, {CORE: 9.0})
    assert awaited_processes(channels, frozenset({CORE, WORKER, OUTPUT})) == ()
    channels = [channel("inbox", {SERVER: 0.0, LAUNCHER: 0.0}, {CORE: 9.0})]
    assert awaited_processes(channels, NOTHING_IDLE) == (), "a core without a step waits for requests"


def test_awaited_process_is_the_receiver_that_a_sender_waits_for() -> None:
    channels = engine()
    channels[1] = channel("broadcast", {CORE: 4.0}, {WORKER: 0.0, "bridge 0 to node 1": 0.0}, bridge=7, worker=1)
    (awaited,) = awaited_processes(channels, NOTHING_IDLE)
    assert awaited == AwaitedView("bridge 0 to node 1", (CORE,), 4.0)
