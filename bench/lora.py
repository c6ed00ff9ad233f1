"""What LoRA adapters cost: tokens a second of streams over several adapters, over none, and without the option; and the
processor time of a step, which other processes of the machine change little.

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
from typing import Any, NamedTuple

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.serve_cases.model import IDS, REAL_SHAPE, make_tokenizer
from penstock.engine.client.client import Client
from penstock.engine.cluster.adapter_files import SETTINGS, WEIGHTS
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.messages import SamplingParams

PROMPT = 16  # ids
MIN_RATIO = 0.8  # of tokens/s with adapters, over none
MAX_IDLE = 1.01  # of the processor time of a step without adapters in the batch, with the option over without it
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


class Engine(NamedTuple):
    launcher: Launcher
    client: Client

    @property
    def digests(self) -> list[bytes]:
        return [adapter.digest for adapter in self.launcher.cluster.config.lora.adapters]

    @property
    def steps(self) -> int:
        return self.launcher.board.row(0)[StatusBoard.STEPS]

    def processor_us(self) -> float:
        """Returns the processor time that the threads of core and worker have used."""
        pids = [child.pid for unit in self.launcher.units for child in unit.children.values()]
        tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


async def serving(stack: AsyncExitStack, model: Path, streams: int, lora: LoraConfig) -> Engine:
    config = EngineConfig(
        model=str(model), lora=lora, max_num_seqs=streams, max_model_len=512, log_level="warning", keep_kv_cache=False
    )
    launcher = Launcher(config)
    stack.push_async_callback(launcher.stop)
    launcher.start()
    await launcher.serving()
    return Engine(launcher, await stack.enter_async_context(Client(launcher.cluster, 0)))


class Figures(NamedTuple):
    rates: list[float]  # tokens a second
    step_us: list[float]  # processor time of a step


async def measure(run: Run, options: Any) -> dict[str, Figures]:
    """Returns the figures of each way."""
    model = run.scratch / "model"
    model.mkdir()
    write_model(model, options.layers)
    folders = [run.scratch / f"adapter {number}" for number in range(options.adapters)]
    for number, folder in enumerate(folders):
        write_adapter(folder, model, options.rank, number)
    modules = tuple(f"{folder.name}={folder}" for folder in folders)
    lora = LoraConfig(enable_lora=True, lora_modules=modules, max_lora_rank=options.rank)
    figures = {way: Figures([], []) for way in (WITHOUT, NONE, ADAPTERS)}
    async with AsyncExitStack() as stack:
        plain = await serving(stack, model, options.streams, LoraConfig())
        adapted = await serving(stack, model, options.streams, lora)
        ways = {WITHOUT: (plain, [b""]), NONE: (adapted, [b""]), ADAPTERS: (adapted, adapted.digests)}
        for number in range(options.rounds + 1):
            for way in ways if number % 2 else [*ways][::-1]:
                engine, own = ways[way]
                steps, processor_us = engine.steps, engine.processor_us()
                figure = await rate(engine.client, options.streams, own, options.tokens)
                if number:  # the first round finds no blocks in the cache
                    figures[way].rates.append(figure)
                    figures[way].step_us.append((engine.processor_us() - processor_us) / (engine.steps - steps))
    return figures


def targets(run: Run, options: Any) -> Iterator[Target]:
    figures = asyncio.run(measure(run, options))
    for way, (rates, step_us) in figures.items():
        run.output.record("rate", "penstock", way=way, tokens_per_s=rates, step_us=step_us)
    title = f"{options.streams} streams, {options.adapters} adapters of rank {options.rank}, {options.layers} layers"
    rows = [(way, [short(median(rates)), short(median(step_us))]) for way, (rates, step_us) in figures.items()]
    run.output.table(title, ["tokens/s", "processor us a step"], rows)
    ratios = [own / none for own, none in zip(figures[ADAPTERS].rates, figures[NONE].rates, strict=True)]
    idle = [none / without for none, without in zip(figures[NONE].step_us, figures[WITHOUT].step_us, strict=True)]
    yield Target("tokens/s over all adapters, over none", MIN_RATIO, "x", median(ratios), is_least=True)
    yield Target("processor time of a step, with the option over without", MAX_IDLE, "x", median(idle))


def main(arguments: Sequence[str]) -> int:
    parser = command_line("lora", __doc__)
    for name, default in {"streams": 64, "adapters": 4, "rank": 16, "layers": 4, "tokens": 64, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    with Run("lora", options) as run:
        return run.conclude("penstock", targets(run, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
