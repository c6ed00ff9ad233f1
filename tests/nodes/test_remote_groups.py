"""A group on another node answers as one of the home node, and its requests go on when that node is lost.

The simulated device's rule says what an answer is. The node is in a pid namespace of its own: no ticket leads to it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.client.client import Client, ImageInput
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.crash.test_engine_migration import Reader, counted, migrations, readers, require_exact
from tests.support.certificates import make_certificates
from tests.support.engine import START, answered, prompt
from tests.support.fine_tunes import write_fine_tune
from tests.support.loops import in_a_loop
from tests.support.nodes import DIRECTIONS, REMOTE, TwoNodes, has_namespaces, two_nodes

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here")

OPEN = 16  # requests, when the blow falls


def of_remote(started: list[Reader]) -> int:
    return sum(reader.stream.group == REMOTE for reader in started)


async def require_both(engine: TwoNodes, client: Client) -> None:
    """Both nodes serve again, and take requests."""
    await engine.serving_again(client)
    await engine.until(lambda: not engine.number(StatusBoard.ABSENT_OUTPUTS, REMOTE), START)  # else it gets no requests
    for group in range(2):
        await engine.must_be_empty(group)
    again = await readers(client, OPEN, 5)
    assert 0 < of_remote(again) < OPEN
    await require_exact(engine, again)


@in_a_loop
async def test_requests_are_divided_among_nodes_and_answered_alike() -> None:
    async with two_nodes(tensor_parallel_size=2) as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN)
        assert 0 < of_remote(started) < OPEN
        await require_exact(engine, started)
        assert migrations(client) == {}
        ids = prompt()
        assert await answered(client, ids, max_tokens=20, n=3, ignore_eos=True)
        for group in range(2):
            await engine.must_be_empty(group)


@in_a_loop
async def test_streams_go_on_when_an_output_of_the_other_node_is_killed() -> None:
    """Other deaths, and losses of the link: test_node_campaign."""
    async with two_nodes() as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN)
        lost = of_remote(started)
        os.kill(engine.remote.pid_of("output"), signal.SIGKILL)
        await require_exact(engine, started)
        assert migrations(client) == {"output": lost}
        await require_both(engine, client)


@in_a_loop
async def test_streams_go_on_in_place_when_connections_are_reset() -> None:
    async with two_nodes() as engine, Client(engine.launcher.cluster, 0) as client:
        serving = engine.number(StatusBoard.SERVING, REMOTE)
        for number in range(1, tiers.NODE_RESETS + 1):
            started = await readers(client, OPEN, 300)
            assert of_remote(started)
            engine.relay.reset()
            await engine.until(lambda number=number: engine.number(StatusBoard.LINK_RESUMPTIONS, REMOTE) >= number)
            await require_exact(engine, started)
        assert migrations(client) == {} and engine.number(StatusBoard.SERVING, REMOTE) == serving
        pauses = [event["pause_ms"] for event in engine.remote.events("link resumed")]
        assert len(pauses) >= tiers.NODE_RESETS
        print(f"pauses of up to {max(pauses)} ms")


@pytest.mark.parametrize("direction", ["out", *tiers.only_in_all("back")])
@in_a_loop
async def test_answers_stay_exact_when_a_bit_flips_between_nodes(direction: str) -> None:
    async with two_nodes() as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN)
        assert of_remote(started) > 0
        engine.relay.flips[DIRECTIONS[direction]] = 1
        await require_exact(engine, started)
        await engine.until(lambda: engine.number(StatusBoard.LINK_RESUMPTIONS, REMOTE) == 1, START)
        assert migrations(client) == {}
        await require_both(engine, client)


@in_a_loop
async def test_requests_migrate_without_blame_when_the_other_node_drains() -> None:
    async with two_nodes(migration_limit=1) as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN, 2000)
        lost = of_remote(started)
        status = await asyncio.to_thread(engine.remote.terminate)
        await require_exact(engine, started)
        assert status == 0 and migrations(client) == {"planned": lost}
        assert counted(client, MigrationCounters.GIVEN_UP) == 0
        assert all(reader.stream.submitted.migrations == 0 for reader in started if reader.stream.submitted)


@in_a_loop
async def test_an_aborted_request_of_the_other_node_leaves_nothing_there() -> None:
    async with two_nodes() as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN, 2000)
        assert of_remote(started)
        await engine.until(lambda: engine.number(StatusBoard.OPEN, REMOTE) > 0)
        for reader in started:
            reader.stream.abort()
        await asyncio.gather(*(reader.done for reader in started))
        for group in range(2):
            await engine.must_be_empty(group)


@in_a_loop
async def test_image_is_pulled_once_for_all_workers_of_the_other_node() -> None:
    options = {"tensor_parallel_size": 2, "store_nbytes": 64 << 20}
    async with two_nodes(**options) as engine, Client(engine.launcher.cluster, 0) as client:
        image = ImageInput({"pixels": np.arange(1 << 20, dtype=np.float32)}, 2, 4, key=bytes(range(32)))
        before = engine.relay.nbytes[DIRECTIONS["out"]]
        started = []
        while of_remote(started) < 3:
            params, ids = SamplingParams(max_tokens=5, ignore_eos=True), prompt()
            started.append(Reader(await client.submit(ids, params, values=[image]), ids, 5))
        await require_exact(engine, started)
        nbytes = engine.relay.nbytes[DIRECTIONS["out"]] - before
        assert 4 << 20 < nbytes < 5 << 20


def tls_options(folder: Path) -> dict[str, str]:
    make_certificates(folder, "ours")
    return {"tls_cert": f"{folder}/ours.pem", "tls_key": f"{folder}/ours.key", "tls_ca": f"{folder}/ours-ca.pem"}


@in_a_loop
async def test_a_link_between_nodes_is_encrypted_when_both_have_certificates(tmp_path: Path) -> None:
    both = tls_options(tmp_path)
    async with (
        two_nodes(tls=(both, both), store_nbytes=64 << 20) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        image = ImageInput({"pixels": np.arange(1 << 20, dtype=np.float32)}, 2, 4, key=bytes(range(32)))
        started = []
        while not of_remote(started):
            params, ids = SamplingParams(max_tokens=50, ignore_eos=True), prompt()
            started.append(Reader(await client.submit(ids, params, values=[image]), ids, 50))
        await require_exact(engine, started)
        assert migrations(client) == {}


@pytest.mark.parametrize("is_home", [True, pytest.param(False, marks=tiers.needs_all)], ids=["home", "other"])
@in_a_loop
async def test_node_with_tls_on_one_side_is_refused_with_the_reason_and_ends(tmp_path: Path, is_home: bool) -> None:
    tls = tls_options(tmp_path)
    async with two_nodes(tls=(tls, {}) if is_home else ({}, tls), joins=False) as engine:
        assert await asyncio.to_thread(engine.remote.process.wait, START) == 1
        (failure,) = engine.remote.events("cluster failed")
        assert "one side speaks TLS and the other one does not" in failure["reason"]
        assert engine.number(StatusBoard.SERVING, REMOTE) == 0


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ({"max_model_len": 2048}, "max_model_len"),
        pytest.param({"output_processors": 2}, "output_processors", marks=tiers.needs_all),
    ],
)
@in_a_loop
async def test_a_node_with_other_options_is_refused_in_words_and_ends(differing: dict[str, int], named: str) -> None:
    async with two_nodes(remote=differing, joins=False) as engine:
        assert await asyncio.to_thread(engine.remote.process.wait, START) == 1
        (failure,) = engine.remote.events("cluster failed")
        assert named in failure["reason"]
        assert engine.number(StatusBoard.SERVING, REMOTE) == 0


@tiers.needs_all
@in_a_loop
async def test_a_node_with_another_fine_tune_is_refused_in_words_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    models = [write_fine_tune(tmp_path / str(seed), seed) for seed in range(2)]
    options = {"simulated": None, "model": str(models[0]), "dtype": "float32", "max_model_len": 256, "threads": 1}
    async with two_nodes(remote={"model": str(models[1])}, joins=False, **options) as engine:
        assert await asyncio.to_thread(engine.remote.process.wait, START) == 1
        (failure,) = engine.remote.events("cluster failed")
        assert re.search("model_fingerprint is [0-9a-f]{16} here, [0-9a-f]{16} there", failure["reason"])
        assert "config.json" not in failure["reason"]
        assert engine.number(StatusBoard.SERVING, REMOTE) == 0
