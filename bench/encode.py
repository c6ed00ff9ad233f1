"""Requests with images, each encoded by every rank for itself, or once: requests per second, by images per request.

A Qwen2-VL of random weights on the CPU, in which an image costs the vision encoder about twice what its tokens cost the
text model, as in Qwen2-VL-2B. No image is sent twice. All modes are up at the same time, and take turns in each round.

    scripts/bench encode                         TP 2: three minutes
    scripts/bench encode --quick                 small, one round: does it run?
    scripts/bench encode --tensor-parallel-size 2 --data-parallel-size 2 --at-once 4 --images 1,4
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.output import Output, short
from bench.harness.quiet import load_between, look
from bench.harness.run import Run, numbers, side_by_side
from bench.harness.targets import Target
from bench.harness.turns import Outcome, in_turn
from penstock.engine.client.client import Client, ImageInput
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import ENCODER_MODES, EngineConfig
from penstock.engine.protocol.messages import SamplingParams

OURS, BASELINE = "store", "weights"
AT_LEAST = {1: 1.0, 2: 1.2, 4: 1.3}  # times the baseline's requests per second, by images per request
SIDE = 24  # patches of an image, in each direction: 144 tokens
PATCH = 14
VOCABULARY, IMAGE, START, END = 1000, 990, 991, 992
TIMEOUT = 300.0


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids = {"image": IMAGE, "video": 993, "vision_start": START, "vision_end": END}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 6,
            "embed_dim": 384,
            "hidden_size": 512,
            "num_heads": 6,
            "mlp_ratio": 4,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        tie_word_embeddings=False,
        **{f"{name}_token_id": number for name, number in ids.items()},
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)


class Engine:
    """A tree in one mode, and requests to it."""

    def __init__(self, mode: str, model: Path, options: argparse.Namespace) -> None:
        config = EngineConfig(
            model=str(model),
            tensor_parallel_size=options.tensor_parallel_size,
            data_parallel_size=options.data_parallel_size,
            store_nbytes=256 << 20,
            mm_encoder_tp_mode=mode,
            num_gpu_blocks_override=1024,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            threads=options.threads,
        )
        self.launcher = Launcher(with_model_defaults(config))
        self.launcher.start()

    def encodings(self) -> int:
        rows = range(self.launcher.cluster.config.data_parallel_size)
        return sum(self.launcher.board.row(number)[StatusBoard.ENCODINGS] for number in rows)

    async def serve(self, images: int, requests: int, at_once: int) -> dict[str, float]:
        """Answers so many requests, so many at a time."""
        before, turns = self.encodings(), asyncio.Semaphore(at_once)
        async with Client(self.launcher.cluster, 0) as client:
            prompts = [_request(images) for _ in range(requests)]
            began = time.monotonic()
            seconds = await asyncio.gather(*(_answer(client, turns, *prompt) for prompt in prompts))
            took = time.monotonic() - began
        return {
            "requests_s": requests / took,
            "ttft_ms": float(np.median(seconds)) * 1e3,
            "encodings": (self.encodings() - before) / (images * requests),
        }


def _request(images: int) -> tuple[list[int], list[ImageInput]]:
    chance = np.random.default_rng()
    prompt: list[int] = chance.integers(3, 900, 16).tolist()
    values = []
    for _ in range(images):
        pixels = chance.standard_normal((SIDE * SIDE, 3 * 2 * PATCH * PATCH), dtype=np.float32)
        tree = {"pixel_values": pixels, "image_grid_thw": np.array([[1, SIDE, SIDE]])}
        place = SIDE * SIDE // 4
        values.append(ImageInput(tree, len(prompt) + 1, place, os.urandom(32)))
        prompt += [START, *[IMAGE] * place, END]
    return prompt, values


async def _answer(client: Client, turns: asyncio.Semaphore, prompt: list[int], values: list[ImageInput]) -> float:
    """Returns the seconds to the first token."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    async with turns:
        began, first = time.monotonic(), 0.0
        async with await client.submit(prompt, params, values=values, timeout=TIMEOUT) as stream:
            async for _ in stream:
                first = first or time.monotonic() - began
        return first


async def measure(run: Run) -> dict[int, Outcome]:
    modes, at_once = run.named("impl"), run.options.at_once
    engines: dict[str, Engine] = {}
    outcomes: dict[int, Outcome] = {}
    make_model(run.scratch)
    try:
        for mode in modes:
            engines[mode] = Engine(mode, run.scratch, run.options)
        for engine in engines.values():
            await engine.launcher.serving(TIMEOUT)
        for images in run.options.images:
            outcome = outcomes[images] = Outcome({mode: [] for mode in modes})
            for mode in modes:
                await engines[mode].serve(images, 2, at_once)  # warms up
            for turn in range(run.rounds):
                before = look()
                for mode in in_turn(modes, turn):
                    outcome.rounds[mode].append(await engines[mode].serve(images, run.options.requests, at_once))
                outcome.loads.append(load_between(before, look()))
            show(run.output, images, outcome)
    finally:
        for engine in engines.values():
            await engine.launcher.stop()
    return outcomes


def show(output: Output, images: int, outcome: Outcome) -> None:
    rows = []
    for mode in outcome.rounds:
        figures: dict[str, Any] = outcome.figures(mode)
        output.record("encode", mode, images=images, quiet=outcome.is_quiet, **figures)
        ratio = f"×{short(_ratio(outcome, mode))}" if BASELINE in outcome.rounds else "-"
        rows.append((mode, [*(f"{figures[key]:.2f}" for key in ("requests_s", "ttft_ms", "encodings")), ratio]))
    heads = ["requests/s", "TTFT ms", "encodings per image", f"times {BASELINE}"]
    output.table(f"{images} images per request", heads, rows)


def _ratio(outcome: Outcome, mode: str) -> float:
    """Returns how many times the baseline's requests per second, as a median over rounds."""
    return outcome.ratio(BASELINE, "requests_s", mode) ** -1


def targets(outcomes: dict[int, Outcome], *, is_noisy: bool) -> list[Target]:
    result = []
    for images, limit in AT_LEAST.items():
        outcome = outcomes.get(images)
        is_measured = outcome is not None and {OURS, BASELINE} <= outcome.rounds.keys()
        figure = _ratio(outcome, OURS) if is_measured and (outcome.is_quiet or is_noisy) else None
        result.append(Target(f"{images} images per request: {OURS} over {BASELINE}", limit, "x", figure, is_least=True))
    return result


def main(arguments: Sequence[str]) -> int:
    parser = side_by_side("encode", __doc__, ("encode",), ENCODER_MODES)
    parser.add_argument("--images", metavar="N,…", type=numbers, default=(1, 2, 4), help="per request")
    parser.add_argument("--requests", metavar="N", type=int, help="of each mode in a round")
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help="requests at a time (%(default)s)")
    parser.add_argument("--tensor-parallel-size", metavar="N", type=int, default=2)
    parser.add_argument("--data-parallel-size", metavar="N", type=int, default=1)
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="of each worker (%(default)s)")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (2 if options.quick else 12)
    with Run("encode", options, rounds=7) as run:
        return run.conclude(OURS, targets(asyncio.run(measure(run)), is_noisy=options.noisy))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
