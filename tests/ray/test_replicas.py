"""Two replicas behind Ray Serve on two nodes: what clients get, whatever ends."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.ray.conftest import needs_cluster

pytest.importorskip("aiohttp", reason="aiohttp comes with the extra ray: pip install '.[engine,ray]'")
Image = pytest.importorskip("PIL.Image")

from bench.nodes import ray_client  # noqa: E402
from bench.nodes.ray_cluster import RayCluster, command_line  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import SimulatedDevice  # noqa: E402
from penstock.engine.worker.simulated_device import TokenRule  # noqa: E402
from penstock.server.status.snapshot import ProcessView  # noqa: E402
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader  # noqa: E402
from tests.support.command import serving as serving_alone  # noqa: E402
from tests.unit.server.images.test_image_prompts import part  # noqa: E402
from training.scenes import scene  # noqa: E402
from training.talk import CAPTION  # noqa: E402

pytestmark = [*needs_cluster, pytest.mark.timeout(300)]

WITHIN = 90.0  # seconds; until a replica that died has a successor that serves, on a busy machine
SOON = 20.0  # seconds; for anything else
RESTART, SLACK = 10.0, 3.0  # seconds; of a replica that is held, and of an answer on a busy machine
RULE = TokenRule(SimulatedDevice())
OPTIONS: dict[str, Any] = {"device_model": "simulated", "step_ms": 5, "tensor_parallel_size": 2}
REPLICAS = 2
STREAMS = 32  # of as many sessions: some are on either replica


def expected(prompt: str, tokens: int) -> str:
    ids = np.array(list(prompt.encode()), np.int32)
    return "".join(f" {token}" for token in RULE.answer(ids, tokens))


async def until(condition: Callable[[], Any], within: float = SOON) -> Any:
    deadline = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{condition} was still {answer!r} after {within:g} s"
        await asyncio.sleep(0.02)
    return answer


def serving(launcher: int) -> bool:
    try:
        board = SnapshotReader(launcher).board()
    except NoServer:
        return False
    try:
        return all(row[StatusBoard.SERVING] for row in board.rows)
    finally:
        board.close()


def workers(launcher: int) -> list[ProcessView]:
    return [process for process in SnapshotReader(launcher).take().processes if process.role == "worker"]


def open_requests(cluster: RayCluster) -> int:
    requests = 0
    for _, launcher in cluster.engines().values():
        board = SnapshotReader(launcher).board()
        requests += sum(row[StatusBoard.OPEN] for row in board.rows)
        board.close()
    return requests


class Scene:
    """Two replicas that serve, and a client."""

    def __init__(self, cluster: RayCluster, client: Any) -> None:
        self.cluster, self.client, self.url = cluster, client, cluster.url

    async def complete(self, prompt: str, tokens: int, **options: Any) -> ray_client.Answer:
        return await ray_client.complete(self.client, self.url, prompt, tokens, **options)

    async def server(self, **headers: str) -> int:
        """The pid of the server process that answers."""
        async with self.client.get(f"{self.url}/health/live", headers=headers) as response:
            assert response.status == 200, await response.text()
            pid: int = (await response.json())["pid"]
            return pid

    async def until_both_serve(self) -> None:
        """As many engines as there are to be, and requests that reach each of them."""
        await until(lambda: self.cluster.call("status", name="default") == {"RUNNING": REPLICAS}, WITHIN)
        await until(lambda: len(engines := self.cluster.engines()) == REPLICAS
                    and all(serving(launcher) for _, launcher in engines.values()), WITHIN)  # fmt: skip
        deadline, pids = time.monotonic() + WITHIN, set[int]()
        while len(pids) < REPLICAS:
            assert time.monotonic() < deadline, f"only {pids} answer"
            async with self.client.get(f"{self.url}/health/live") as response:
                if response.status == 200:
                    pids.add((await response.json())["pid"])

    async def streams(self, count: int, tokens: int) -> list[asyncio.Task[ray_client.Answer]]:
        """Streams that have begun, of requests with sessions, so that both replicas have some."""
        tasks = [
            asyncio.ensure_future(self.complete(f"stream {number}", tokens, **{"x-session-id": f"s{number}"}))
            for number in range(count)
        ]
        await until(lambda: open_requests(self.cluster) == count)
        return tasks

    async def next_is_served(self) -> float:
        """Seconds until a request that is sent now is answered; it may be refused before, and is sent again."""
        began = time.monotonic()
        while not (answer := await self.complete("next", 1)).is_whole:
            assert answer.status in (0, 500, 502, 503) and time.monotonic() < began + SOON, answer
        return time.monotonic() - began


def play(cluster: RayCluster, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with ray_client.session() as client:
            playing = Scene(cluster, client)
            await playing.until_both_serve()
            await act(playing)
            await until(lambda: open_requests(cluster) == 0)

    asyncio.run(run())


@pytest.fixture(scope="module", autouse=True)
def deployed(cluster: RayCluster) -> None:
    cluster.run(**OPTIONS, serve_options={"num_replicas": REPLICAS})


def test_answers_are_those_of_the_engine(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        questions = [(f"question {number}", 1 + number * 7 % 60, number % 2 == 0) for number in range(24)]
        answers = await asyncio.gather(
            *(playing.complete(prompt, tokens, stream=stream) for prompt, tokens, stream in questions)
        )
        for (prompt, tokens, _), answer in zip(questions, answers, strict=True):
            assert answer.is_whole and answer.text == expected(prompt, tokens), answer
        names = Counter(name.lower() for name in answers[0].headers)
        assert {name: names[name] for name in ("date", "server", "x-request-id")} == {
            "date": 1, "server": 1, "x-request-id": 1,
        }  # fmt: skip

    play(cluster, act)


def test_errors_of_the_engine_reach_the_client_as_they_are(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        async with playing.client.post(
            f"{playing.url}/v1/completions", json={"prompt": "x", "model": "no"}
        ) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
        async with playing.client.get(f"{playing.url}/v1/model") as response:
            assert response.status == 404 and "the nearest is /v1/models" in await response.text()
        async with playing.client.post(f"{playing.url}/v1/completions", data=b"{") as response:
            assert response.status == 400
        async with playing.client.post(f"{playing.url}/v1/completions", data=io.BytesIO(bytes(66 << 20))) as response:
            assert response.status == 413

    play(cluster, act)


def test_a_model_that_sees_says_of_pictures_what_it_says_without_serve(cluster: RayCluster) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    chats = [[{"role": "user", "content": [drawn(rng), {"type": "text", "text": CAPTION[0]}]}] for _ in range(6)]
    cluster.run("shapes", "/shapes", serve_options={"num_replicas": 1})

    async def ask_all(url: str) -> list[str]:
        async def ask(messages: Any) -> str:
            async with client.post(
                f"{url}/v1/chat/completions", json={"messages": messages, "temperature": 0}
            ) as response:
                assert response.status == 200, await response.text()
                text: str = (await response.json())["choices"][0]["message"]["content"]
                return text

        async with ray_client.session() as client:
            return await asyncio.gather(*map(ask, chats))

    through_serve = asyncio.run(ask_all(f"{cluster.url}/shapes"))
    cluster.call("delete", name="shapes")
    with serving_alone() as (_, port):
        assert asyncio.run(ask_all(f"http://127.0.0.1:{port}")) == through_serve
    assert len(set(through_serve)) > 1 and all(through_serve)


def drawn(rng: np.random.Generator) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(scene(rng).draw(200, rng)).save(file, "PNG")
    return part(file.getvalue())


def test_a_session_keeps_its_replica_and_others_are_shared_out(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        of_sessions = {
            session: {await playing.server(**{"x-session-id": f"session {session}"}) for _ in range(3)}
            for session in range(16)
        }
        assert all(len(pids) == 1 for pids in of_sessions.values()), of_sessions
        assert len(set.union(*of_sessions.values())) == REPLICAS
        without = Counter([await playing.server() for _ in range(32)])
        assert len(without) == REPLICAS and min(without.values()) >= 4, without

    play(cluster, act)


def test_a_request_is_aborted_when_its_client_leaves(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        streams = await playing.streams(4, 3000)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: open_requests(cluster) == 0)

    play(cluster, act)


def test_streams_go_on_when_a_worker_is_killed(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        streams = await playing.streams(STREAMS, 600)
        launcher = next(iter(cluster.engines().values()))[1]
        workers = [process for process in SnapshotReader(launcher).take().processes if process.role == "worker"]
        os.kill(workers[0].pid, signal.SIGKILL)
        for number, answer in enumerate(await asyncio.gather(*streams)):
            assert answer.is_whole and answer.text == expected(f"stream {number}", 600), answer.error
        assert launcher in {launcher for _, launcher in cluster.engines().values()}, "the replica was replaced"

    play(cluster, act)


def test_streams_of_a_replica_end_with_its_engine_and_the_others_go_on(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        streams = await playing.streams(STREAMS, 600)
        replica, (keeper, launcher) = next(iter(cluster.engines().items()))
        processes = [process.pid for process in SnapshotReader(launcher).take().processes]
        os.kill(launcher, signal.SIGKILL)
        await playing.next_is_served()
        answers = await asyncio.gather(*streams)
        whole = sum(answer.is_whole for answer in answers)
        assert 0 < whole < STREAMS, answers
        for number, answer in enumerate(answers):
            text = expected(f"stream {number}", 600)
            assert text.startswith(answer.text) and (answer.text == text) == answer.is_whole
            assert answer.is_whole or "engine of this replica" in answer.error, answer.error
            assert "it its" not in answer.error
        await until(lambda: not any(map(command_line, (replica, keeper, *processes))))
        await playing.until_both_serve()

    play(cluster, act)


@pytest.mark.parametrize("victim", ["replica", "keeper"])
def test_nothing_is_left_of_a_replica_and_the_next_request_is_served(
    cluster: RayCluster, victim: str, front: str
) -> None:
    async def act(playing: Scene) -> None:
        streams = await playing.streams(STREAMS, 600)
        replica, (keeper, launcher) = next(iter(cluster.engines().items()))
        processes = [process.pid for process in SnapshotReader(launcher).take().processes]
        os.kill(replica if victim == "replica" else keeper, signal.SIGKILL)
        await playing.next_is_served()
        answers = await asyncio.gather(*streams)
        assert 0 < sum(answer.is_whole for answer in answers) < STREAMS, answers
        for number, answer in enumerate(answers):
            text = expected(f"stream {number}", 600)
            assert text.startswith(answer.text) and (answer.text == text) == answer.is_whole
            if not answer.is_whole:  # HAProxy cuts the streams of a replica that was killed
                is_cut = (front, victim) == ("haproxy", "replica")
                assert is_cut or "of this re" in answer.error, answer.error
        await until(lambda: not any(map(command_line, (replica, keeper, launcher, *processes))), WITHIN)
        await playing.until_both_serve()

    play(cluster, act)


@pytest.mark.parametrize("victim", ["launcher", "keeper", "replica"])
def test_clients_get_answers_or_503_when_a_replica_ends(cluster: RayCluster, victim: str, front: str) -> None:
    """Whole answers, of clients that send the next request at once: nothing of a lost answer has been sent."""

    async def act(playing: Scene) -> None:
        refused, is_over = list[ray_client.Answer](), asyncio.Event()
        answered = 0

        async def ask(number: int) -> None:
            nonlocal answered
            while not is_over.is_set():
                prompt = f"client {number} {answered}"
                answer = await playing.complete(prompt, 40, stream=False)
                assert not answer.is_whole or answer.text == expected(prompt, 40)
                answered += answer.is_whole
                if not answer.is_whole:
                    refused.append(answer)

        clients = [asyncio.ensure_future(ask(number)) for number in range(6)]
        await until(lambda: answered > 12)
        replica, (keeper, launcher) = next(iter(cluster.engines().items()))
        os.kill({"launcher": launcher, "keeper": keeper, "replica": replica}[victim], signal.SIGKILL)
        await until(lambda: command_line(replica) == "")
        after = answered
        await until(lambda: answered > after + 60)
        is_over.set()
        await asyncio.gather(*clients)
        print(f"{front}, {victim}: {len(refused)} errors", [(each.status, each.error) for each in refused])
        for answer in refused:
            assert answer.status == 503 and answer.error and answer.headers["Retry-After"] == "1", answer
        assert len(refused) <= (0 if front == "proxy" or victim == "replica" else 12)
        await playing.until_both_serve()

    play(cluster, act)


def test_no_new_request_waits_long_for_a_replica_that_restarts(cluster: RayCluster) -> None:
    """The next worker of its engine is stopped for a while. Requests have no session: any replica may serve them."""

    async def act(playing: Scene) -> None:
        launcher = next(iter(cluster.engines().values()))[1]
        (first, *_) = workers(launcher)
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: workers(launcher)[0].pid not in (0, first.pid))
        successor = workers(launcher)[0]
        os.kill(successor.pid, signal.SIGSTOP)
        try:
            answers, end = list[ray_client.Answer](), time.monotonic() + RESTART
            while time.monotonic() < end:
                answers += await asyncio.gather(*(playing.complete("new", 1, stream=False) for _ in range(4)))
        finally:
            os.kill(successor.pid, signal.SIGCONT)
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) <= {200, 503} and statuses[200] > 8, statuses
        assert max(answer.seconds for answer in answers) < 1.0 + SLACK
        for answer in answers:
            assert answer.is_whole or (answer.headers["Retry-After"] == "1" and "--queue-timeout" in answer.error), (
                answer
            )
        await until(lambda: serving(launcher), WITHIN)

    play(cluster, act)


@pytest.mark.timeout(600)
def test_no_request_is_lost_in_an_update(cluster: RayCluster) -> None:
    async def act(playing: Scene) -> None:
        before, answers = set(cluster.engines()), list[ray_client.Answer]()
        is_over = asyncio.Event()

        async def ask(number: int) -> None:
            while not is_over.is_set():
                prompt = f"update {number} {len(answers)}"
                answer = await playing.complete(prompt, 40, stream=number % 2 == 0)
                assert answer.is_whole and answer.text == expected(prompt, 40), (answer.status, answer.error)
                answers.append(answer)

        clients = [asyncio.ensure_future(ask(number)) for number in range(6)]
        options = {**OPTIONS, "max_num_seqs": 128}
        cluster.begin("run", name="default", route_prefix="/", args={**options, "serve_options": {"num_replicas": 2}})
        await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, cluster.result), 3 * WITHIN)
        await until(lambda: not before & set(cluster.engines()), 3 * WITHIN)
        is_over.set()
        await asyncio.gather(*clients)
        assert len(answers) > 100

    play(cluster, act)
    cluster.run(**OPTIONS, serve_options={"num_replicas": REPLICAS})


def test_replicas_follow_the_load_of_the_engines(cluster: RayCluster) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        "policy": {"policy_function": "penstock.integrations.ray_serve.load_policy:LoadPolicy",
                   "policy_kwargs": {"target_load": 0.8}},
    }  # fmt: skip
    cluster.run(
        "scaled", "/scaled", device_model="simulated", max_num_seqs=4, serve_options={"autoscaling_config": scaling}
    )

    async def scene() -> None:
        async with ray_client.session() as client:
            is_over = asyncio.Event()

            async def ask(number: int) -> None:
                while not is_over.is_set():
                    answer = await ray_client.complete(client, f"{cluster.url}/scaled", f"scaled {number}", 200)
                    assert answer.is_whole and answer.text == expected(f"scaled {number}", 200), answer

            clients = [asyncio.ensure_future(ask(number)) for number in range(8)]
            await until(lambda: cluster.call("status", name="scaled") == {"RUNNING": 2}, WITHIN)
            is_over.set()
            await asyncio.gather(*clients)
            await until(lambda: cluster.call("status", name="scaled") == {"RUNNING": 1}, 2 * WITHIN)

    asyncio.run(scene())
    cluster.call("delete", name="scaled")
