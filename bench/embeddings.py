"""What embeddings cost: 64 short texts by an engine for pooling, and by a batch of transformers, in turns.

A random model of Qwen3's architecture, or a model of its own. Vectors are compared, too, and their bytes that travel in
messages of the core are counted.

    scripts/bench embeddings [--model DIR] [--texts 64] [--rounds 7] [--json]
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from penstock.engine.client.client import Client
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Floats, SamplingParams

TOKENS = range(8, 40)  # lengths of texts
MIN_COSINE = 0.9999
MAX_RATIO = 1.0  # of the time of transformers


def write_model(folder: Path) -> None:
    """Writes a random model of 25 million parameters without embeddings."""
    from transformers import Qwen3Config, Qwen3Model

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    Qwen3Model(Qwen3Config(**sizes, **heads, max_position_embeddings=2048)).save_pretrained(folder)


class Batch:
    """Computes the texts as one batch of transformers, padded on the left."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModel

        self._torch = torch
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def vectors(self, texts: Sequence[Sequence[int]]) -> Floats:
        torch, longest = self._torch, max(map(len, texts))
        ids = torch.tensor([[0] * (longest - len(text)) + [*text] for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        with torch.inference_mode():
            states = self._model(ids, attention_mask=mask).last_hidden_state[:, -1]
        vectors: Floats = torch.nn.functional.normalize(states, dim=-1).numpy()
        return vectors


class Answers(NamedTuple):
    vectors: Floats
    inline_nbytes: int  # of vectors in messages


async def embed(client: Client, texts: Sequence[Sequence[int]]) -> Answers:
    inline = 0

    async def one_vector(text: Sequence[int]) -> Floats:
        nonlocal inline
        async with await client.submit(text, SamplingParams(max_tokens=1)) as stream:
            (chunk,) = [chunk async for chunk in stream]
        assert chunk.vector_handle is not None, "a request to an engine for pooling has a vector"
        inline += chunk.vector_handle.nbytes if chunk.vector_handle.is_inline else 0
        vector = client.take_vector(chunk.vector_handle)
        assert vector is not None, "the store has room for all"
        return vector

    vectors = await asyncio.gather(*map(one_vector, texts))
    return Answers(np.stack(vectors), inline)


async def measure(run: Run, model: Path, number: int) -> dict[str, Any]:
    """Returns the seconds of both ways in each round, the least cosine, and the bytes in messages."""
    seed = random.Random(7)
    batch = Batch(model)
    config = EngineConfig(
        model=str(model), runner="pooling", store_nbytes=1 << 24, dtype="float32", enable_prefix_caching=False,
        max_num_seqs=number, log_level="warning",
    )  # fmt: skip
    launcher = Launcher(config)
    engine, batched, cosines, inline = [], [], [], 0
    try:
        launcher.start()
        await launcher.serving()
        async with Client(launcher.cluster, 0) as client:
            for turn in range(run.rounds + 1):
                texts = [[seed.randrange(8000) for _ in range(seed.choice(TOKENS))] for _ in range(number)]
                began = time.perf_counter()
                answers = await embed(client, texts)
                between = time.perf_counter()
                expected = batch.vectors(texts)
                ended = time.perf_counter()
                cosines.append(float((answers.vectors * expected).sum(-1).min()))
                inline += answers.inline_nbytes
                if turn:  # the first turn warms up
                    engine.append(between - began)
                    batched.append(ended - between)
    finally:
        await launcher.stop()
    return {"seconds": engine, "transformers_seconds": batched, "cosine": min(cosines), "inline_nbytes": inline}


def targets(run: Run, model: Path, number: int) -> Iterator[Target]:
    figures = asyncio.run(measure(run, model, number))
    engine, batched = (median(figures[name]) for name in ("seconds", "transformers_seconds"))
    ratio = median(a / b for a, b in zip(figures["seconds"], figures["transformers_seconds"], strict=True))
    run.output.record("embeddings", "penstock", texts=number, **figures, ratio=ratio)
    columns = ["penstock", "transformers", "ratio", "least cosine", "bytes in messages"]
    cells = [engine * 1e3, batched * 1e3, ratio, figures["cosine"], figures["inline_nbytes"]]
    run.output.table(f"{number} texts of 8 to 39 tokens", columns, [("ms", [short(cell) for cell in cells])])
    yield Target("time over a batch of transformers", MAX_RATIO, "x", ratio)
    yield Target("cosine with transformers", MIN_COSINE, "", figures["cosine"], is_least=True)
    yield Target("bytes of vectors in messages of the core", 0, "B", figures["inline_nbytes"])


def main(arguments: Sequence[str]) -> int:
    parser = command_line("embeddings", __doc__)
    parser.add_argument("--model", type=Path, help="directory of a causal model (default: a random one)")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with Run("embeddings", options) as run:
        model = options.model
        if model is None:
            model = run.scratch / "model"
            write_model(model)
        return run.conclude("penstock", targets(run, model, options.texts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
