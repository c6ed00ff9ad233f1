"""LoRA adapters behind a server, by their names; and their answers when a process is killed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from penstock.engine.client.client import Client  # noqa: E402
from penstock.engine.client.stream import EngineError  # noqa: E402
from penstock.engine.cluster.adapter_files import SETTINGS, WEIGHTS  # noqa: E402
from penstock.engine.cluster.adapter_registry import AdapterList  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.lora import Adapter, LoraConfig  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from penstock.environment import ALLOW_RUNTIME_LORA  # noqa: E402
from tests import tiers  # noqa: E402
from tests.crash.test_engine_migration import kill  # noqa: E402
from tests.e2e.test_server import Served, run_server  # noqa: E402
from tests.e2e.test_server_models import save_tokenizer  # noqa: E402
from tests.support.adapters import merged_answers, write_adapter  # noqa: E402
from tests.support.engine import PATIENCE, START, Running, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import ENGINE_SIZES, Asked, Family, build_family  # noqa: E402

TOKENS = 60  # of an answer during which a worker is killed


def build(folder: Path) -> tuple[Family, list[Adapter], LoraConfig]:
    family = build_family("llama", folder / "base")
    adapters = [write_adapter(folder / name, family.path, seed) for seed, name in enumerate(("sql", "poems"), 1)]
    modules = tuple(f"{adapter.name}={adapter.path}" for adapter in adapters)
    return family, adapters, LoraConfig(enable_lora=True, lora_modules=modules)


async def changed(served: Served, route: str, **fields: object) -> tuple[int, str]:
    """Sends a change of adapters. Returns the status, and the text or the error's message."""
    status, text = await served.exchange("POST", f"/v1/{route}_lora_adapter", fields)
    return status, json.loads(text)["error"]["message"] if text.startswith("{") else text


def body_of(request: Asked, tokens: int | None = None) -> dict[str, Any]:
    body = {"prompt": request.prompt, "max_tokens": tokens or request.tokens, "temperature": 0}
    return {**body, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}


