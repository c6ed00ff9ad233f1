"""An output processor between its channels: the core and the servers are played here, in one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from penstock import PeerDied, Receiver, Sender, WouldBlock
from penstock.engine.cluster import group_ends
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import (
    Abort,
    ChunkFormat,
    Delta,
    OutputReady,
    SamplingParams,
    Started,
    Stop,
    Style,
    Tokens,
)
from penstock.engine.text.detokenizer import Vocabulary
from tests.conftest import eventually, spawn
from tests.support.processes import soon, thread

A, B = 0, 1
WORDS = Vocabulary([b"a", b"b"])


class Scene:
    """The core sends, and each sample that starts has the next slot."""

    def __init__(self, cluster: Cluster, held: contextlib.ExitStack) -> None:
        group = cluster.groups[0]
        self.inbox: Receiver = held.enter_context(group.inbox.open_receiver(name="core 0.0 #1"))
        self.tokens: Sender = held.enter_context(group.tokens[0].open_sender(name="core 0.0 #1"))
        self.servers = [
            held.enter_context(inbox.open_receiver(name=f"server 0.{number} #1"))
            for number, inbox in enumerate(cluster.servers)
        ]
        self.output = an_output(cluster)
        assert self.inbox.receive(1) == OutputReady(0, 1, 0)
        held.callback(self.output.close)
        self.slots = 0

    def start(self, request: int, server: int = 0, chunk_format: ChunkFormat | None = None, **params: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": None, **params})
        started = Started(self.slots, request, sampling, (), chunk_format, server)
        self.tokens.send(Tokens(np.zeros(0, np.int32), started=(started,)), 1)
        assert self.output.process_next()
        self.slots += 1

    def give(self, *ids: int, **columns: Any) -> None:
        """The next tokens of all samples."""
        self.tokens.send(Tokens(np.array(ids, np.int32), np.arange(self.slots, dtype=np.uint16), **columns), 1)

    def step(self, *ids: int, **columns: Any) -> None:
        self.give(*ids, **columns)
        assert self.output.process_next()


@contextlib.contextmanager
def laid(**options: Any) -> Iterator[Cluster]:
    sizes = {"api_server_count": 2, "max_num_seqs": 8, "block_size": 4, "step_timeout": 1.0}
    cluster = Cluster.open(EngineConfig(simulated=SimulatedDevice(), **sizes, **options))
    with contextlib.closing(cluster):
        yield cluster


@contextlib.contextmanager
def playing(**options: Any) -> Iterator[Scene]:
    with laid(**options) as cluster, contextlib.ExitStack() as held:
        yield Scene(cluster, held)


def an_output(cluster: Cluster) -> OutputProcessor:
    return OutputProcessor(cluster, ProcessId("output", 0, 0, 1), WORDS)


def turns(of: OutputProcessor) -> None:
    while of.process_next():
        pass


def test_each_server_gets_a_delta_of_its_rows() -> None:
    with playing() as scene:
        scene.start(5)
        scene.start(5, server=1)
        scene.step(A, B)
        for server, text in zip(scene.servers, (b"a", b"b"), strict=True):
            delta = server.receive(1)
            assert isinstance(delta, Delta)
            assert (delta.requests.tolist(), delta.text) == ([5], text)


def test_server_gets_no_message_before_the_interval_is_over() -> None:
    with playing(stream_interval=3) as scene:
        scene.start(5)
        texts = []
        for token in (A, B, B, A, A):
            scene.step(token)
            with contextlib.suppress(WouldBlock):
                texts.append(scene.servers[0].receive_nowait().text)
        assert texts == [b"a", b"bba"]


def test_server_that_reads_nothing_delays_no_other_and_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing() as scene:
        monkeypatch.setattr(group_ends, "MAX_KEPT", 3)
        head = b'{"id":"' + b"x" * 20_000 + b'"'  # so that little fits its lane
        for request in (5, 6):
            scene.start(request, server=1, chunk_format=ChunkFormat(Style.COMPLETION, head))
        scene.start(5)
        for _ in range(60):
            scene.step(A, A, A)
            assert scene.servers[0].receive(1).text == b"a"
            with contextlib.suppress(WouldBlock):
                abort = scene.inbox.receive_nowait()
                break
        else:
            pytest.fail("no request was aborted")
        assert isinstance(abort, Abort)
        assert (abort.server, abort.requests.tolist(), abort.samples) == (1, [5, 6], None)
        scene.step(A, A, A)
        assert scene.servers[0].receive(1).rows == 1


def test_aborts_wait_for_a_full_core_without_delaying_answers() -> None:
    with playing() as scene:
        for request in range(8):
            scene.start(request, stop=("ab",))
        scene.step(*[A] * 8)
        send, tries = scene.output._inbox.send_nowait, 0

        def full(message: Any) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise WouldBlock("no room")
            send(message)

        scene.output._inbox.send_nowait = full  # type: ignore[method-assign]
        scene.step(*[B] * 8)
        with pytest.raises(WouldBlock):
            scene.inbox.receive_nowait()
        assert scene.output.process_next() and scene.output.process_next()  # no message comes, and it tries again
        assert scene.inbox.receive(1).requests.tolist() == list(range(8))


def test_all_that_comes_before_the_stop_of_the_core_is_answered() -> None:
    with playing() as scene:
        scene.start(5)
        scene.give(A)
        scene.give(B)
        scene.tokens.send(Stop(), 1)
        turns(scene.output)
        assert [scene.servers[0].receive(1).text for _ in range(2)] == [b"a", b"b"]


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def core(cluster: Cluster, words: Connection) -> None:
    """Sends a message, and lives on."""
    with cluster.groups[0].tokens[0].open_sender(name="core 0.0 #1") as tokens:
        tokens.send(Tokens(np.zeros(0, np.int32)), 5)
        words.send("sent")
        words.recv()


def test_output_processor_notices_death_of_the_core_within_100_ms() -> None:
    def measure() -> float:
        ours, remote = multiprocessing.Pipe()
        with laid() as cluster, closing(an_output(cluster)) as mine, spawn(core, cluster, remote) as process:
            assert ours.recv() == "sent"
            channel = cluster.groups[0].tokens[0]
            with thread(lambda: turns(mine)) as turning:
                eventually(lambda: channel.snapshot()["receivers"][0]["waiting_ns"])
                process.kill()
                killed_at = time.monotonic()
                turning.ended()
            assert isinstance(turning.error, PeerDied) and turning.error.name == "core 0.0 #1"
            return turning.ended_at - killed_at

    soon(measure)
