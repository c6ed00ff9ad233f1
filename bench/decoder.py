"""Decode steps of a CPU worker: layers by one native call, by modules, and on two ranks, in turns.

Random weights in layers of real shapes. Each way computes the same steps of 1 and of 8 rows, with logits. A rank of
two has one thread, and a worker alone has two.

    scripts/bench decoder [--families qwen3,gemma2,gemma3_text] [--dtypes bfloat16,float32] [--layers 8] [--length 64]
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.serve_cases.model import REAL_SHAPE
from penstock.engine.cluster.rendezvous import Rendezvous
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import SamplingParams

BLOCK_SIZE = 16
ROWS = (1, 8)
STEPS_S = 0.4  # of one turn
GEMMA = {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": REAL_SHAPE,
    "gemma2": {**GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "num_hidden_layers": 26},
    "gemma3_text": {**GEMMA, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
}
NATIVE, MODULES, RANKS = "native", "modules", "two ranks"
MIN_RANKS = 1.0  # of tokens/s of two ranks, over one with two threads


def write_model(folder: Path, family: str, layers: int, ids: int) -> None:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {**SHAPES[family], "vocab_size": ids}
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    config = transformers.AutoConfig.for_model(family, **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    stock = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stock.save_pretrained(folder)


def compute_turns(
    pipe: Any, rendezvous: Rendezvous | None, rank: int, size: int, threads: int, path: Path, dtype: str, length: int
) -> None:
    """Computes steps as a rank. Receives (way, rows, steps), and sends the seconds of these steps."""
    import torch

    from penstock.engine.core.step_builder import StepBuilder
    from penstock.engine.worker.cpu_kernels import set_threads
    from penstock.engine.worker.input_batch import build_batch
    from penstock.engine.worker.model import CpuLayer
    from penstock.engine.worker.model_loader import load
    from penstock.engine.worker.paged_attention import PagedAttention
    from penstock.engine.worker.tensor_parallel import TPGroup

    set_threads(threads, 1)
    ranks = TPGroup(rank, size, rendezvous)
    device = torch.device("cpu")
    model = load(path, ranks, device, dtype)
    num_blocks = max(ROWS) * length // BLOCK_SIZE
    memory = model.memory(num_blocks, BLOCK_SIZE)
    decoder = model._decoder
    layers = [module for module in model.stock.modules() if isinstance(vars(module).get("forward"), CpuLayer)]
    natives = [layer.forward for layer in layers]
    pipe.send(decoder is not None)
    while (work := pipe.recv()) is not None:
        way, rows, steps = work
        model._decoder = decoder if way == NATIVE else None
        for layer, native in zip(layers, natives, strict=True):
            layer.forward = native if way == NATIVE else native.stock
        batch = BatchState(rows, num_blocks, BLOCK_SIZE)
        builder = StepBuilder(batch)
        for row in range(rows):
            blocks = range(row * length // BLOCK_SIZE, (row + 1) * length // BLOCK_SIZE)
            prompt = np.zeros(length, np.int32)
            builder.join(row, prompt, SamplingParams(), list(blocks), computed=length - 1, chunk=1)
        batch.apply(builder.build(1, 1))
        input_batch = build_batch(batch)
        ids = torch.arange(rows)
        positions = torch.from_numpy(input_batch.positions)
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(steps):
                hidden = model.hidden(PagedAttention(memory, input_batch, device), ids, positions)
                ranks.broadcast(model.logits(hidden).argmax(-1))
            pipe.send(time.perf_counter() - began)
    ranks.close()


class Worker:
    """The processes of a model, which compute steps together."""

    def __init__(self, stack: ExitStack, size: int, threads: int, path: Path, dtype: str, length: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        rendezvous = stack.enter_context(closing(Rendezvous.open())) if size > 1 else None
        for rank in range(size):
            own, other = context.Pipe()
            place = None if rendezvous is None else rendezvous.of_rank(rank)
            process = context.Process(
                target=compute_turns, args=(other, place, rank, size, threads, path, dtype, length)
            )
            process.start()
            stack.callback(process.join, 20)
            stack.callback(own.send, None)
            self._pipes.append(own)
        self.is_native = [pipe.recv() for pipe in self._pipes] == [True] * size

    def seconds(self, way: str, rows: int, steps: int) -> float:
        for pipe in self._pipes:
            pipe.send((way, rows, steps))
        return max([pipe.recv() for pipe in self._pipes]) / steps


def measure(run: Run, family: str, dtype: str, options: Any) -> dict[tuple[str, int], list[float]]:
    """Returns the tokens a second of each way and number of rows."""
    path = run.scratch / family
    if not path.exists():
        write_model(path, family, options.layers, options.ids)
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        alone, ranks = (Worker(stack, size, 3 - size, path, dtype, options.length) for size in (1, 2))
        if not (alone.is_native and ranks.is_native):
            raise RuntimeError(f"{family}: expected native layers, got modules")
        for number in range(options.rounds + 1):
            for rows in ROWS:
                for way, worker in ((NATIVE, alone), (MODULES, alone), (RANKS, ranks)):
                    own = NATIVE if worker is ranks else way
                    steps = max(2, round(STEPS_S / worker.seconds(own, rows, 2)))
                    rate = rows / worker.seconds(own, rows, steps)
                    if number:
                        rates.setdefault((way, rows), []).append(rate)
    return rates


def targets(run: Run, options: Any) -> Iterator[Target]:
    for family in options.families.split(","):
        for dtype in options.dtypes.split(","):
            rates = measure(run, family, dtype, options)
            for (way, rows), figures in rates.items():
                case = {"family": family, "dtype": dtype, "way": way, "rows": rows}
                run.output.record("rate", "penstock", **case, tokens_per_s=figures)
            table = [(f"{way}, {rows} rows", [short(median(figures))]) for (way, rows), figures in rates.items()]
            run.output.table(f"{family}, {dtype}", ["tokens/s"], table)
            for rows in ROWS:
                for way, other, limit in ((NATIVE, MODULES, 1.0), (RANKS, NATIVE, MIN_RANKS)):
                    ratios = [own / base for own, base in zip(rates[way, rows], rates[other, rows], strict=True)]
                    what = f"{family}, {dtype}, {rows} rows: {way} over {other}"
                    yield Target(what, limit, "x", median(ratios), is_least=True)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("decoder", __doc__)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    for name, default in {"layers": 8, "ids": 32_000, "rounds": 7, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    with Run("decoder", options) as run:
        return run.conclude("penstock", targets(run, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
