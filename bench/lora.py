"""What LoRA adapters cost: tokens a second of streams over several adapters, over none, and without the option.

Random weights in layers of Qwen3-0.6B's shape, in bfloat16; adapters of all seven linear layers. One engine has no
adapters; another one answers streams without an adapter, and streams over all adapters. All three take turns.

    scripts/bench lora [--streams 64] [--adapters 4] [--rank 16] [--layers 4] [--tokens 64] [--rounds 7]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.serve_cases.model import IDS, REAL_SHAPE, make_tokenizer
from penstock.engine.client.client import Client
from penstock.engine.cluster.adapter_files import SETTINGS, WEIGHTS
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.messages import SamplingParams

PROMPT = 16  # ids
MIN_RATIO = 0.8  # of tokens/s with adapters, over none
MAX_IDLE = 1.01  # of the time of a stream without an adapter, with the option over without it
WITHOUT, NONE, ADAPTERS = "without the option", "none of the adapters", "all adapters"


def write_model(folder: Path, layers: int) -> None:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    make_tokenizer(folder)
    shape = {**REAL_SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    config = transformers.Qwen3Config(vocab_size=IDS, **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = 0.02 * torch.randn(rank, weight.shape[1], generator=chance)
            tensors[f"{layer}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], rank, generator=chance)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))


async def stream(client: Client, number: int, digest: bytes, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    prompt = [3 + number % 900, *range(10, 9 + PROMPT)]
    async with await client.submit(prompt, params, adapter=digest) as answer:
        async for _ in answer:
            pass


async def rate(client: Client, streams: int, digests: Sequence[bytes], tokens: int) -> float:
    """Returns tokens a second of all streams."""
    began = time.perf_counter()
    pairs = ((number, digests[number % len(digests)]) for number in range(streams))
    await asyncio.gather(*(stream(client, number, digest, tokens) for number, digest in pairs))
    return streams * tokens / (time.perf_counter() - began)


async def serving(stack: AsyncExitStack, model: Path, streams: int, lora: LoraConfig) -> tuple[Client, list[bytes]]:
    config = EngineConfig(
        model=str(model), lora=lora, max_num_seqs=streams, max_model_len=512, log_level="warning", keep_kv_cache=False
    )
    launcher = Launcher(config)
    stack.push_async_callback(launcher.stop)
    launcher.start()
    await launcher.serving()
    client = await stack.enter_async_context(Client(launcher.cluster, 0))
    return client, [adapter.digest for adapter in launcher.cluster.config.lora.adapters]


async def measure(run: Run, options: Any) -> dict[str, list[float]]:
    """Returns the tokens a second of each way."""
    model = run.scratch / "model"
    model.mkdir()
    write_model(model, options.layers)
    folders = [run.scratch / f"adapter {number}" for number in range(options.adapters)]
    for number, folder in enumerate(folders):
        write_adapter(folder, model, options.rank, number)
    modules = tuple(f"{folder.name}={folder}" for folder in folders)
    lora = LoraConfig(enable_lora=True, lora_modules=modules, max_lora_rank=options.rank)
    rates: dict[str, list[float]] = {WITHOUT: [], NONE: [], ADAPTERS: []}
    async with AsyncExitStack() as stack:
        plain, _ = await serving(stack, model, options.streams, LoraConfig())
        client, digests = await serving(stack, model, options.streams, lora)
        ways = {WITHOUT: (plain, [b""]), NONE: (client, [b""]), ADAPTERS: (client, digests)}
        for number in range(options.rounds + 1):
            for way, (engine, own) in ways.items():
                figure = await rate(engine, options.streams, own, options.tokens)
                if number:  # the first round finds no blocks in the cache
                    rates[way].append(figure)
    return rates


def targets(run: Run, options: Any) -> Iterator[Target]:
    rates = asyncio.run(measure(run, options))
    for way, figures in rates.items():
        run.output.record("rate", "penstock", way=way, tokens_per_s=figures)
    title = f"{options.streams} streams, {options.adapters} adapters of rank {options.rank}, {options.layers} layers"
    run.output.table(title, ["tokens/s"], [(way, [short(median(figures))]) for way, figures in rates.items()])
    ratios = [own / none for own, none in zip(rates[ADAPTERS], rates[NONE], strict=True)]
    idle = [without / none for without, none in zip(rates[WITHOUT], rates[NONE], strict=True)]
    yield Target("tokens/s over all adapters, over none", MIN_RATIO, "x", median(ratios), is_least=True)
    yield Target("time without adapter rows, with the option over without", MAX_IDLE, "x", median(idle))


def main(arguments: Sequence[str]) -> int:
    parser = command_line("lora", __doc__)
    for name, default in {"streams": 64, "adapters": 4, "rank": 16, "layers": 4, "tokens": 64, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    with Run("lora", options) as run:
        return run.conclude("penstock", targets(run, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
