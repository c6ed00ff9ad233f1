"""The engine alone, on a simulated device: does the device wait, what does a user wait, what does a step cost the core?

Ours, ours with a part taken away, and the classic way in the same engine: their trees are up at the same time and take
turns in every round.

    scripts/bench engine                         the targets' cells and a few around them: five minutes
    scripts/bench engine --all                   steps of 1 to 20 ms, batches of 1 to 1,024, TP of 1 to 4: an hour
    scripts/bench engine --quick                 small, few rounds: does it run?
    scripts/bench engine --only decode --cells 5x256x2,1x32x1 --impl penstock,classic-zeromq --style chat
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.engine_cases import decoding, first_token, goals, words
from bench.engine_cases.decoding import Cell, Trees
from bench.engine_cases.trees import OURS, SAID, WAYS
from bench.harness.run import Run, side_by_side
from penstock.engine.protocol.messages import Style

CASES = ("decode", "first")
STEPS_MS, BATCHES, TENSOR_PARALLEL = (1, 2, 5, 20), (1, 32, 256, 1024), (1, 2, 4)
STYLES = {"plain": None, "chat": Style.CHAT}
GRID = tuple(Cell(*place) for place in itertools.product(STEPS_MS, BATCHES, TENSOR_PARALLEL))


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    cells: tuple[Cell, ...]
    seconds: float  # of one way's turn


DEFAULT = Scale(
    cells=(Cell(1, 1, 1), Cell(2, 32, 2), Cell(1, 256, 1), goals.SMALL, *goals.OUTPUTS, goals.LARGE),
    seconds=0.8,
)
ALL = replace(DEFAULT, cells=(*GRID, goals.OUTPUTS[1]))
QUICK = Scale(cells=(Cell(2, 8, 1, Style.CHAT),), seconds=0.1)


async def measure(run: Run, scale: Scale) -> goals.Found:
    result, cases, scratch = goals.Found(), run.named("only"), run.scratch
    trees = run.turns(OURS, Trees)
    ways = run.available(WAYS[name] for name in run.named("impl"))
    for way in ways:
        run.output.say(f"  {way.name}: {SAID[way.name]}")
    model = scratch / "model"
    vocabulary = words.train(model)
    if "decode" in cases:
        for place, cell in enumerate(scale.cells):
            here = scratch / str(place)
            result.decoded[cell] = await decoding.run_cell(trees, ways, cell, model, vocabulary, here, scale.seconds)
    if "first" in cases:
        style = scale.cells[0].style
        requests = first_token.REQUESTS if scale.seconds >= DEFAULT.seconds else 5
        await first_token.run_first(trees, ways, style, requests, model, vocabulary, scratch / "first")
    return result


def cells_of(text: str) -> tuple[Cell, ...]:
    """Of `5x256x2,…`: milliseconds of a step, batch, TP."""
    try:
        return tuple(Cell(*(int(number) for number in cell.split("x"))) for cell in text.split(","))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"cells are like 5x256x2 (ms of a step, batch, TP), not {text!r}") from None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side("engine", __doc__, CASES, list(WAYS))
    parser.add_argument("--all", action="store_true", help="every cell of the grid")
    parser.add_argument("--cells", metavar="MSxBATCHxTP,…", type=cells_of, help="these, and no others")
    parser.add_argument("--style", choices=STYLES, help="of all answers: plain text, or finished chat chunks")
    parser.add_argument("--seconds", metavar="S", type=float, help="of one cluster's turn")
    return parser.parse_args(arguments)


def scale_of(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else ALL if options.all else DEFAULT
    values = {name: getattr(options, name) for name in ("cells", "seconds") if getattr(options, name) is not None}
    scale = replace(scale, **values)
    if options.style is not None:
        cells = dict.fromkeys(cell._replace(style=STYLES[options.style]) for cell in scale.cells)
        scale = replace(scale, cells=tuple(cells))
    return scale


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    with Run("engine", options, rounds=3, patience=300.0 if options.all else 30.0) as run:
        return run.conclude(OURS, goals.targets(asyncio.run(measure(run, scale_of(options)))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
