"""LoRA adapters behind a server, by their names; and their answers when a process is killed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("httptools")

from penstock.engine.client.client import Client  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.lora import Adapter, LoraConfig  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from tests.crash.test_engine_migration import kill  # noqa: E402
from tests.e2e.test_server import run_server  # noqa: E402
from tests.e2e.test_server_models import save_tokenizer  # noqa: E402
from tests.support.adapters import merged_answers, write_adapter  # noqa: E402
from tests.support.engine import PATIENCE, START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import ENGINE_SIZES, Asked, Family, build_family  # noqa: E402

TOKENS = 60  # of an answer during which a worker is killed


def build(folder: Path) -> tuple[Family, list[Adapter], LoraConfig]:
    family = build_family("llama", folder / "base")
    adapters = [write_adapter(folder / name, family.path, seed) for seed, name in enumerate(("sql", "poems"), 1)]
    modules = tuple(f"{adapter.name}={adapter.path}" for adapter in adapters)
    return family, adapters, LoraConfig(enable_lora=True, lora_modules=modules)


@in_a_loop
async def test_server_answers_with_the_adapter_that_a_request_names(tmp_path: Path) -> None:
    family, adapters, lora = build(tmp_path)
    tokenizer = save_tokenizer(family.path)
    options: dict[str, Any] = {"simulated": None, "model": str(family.path), "api_server_count": 1, **ENGINE_SIZES}
    async with run_server(lora=lora, **options) as served:
        client = served.client
        models = {model.id: model for model in (await client.models.list()).data}
        assert [*models] == ["base", "sql", "poems"]
        assert (models["sql"].root, models["sql"].parent) == (adapters[0].path, "base")
        assert (await client.models.retrieve("poems")).parent == "base" and models["base"].parent is None
        request = family.requests[-1]
        body = {"prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0}
        body["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
        for name, adapter in (("base", None), ("sql", adapters[0]), ("poems", adapters[1])):
            (expected,) = merged_answers(family, adapter, [request])
            done = await client.completions.create(model=name, **body)
            assert done.model == name and done.choices[0].text == tokenizer.decode(expected, skip_special_tokens=False)
            assert not done.usage.prompt_tokens_details or not done.usage.prompt_tokens_details.cached_tokens
            events = [event async for event in await client.completions.create(model=name, **body, stream=True)]
            assert "".join(event.choices[0].text for event in events) == done.choices[0].text
        with pytest.raises(openai.NotFoundError, match="'base' and 'sql' and 'poems'"):
            await client.completions.create(model="prose", **body)


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
@pytest.mark.parametrize("ranks", [1, 2])
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
