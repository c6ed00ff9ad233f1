"""The whole engine on a tiny real model: what `transformers` itself generates, token for token."""

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from penstock.engine.client import Client  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.launch import Launcher  # noqa: E402
from penstock.engine.protocol import SamplingParams  # noqa: E402
from tests.engine import START  # noqa: E402
from tests.unit.models import made  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_answers_are_those_of_transformers(ranks: int, tmp_path: Path) -> None:
    family = made("llama", tmp_path)
    sizes = {"blocks": 200, "max_model_len": 256, "slots": 16, "token_budget": 16}
    config = EngineConfig(model=str(tmp_path), tensor_parallel=ranks, dtype="float32", **sizes)

    async def answer(client: Client, prompt: object, tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async with await client.submit(prompt, params, timeout=START) as stream:
            return [one async for piece in stream for one in piece.ids]

    async def scene() -> None:
        launcher = Launcher(config)
        try:
            launcher.start()
            await launcher.serving(START)
            async with Client(launcher.tree, 0) as client:
                pairs = list(zip(family.asked, family.answers, strict=True))
                got = await asyncio.gather(*(answer(client, asked.prompt, len(want)) for asked, want in pairs))
            assert got == [list(want) for _, want in pairs]
        finally:
            assert await launcher.stop() == []

    asyncio.run(scene())