@pytest.mark.timeout(300)
@in_a_loop
async def test_adapters_are_loaded_and_unloaded_while_a_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both ranks and both servers, or on none. An adapter outlives a worker, and a request its adapter. The server
    has another adapter from the start."""
    monkeypatch.setenv(ALLOW_RUNTIME_LORA.name, "1")
    family, (sql, poems), _ = build(tmp_path)
    tokenizer = save_tokenizer(family.path)
    options: dict[str, Any] = {"simulated": None, "model": str(family.path), "tensor_parallel_size": 2, "threads": 1}
    request = family.requests[-1]

    def expected(adapter: Adapter | None, tokens: int) -> str:
        (ids,) = merged_answers(family, adapter, [request._replace(tokens=tokens)])
        return tokenizer.decode(ids, skip_special_tokens=False)

    lora = LoraConfig(enable_lora=True, lora_modules=(f"poems={poems.path}",))
    async with run_server(lora=lora, **{**ENGINE_SIZES, **options}) as served:
        create = served.client.completions.create

        async def names() -> set[tuple[str, ...]]:
            """What the servers list: each connection is for one of them."""
            return {tuple(model.id for model in (await served.client.models.list()).data) for _ in range(8)}

        # ── names, whole answers and streams ──
        models = {model.id: model for model in (await served.client.models.list()).data}
        assert [*models] == ["base", "poems"] and models["base"].parent is None
        assert (models["poems"].root, models["poems"].parent) == (poems.path, "base")
        assert (await served.client.models.retrieve("poems")).parent == "base"
        for name, adapter in (("base", None), ("poems", poems)):
            done = await create(model=name, **body_of(request))
            assert done.model == name and done.choices[0].text == expected(adapter, request.tokens)
            assert not done.usage.prompt_tokens_details or not done.usage.prompt_tokens_details.cached_tokens
            events = [event async for event in await create(model=name, **body_of(request), stream=True)]
            assert "".join(event.choices[0].text for event in events) == done.choices[0].text

        # ── what is refused changes nothing ──
        broken = write_adapter(tmp_path / "broken", family.path, 3, bias="all")
        for kind in ("pipe", "sparse", "long"):
            shutil.copytree(sql.path, tmp_path / kind)
        (tmp_path / "pipe" / WEIGHTS).unlink()
        os.mkfifo(tmp_path / "pipe" / WEIGHTS)  # a read would block for ever, with all later changes
        os.truncate(tmp_path / "sparse" / WEIGHTS, 1 << 40)
        os.truncate(tmp_path / "long" / SETTINGS, 1 << 40)
        for fields, status, words in (
            ({"lora_name": "sql"}, 400, "missing required field `lora_path`"),
            ({"lora_name": "sql", "lora_path": "/nowhere"}, 404, "No adapter found for /nowhere"),
            ({"lora_name": "base", "lora_path": sql.path}, 400, "'base' is the name of the model"),
            ({"lora_name": "broken", "lora_path": broken.path}, 400, "bias 'all' is not supported"),
            ({"lora_name": "x", "lora_path": str(tmp_path / "pipe")}, 400, f"{WEIGHTS} is not a file"),
            ({"lora_name": "x", "lora_path": str(tmp_path / "sparse")}, 400, "bytes after its last tensor"),
            ({"lora_name": "x", "lora_path": str(tmp_path / "long")}, 400, f"{1 << 40} bytes, more than {1 << 20}"),
        ):
            answered, message = await changed(served, "load", **fields)
            assert answered == status and words.replace("`", "") in message.replace("`", ""), message
        assert await names() == {("base", "poems")}
        assert await changed(served, "unload", lora_name="sql") == (404, "The lora adapter 'sql' cannot be found.")

        # ── an adapter comes, and outlives a worker ──
        loaded = await changed(served, "load", lora_name="sql", lora_path=sql.path)
        assert loaded == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await names() == {("base", "poems", "sql")}
        done = await create(model="sql", **body_of(request))
        assert done.choices[0].text == expected(sql, request.tokens) != expected(None, request.tokens)
        status, message = await changed(served, "load", lora_name="sql", lora_path=sql.path)
        assert status == 400 and "has already been loaded" in message
        running = asyncio.ensure_future(create(model="sql", **body_of(request, TOKENS)))
        engine = Running(served.launcher)
        await engine.until(lambda: engine.number(StatusBoard.RUNNING) > 0)
        kill(engine, "worker", 1)
        assert (await running).choices[0].text == expected(sql, TOKENS)

        # ── it is replaced, and goes; a request that has it ends first ──
        assert (await changed(served, "load", lora_name="sql", lora_path=poems.path, load_inplace=True))[0] == 200
        assert (await create(model="sql", **body_of(request))).choices[0].text == expected(poems, request.tokens)
        running = asyncio.ensure_future(create(model="sql", **body_of(request, TOKENS)))
        await engine.until(lambda: engine.number(StatusBoard.RUNNING) > 0)
        assert (await changed(served, "unload", lora_name="sql"))[0] == 200
        assert await names() == {("base", "poems")}
        assert (await running).choices[0].text == expected(poems, TOKENS)
        with pytest.raises(openai.NotFoundError, match="there is no model 'sql' here"):
            await create(model="sql", **body_of(request))
        for name, adapter in (("base", None), ("poems", poems)):  # which has the content of the one that has gone
            assert (await create(model=name, **body_of(request))).choices[0].text == expected(adapter, request.tokens)


@tiers.needs_all
@in_a_loop
async def test_adapter_of_a_server_that_is_killed_meanwhile_is_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_RUNTIME_LORA.name, "1")
    family, (sql, poems), _ = build(tmp_path)
    tokenizer = save_tokenizer(family.path)
    options: dict[str, Any] = {"simulated": None, "model": str(family.path), "threads": 1, "api_server_count": 1}
    async with run_server(lora=LoraConfig(enable_lora=True), **{**ENGINE_SIZES, **options}) as served:
        registry, worker, former = served.launcher.cluster.adapters, served.child("worker").pid, served.child("server")
        assert registry is not None
        os.kill(worker, signal.SIGSTOP)
        _, writer = await served.connect("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": sql.path})
        await served.until(lambda: registry.read().unsettled == (sql,))
        os.kill(former.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGCONT)
        writer.close()
        await served.until(lambda: registry.read() == AdapterList(()), START)
        await served.launcher.serving(START)
        assert (await changed(served, "load", lora_name="sql", lora_path=sql.path))[0] == 200
        assert registry.read() == AdapterList((sql,))

        # ── killed when the adapter has a name, and an engine that was started meanwhile lacks the adapter ──
        registry.write(registry.read().with_named(poems))
        os.kill(served.child("server").pid, signal.SIGKILL)
        await served.until(lambda: registry.read() == AdapterList((sql, poems)), START)
        await served.launcher.serving(START)
        request = family.requests[-1]
        (ids,) = merged_answers(family, poems, [request])
        done = await served.client.completions.create(model="poems", **body_of(request))
        assert done.choices[0].text == tokenizer.decode(ids, skip_special_tokens=False)


async def answer(client: Client, request: Asked, digest: bytes) -> list[int]:
    ids: list[int] = []
    params = SamplingParams(max_tokens=request.tokens, temperature=0.0, ignore_eos=True)
    async with await client.submit(request.prompt, params, adapter=digest, timeout=START + PATIENCE) as stream:
        async for chunk in stream:
            ids += chunk.ids
    return ids


async def answers(client: Client, requests: Sequence[Asked], digests: Sequence[bytes]) -> list[list[int]]:
    pairs = zip(requests, digests, strict=True)
    return list(await asyncio.gather(*(answer(client, request, digest) for request, digest in pairs)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [2, *tiers.only_in_all(1)])
@in_a_loop
async def test_answers_keep_their_adapters_when_a_worker_is_killed(ranks: int, tmp_path: Path) -> None:
    family, adapters, lora = build(tmp_path)
    requests = [request._replace(tokens=TOKENS) for request in family.requests[:6]]
    digests = [b"", adapters[0].digest, adapters[1].digest] * 2
    choices = [None, *adapters] * 2
    expected = [merged_answers(family, each, [request])[0] for each, request in zip(choices, requests, strict=True)]
    config = EngineConfig(
        model=str(family.path), lora=lora, tensor_parallel_size=ranks, threads=1, **{**ENGINE_SIZES, "max_num_seqs": 4}
    )
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        assert await answers(client, requests, digests) == expected
        running = asyncio.ensure_future(answers(client, requests, digests))
        await engine.until(lambda: engine.number(StatusBoard.ADAPTERS) == 2)
        assert engine.number(StatusBoard.ADAPTED) >= 2 and not running.done()
        kill(engine, "worker", ranks - 1)
        assert await running == expected
        await engine.until(lambda: engine.number(StatusBoard.ADAPTERS) == engine.number(StatusBoard.ADAPTED) == 0)


@in_a_loop
async def test_engine_returns_without_adapters_that_were_replaced_or_unloaded(tmp_path: Path) -> None:
    """Requests for these end by name; one that was running when its adapter was unloaded would have gone on."""
    family, (sql, poems), lora = build(tmp_path)
    request = family.requests[0]
    expected = [merged_answers(family, each, [request])[0] for each in (None, poems)]
    config = EngineConfig(model=str(family.path), lora=lora, threads=1, **ENGINE_SIZES)
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        registry = engine.launcher.cluster.adapters
        assert registry is not None
        running = asyncio.ensure_future(answer(client, request._replace(tokens=200), poems.digest))
        await engine.until(lambda: engine.number(StatusBoard.RUNNING) > 0)
        registry.write(registry.read().without(poems))
        await client.adapters.settle(poems, time.monotonic() + PATIENCE, is_loaded=False)
        with pytest.raises(EngineError, match="the LoRA adapter 'poems' was unloaded"):
            await answer(client, request, poems.digest)
        assert not running.done()

        path = Path(sql.path) / SETTINGS
        path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 1}))
        kill(engine, "worker")
        with pytest.raises(EngineError, match="the LoRA adapter 'poems' was unloaded"):
            await running
        assert await answer(client, request, b"") == expected[0]
        with pytest.raises(EngineError, match="'sql' is not the one that was loaded") as refusal:
            await answer(client, request, sql.digest)
        assert refusal.value.status == 404
        await client.adapters.load(poems, START)
        assert await answer(client, request, poems.digest) == expected[1]


@in_a_loop
async def test_group_that_starts_loads_adapters_that_its_ranks_lack(tmp_path: Path) -> None:
    """Workers read the registry before the adapter was there, and the core later: it is stopped meanwhile."""
    family, (_, poems), lora = build(tmp_path)
    request = family.requests[0]
    (expected,) = merged_answers(family, poems, [request])
    lora = LoraConfig(enable_lora=True, lora_modules=lora.lora_modules[:1])
    config = EngineConfig(model=str(family.path), lora=lora, threads=1, **ENGINE_SIZES)
    async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
        cluster, killed = engine.launcher.cluster, engine.child("core").pid
        inbox, lane = cluster.groups[0].inbox, cluster.worker_lane(0)
        assert cluster.adapters is not None

        def cores() -> list[int]:
            return [child.pid for child in engine.children() if child.member.kind == "core" and child.pid != killed]

        def is_ready() -> bool:
            """The worker has sent `Ready`."""
            return lane in [unread["sender"] for unread in inbox.snapshot()["receivers"][0]["behind"]]

        kill(engine, "worker")
        await engine.until(cores, START)
        (core,) = cores()
        os.kill(core, signal.SIGSTOP)
        await engine.until(is_ready, START)
        cluster.adapters.write(cluster.adapters.read().with_named(poems))
        os.kill(core, signal.SIGCONT)
        assert await answer(client, request, poems.digest) == expected


def test_lines_of_generate_name_their_adapters(tmp_path: Path) -> None:
    family, adapters, _ = build(tmp_path)
    request = family.requests[0]
    lines = [
        {"ids": [*request.prompt], "max_tokens": request.tokens, "model": each} for each in ("base", "poems", "sql")
    ]
    modules = [f"{adapter.name}={adapter.path}" for adapter in adapters]
    command = [sys.executable, "-m", "penstock", "generate", str(family.path), "--dtype", "float32"]
    sizes = ["--max-model-len", "256", "--enable-lora", "--lora-modules", *modules]

    def run(lines: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
        text = "\n".join(json.dumps({"ignore_eos": True, **line}) for line in lines)
        return subprocess.run([*command, *sizes], input=text, capture_output=True, text=True, timeout=200)

    done = run(lines)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["ids"] for line in done.stdout.splitlines()]
    assert answers == [merged_answers(family, each, [request])[0] for each in (None, adapters[1], adapters[0])]
    done = run([{"ids": [1], "model": "prose"}])
    assert done.returncode == 2 and "('sql', 'poems'), got 'prose'" in done.stderr
