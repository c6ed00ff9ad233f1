"""Values of a store over a link, by key: once over the wire however many ask, straight into the store over there."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from penstock import Empty, EndOfChannel, Lease, MemoryExhausted, Missing, Ring, Store, Timeout, content_key
from penstock.bridge import InboundChannel, LinkSpec, OutboundChannel, PullChannels, Puller, StoreValues
from tests.conftest import eventually
from tests.support.links import RunningLink, running
from tests.support.processes import threads

LINK = LinkSpec("link", heartbeat_s=0.05, silence_s=10.0)


def is_equal(lease: Lease, expected: "np.ndarray[Any, Any]") -> bool:
    with lease:
        return bool(np.array_equal(lease.value(), expected))


@dataclass
class Nodes:
    home: Store
    away: Store
    pulls: PullChannels
    links: tuple[RunningLink, RunningLink]

    def puller(self, client: int) -> Puller:
        return Puller(self.pulls, client, self.away, name=f"worker {client}")


@contextmanager
def two_nodes(away_nbytes: int = 1 << 26, clients: int = 3) -> Iterator[Nodes]:
    pulls = PullChannels.open(clients)
    with Store(1 << 26, name="home") as home, Store(away_nbytes, name="away") as away:
        with running(replace(LINK, values=StoreValues(home)), replace(LINK, values=StoreValues(away, pulls))) as links:
            yield Nodes(home, away, pulls, links)
    pulls.close()


def test_a_value_is_pulled_into_the_store_of_the_node_that_asks() -> None:
    with two_nodes() as nodes:
        puller = nodes.puller(0)
        for nbytes in (8, 100_000, 20_000_000):
            image = {"pixels": np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8), "size": (nbytes, 1)}
            key = content_key(image["pixels"])
            nodes.home.put(image, key=key).release()
            with puller.get(key) as lease:
                value = lease.value()
                assert np.array_equal(value["pixels"], image["pixels"]) and value["size"] == (nbytes, 1)
                assert not value["pixels"].flags.writeable
                del value
            assert nodes.away.get(key).nbytes == nodes.home.get(key).nbytes
        assert nodes.links[0].link.stats().values_sent == nodes.links[1].link.stats().values_received == 3
        puller.close()


def test_value_already_in_the_local_store_is_not_pulled() -> None:
    with two_nodes() as nodes:
        puller = nodes.puller(0)
        nodes.away.put(b"here", key=bytes(32)).release()
        nodes.home.put(b"there", key=bytes(32)).release()
        assert puller.get(bytes(32)).value() == b"here"
        assert nodes.links[0].link.stats().values_sent == 0
        puller.close()


def test_value_is_pulled_once_for_many_readers() -> None:
    with two_nodes() as nodes:
        pixels = np.arange(1 << 21)
        nodes.home.put(pixels, key=bytes(32)).release()
        results: list[bool] = []

        def ask(client: int) -> None:
            puller = nodes.puller(client)
            with puller.get(bytes(32)) as lease:
                results.append(np.array_equal(lease.value(), pixels))
            puller.close()

        with threads(*(functools.partial(ask, client) for client in range(3))):
            pass
        assert results == [True] * 3
        assert nodes.links[0].link.stats().values_sent == 1
        assert nodes.away.evict(bytes(32)), "no grant is left"


def test_a_value_that_neither_node_has_is_missing() -> None:
    with two_nodes() as nodes:
        puller = nodes.puller(0)
        with pytest.raises(Missing, match=r"neither 'away' nor the other node keeps 0000.*'home' over there"):
            puller.get(bytes(32))
        nodes.home.put(b"now", key=bytes(32)).release()
        assert puller.get(bytes(32)).value() == b"now"
        assert nodes.links[1].link.stats().values_missing == 1
        puller.close()


def test_a_value_without_room_is_refused_and_the_link_goes_on() -> None:
    with two_nodes(away_nbytes=1 << 20) as nodes:
        puller = nodes.puller(0)
        nodes.home.put(np.zeros(1 << 21, np.uint8), key=bytes(32)).release()
        nodes.home.put(b"small", key=bytes([1]) * 32).release()
        with pytest.raises(MemoryExhausted):
            puller.get(bytes(32))
        assert puller.get(bytes([1]) * 32).value() == b"small"
        assert nodes.links[0].link.stats().values_declined == 1, "it has not crossed"
        puller.close()


@pytest.mark.parametrize(("is_committed", "expected"), [(True, 9), (False, 7)], ids=["committed", "abandoned"])
def test_pull_waits_for_a_local_writer_of_the_value(is_committed: bool, expected: int) -> None:
    with two_nodes() as nodes:
        puller = nodes.puller(0)
        nodes.home.put(np.full(1000, 7), key=bytes(32)).release()
        loan = nodes.away.loan(bytes(32), Empty(1000, "int64"))
        results: list[int] = []
        asking = threading.Thread(target=lambda: results.append(int(puller.get(bytes(32)).value()[0])))
        asking.start()
        eventually(lambda: nodes.links[0].link.stats().values_declined == 1)
        if is_committed:
            loan.value()[:] = 9
            loan.commit().release()
        else:
            loan.abandon()
        asking.join(5)
        assert results == [expected]
        puller.close()


def test_late_answer_is_not_mistaken_for_the_next_answer() -> None:
    pulls = PullChannels.open(1)
    with Store(1 << 20) as home, Store(1 << 20) as away:
        home.put(b"one", key=bytes([1]) * 32).release()
        home.put(b"two", key=bytes([2]) * 32).release()
        puller = Puller(pulls, 0, away)
        with pytest.raises(Timeout):
            puller.get(bytes([1]) * 32, timeout=0.01)  # no bridge is there yet
        with running(replace(LINK, values=StoreValues(home)), replace(LINK, values=StoreValues(away, pulls))):
            assert puller.get(bytes([2]) * 32).value() == b"two"
        puller.close()
    pulls.close()


def test_frames_pass_while_a_value_crosses() -> None:
    source, target = Ring(), Ring()
    pulls = PullChannels.open(1)
    with Store(1 << 27) as home, Store(1 << 27) as away:
        pixels = np.arange(1 << 23)  # 64 MiB
        home.put(pixels, key=bytes(32)).release()
        first = replace(LINK, values=StoreValues(home), channels=[OutboundChannel("frames", source)])
        second = replace(LINK, values=StoreValues(away, pulls), channels=[InboundChannel("frames", target)])
        with running(first, second) as links, source.open_sender() as sender, target.open_receiver() as receiver:
            puller = Puller(pulls, 0, away)
            results: list[bool] = []
            asking = threading.Thread(target=lambda: results.append(is_equal(puller.get(bytes(32), 30), pixels)))
            asking.start()
            eventually(lambda: links[1].link.stats().nbytes_received > 1 << 20)
            passed = 0
            while asking.is_alive():
                sender.send(b"%d" % passed)
                assert receiver.receive(5) == b"%d" % passed
                passed += 1
            asking.join()
            assert results == [True] and passed > 0
            puller.close()
    pulls.close()


def test_a_bridge_that_has_ended_is_no_wait() -> None:
    with two_nodes() as nodes:
        puller = nodes.puller(0)
        assert not nodes.home.evict(bytes(32))
        with pytest.raises(Missing):
            puller.get(bytes(32))
        for side in nodes.links:
            side.link.stop("enough")
        for side in nodes.links:
            side.end()
        with pytest.raises((EndOfChannel, Timeout)):
            puller.get(bytes(32), timeout=0.5)
        puller.close()
