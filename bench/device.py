"""The engine on a CUDA device: right answers, throughput, latency of streams, a killed worker, idle time.

    scripts/bench device [--only CASE,…] [--rehearse] [--json] [--out DIR]

families: tiny models in float32, and bfloat16: random weights of Qwen3-0.6B's shape, against transformers.
scores: log-probabilities of prompts, and bad words, against the CPU. waits: of the host, in steps with images.
throughput: nano-vllm's load, 256 sequences of 100 to 1,024 tokens in and out, by `penstock generate`.
latency: 1 to 1,024 streams over HTTP. kill: the worker of 64 streams is killed. idle: the device's idle time by torch's
profiler. steps: a few steps without graphs, for compute-sanitizer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial

from bench.device_cases.device_run import DEVICE, REHEARSAL, Device
from bench.device_cases.family_answers import bfloat16, families, scores, steps, waits
from bench.device_cases.idle_share import idle
from bench.device_cases.served_streams import kill, latency
from bench.harness.run import Run, command_line, one_of
from bench.harness.targets import Target
from bench.serve_cases.servers import Failed

TOKENS_PER_S = 9_500.0
GOAL_TOKENS_PER_S = 16_000.0  # 0.6 of 26,600, which memory of 3.0 TB/s allows


def throughput(device: Device) -> None:
    count = device.scale.sequences
    chance = random.Random(0)
    prompts = device.prompts(count, *device.scale.lengths, chance)
    tokens = [chance.randint(*device.scale.lengths) for _ in prompts]
    params = {"ignore_eos": True, "temperature": 0.6}
    requests = [{"ids": ids, "max_tokens": most, **params} for ids, most in zip(prompts, tokens, strict=True)]
    rates = []
    for _ in range(2):
        answers, rate = device.generate(requests)
        if list(map(len, answers)) != tokens:
            raise Failed("an answer has another number of tokens than was asked for")
        device.record(
            "throughput",
            f"{rate:,.0f} tokens/s (goal {GOAL_TOKENS_PER_S:,.0f})",
            sequences=count,
            tokens=sum(tokens),
            tokens_per_s=rate,
        )
        rates.append(rate)
    target = "nano-vllm's load, the slower of two runs"
    device.targets.append(Target(target, TOKENS_PER_S, "tokens/s", min(rates), is_least=True, is_speed=True))


CASES = {each.__name__: each for each in (families, bfloat16, scores, waits, throughput, latency, kill, idle, steps)}


def main(arguments: Sequence[str]) -> int:
    parser = command_line("device", __doc__)
    usual = ",".join(name for name in CASES if name != "steps")
    parser.add_argument("--only", metavar="CASE,…", type=one_of(list(CASES)), default=usual, help="of %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small: does it run?")
    options = parser.parse_args(arguments)
    with Run("device", options) as run:
        device = Device(run, REHEARSAL if options.rehearse else DEVICE, [])
        for name in run.named("only"):
            run.attempt(name, partial(CASES[name], device))
        return run.conclude("penstock", device.targets)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
