"""What a tensor costs on its way to other processes: our store and pool beside everything else.

All ways have their processes up at the same time and take turns in every round, as in bench/channels.py.

    scripts/bench tensors                        everything, in about eight minutes
    scripts/bench tensors --quick                small tensors, few rounds: does it run?
    scripts/bench tensors --only carry --readers 4 --sizes 67108864 --impl penstock-store,vllm-cache
    PENSTOCK_PEER_PYTHON=… scripts/bench tensors     with vLLM's ways, where that interpreter has it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.harness.run import Run, numbers, side_by_side
from bench.harness.turns import Turns
from bench.impls import IMPLEMENTATIONS, SERVING, TENSORS, Implementation
from bench.tensor_cases import carrying, goals, serving

MB = 1 << 20
CASES = ("carry", "memory", "serve")
SLOW_TO_START = {"vllm-cache": (1, 4), "vllm-queue": (1, 4), "vllm-arena": (1, 4)}  # 8 s of CPU for each process


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    readers: tuple[int, ...]
    sizes: tuple[int, ...]
    to_most: tuple[int, ...]  # sizes that are measured with the most readers alone
    held: int  # the size for which copies are counted
    seconds: float  # of one way's turn
    images: int
    largest_image: int
    messages: int  # of each server
    serving_rounds: int


FULL = Scale(
    readers=(1, 2, 4),
    sizes=(MB, 8 * MB, 64 * MB, 256 * MB),
    to_most=(15 * MB, 32 * MB),
    held=64 * MB,
    seconds=0.2,
    images=100,
    largest_image=23 * MB,
    messages=40,
    serving_rounds=2,
)
QUICK = Scale(
    readers=(2,),
    sizes=(MB,),
    to_most=(2 * MB,),
    held=16 * MB,
    seconds=0.02,
    images=10,
    largest_image=MB,
    messages=5,
    serving_rounds=1,
)


def available(run: Run, names: Iterable[str], kinds: frozenset[str]) -> list[Implementation]:
    """Returns those of these kinds that can run here."""
    return run.available(way for way in (IMPLEMENTATIONS[name] for name in names) if way.kinds == kinds)


def with_options(ways: Sequence[Implementation], **options: int) -> list[Implementation]:
    more = {key: str(value) for key, value in options.items()}
    return [replace(each, options={**each.options, **more}) for each in ways]


def run_carrying(
    turns: Turns, scale: Scale, ways: Sequence[Implementation], cases: Sequence[str], result: goals.Found
) -> None:
    largest = max(*scale.sizes, *scale.to_most, scale.held)
    for receivers in scale.readers:
        is_most = receivers == max(scale.readers)
        if "carry" not in cases and not is_most:
            continue
        here = [each for each in ways if receivers in SLOW_TO_START.get(each.name, (receivers,))]
        turns.open(with_options(here, largest=largest), receivers)
        if "memory" in cases and is_most:
            result.memory = carrying.run_memory(turns, scale.held)
        if "carry" in cases:
            carrying.warm(turns, largest)
            sizes = sorted({*scale.sizes, *(scale.to_most if is_most else ())})
            result.carried[receivers] = carrying.run_sizes(turns, sizes, scale.seconds)
        turns.close()


def run_serving(turns: Turns, scale: Scale, ways: Sequence[Implementation], result: goals.Found) -> None:
    from bench.impls import serving as ends
    from bench.impls import serving_classic, serving_penstock

    turns.open(with_options(ways, largest=scale.largest_image, images=scale.images), ends.SERVERS + ends.WORKERS)
    result.served = serving.run_serving(turns, scale.images, scale.largest_image, scale.messages, scale.serving_rounds)
    turns.close()
    result.request_nbytes = serving_penstock.request_nbytes()
    if any("classic-serving" in outcome.rounds for outcome in result.served.values()):
        means = "vLLM's MessageQueue" if serving_classic.has_vllm() else "pickle over a pipe for each"
        turns.output.say(f"  classic-serving: to the core by ZeroMQ, from there to the workers by {means}")
    turns.output.say(f"  a request with the key of one image: a frame of {result.request_nbytes:.0f} B")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    ways = [name for name, each in IMPLEMENTATIONS.items() if each.kinds in (TENSORS, SERVING)]
    parser = side_by_side("tensors", __doc__, CASES, ways, quick="small tensors, few rounds: does it run?")
    parser.add_argument("--readers", metavar="N,…", type=numbers)
    parser.add_argument("--sizes", metavar="BYTES,…", type=numbers)
    return parser.parse_args(arguments)


def scale_of(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else FULL
    if options.readers:
        scale = replace(scale, readers=options.readers)
    if options.sizes:
        scale = replace(scale, sizes=options.sizes, to_most=options.sizes)
    if options.rounds:
        scale = replace(scale, serving_rounds=options.rounds)
    return scale


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    scale, result = scale_of(options), goals.Found()
    with Run("tensors", options, rounds=3, patience=45.0) as run:
        cases, names = run.named("only"), run.named("impl")
        carriers, servers = run.turns(carrying.STORE, Turns), run.turns(serving.OURS, Turns)
        try:
            if {"carry", "memory"} & set(cases):
                run_carrying(carriers, scale, available(run, names, TENSORS), cases, result)
            if "serve" in cases:
                run_serving(servers, scale, available(run, names, SERVING), result)
        finally:
            carriers.kill()
            servers.kill()
        return run.conclude("penstock", goals.targets(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
