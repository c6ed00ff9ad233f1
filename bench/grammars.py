"""What a grammar costs: the mean time from a token to the next of structured streams beside plain ones.

Simulated devices with large tokenizers, and tiny Llama, in turns with and without grammars: the time a token of the
streams and of a plain stream beside them, the core's time, and the time to the first token with new and known schemas.

    scripts/bench grammars [--vocabularies 32000,152000] [--streams 64] [--step-ms 5] [--rounds 7] [--json]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.serve_cases.model import make as make_model
from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.grammar import build_grammar, byte_tokenizer, check_grammar
from penstock.engine.text.grammar_fields import Grammar, GrammarSource

END = 0
TOKENS = 200  # of an answer
KINDS = ["string", "integer", "boolean", "number"]
MAX_TPOT = {32_000: 1.02, 152_000: 1.05}  # of plain streams
MAX_TINY_TPOT = 1.1
MAX_BESIDE = 1.02  # of a plain stream and of the core, over a turn without grammars
MAX_NEW_MS, MAX_KNOWN_MS = 10.0, 1.0  # over plain


def schema(number: int) -> dict[str, Any]:
    """Twelve properties, nested; a different schema for each number. An array, so that no answer is short."""
    inner = {f"p{place}_{number}": {"type": KINDS[place % 4]} for place in range(4)}
    outer: dict[str, Any] = {f"q{place}_{number}": {"type": KINDS[place % 4]} for place in range(7)}
    outer["inner"] = {"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False}
    item = {"type": "object", "properties": outer, "required": [*outer], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1000}


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a tokenizer with all bytes, and pieces of two to eight letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters, number = "etaoinshrdlu", 0
    while len(tokens) < vocabulary:
        number, left, piece = number + 1, number + 12, ""
        while left:
            left, digit = divmod(left, 12)
            piece += letters[digit]
        tokens.append(f"Ġ{piece}" if number % 3 else f"{piece}ing")
    unique = list(dict.fromkeys(tokens))
    tokenizer = Tokenizer(models.BPE(vocab={token: token_id for token_id, token in enumerate(unique)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))


class Turn(NamedTuple):
    """The times of a turn of streams, with a plain stream beside them."""

    tpot_ms: float  # the median of the streams' mean time a token
    beside_ms: float  # the mean time a token of the plain stream
    own_us: float  # of the core itself, a step


class Times(NamedTuple):
    first_ms: float
    tpot_ms: float


class Engine(NamedTuple):
    launcher: Launcher
    client: Client

    async def stream(self, number: int, grammar: Grammar | None, tokens: int) -> Times:
        began = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, ignore_eos=grammar is None)
        prompt = [number % 250 + 1, *range(1, 40)]
        async with await self.client.submit(prompt, params, grammar=grammar) as answer:
            async for _ in answer:
                first = time.perf_counter()
                break
            async for _ in answer:
                pass
        if answer.completion_tokens != tokens:
            raise RuntimeError(f"an answer of {answer.completion_tokens} tokens instead of {tokens}")
        return Times((first - began) * 1e3, (time.perf_counter() - first) * 1e3 / (tokens - 1))

    def spent(self) -> tuple[int, int]:
        """Returns the steps so far, and the nanoseconds that the core itself spent on them."""
        row = self.launcher.board.row(0)
        return row[StatusBoard.STEPS], row[StatusBoard.OWN_NS]

    async def turn(self, streams: int, grammar: Grammar | None) -> Turn:
        steps, own_ns = self.spent()
        answers = (self.stream(number, grammar, TOKENS) for number in range(streams))
        *times, beside = await asyncio.gather(*answers, self.stream(streams, None, TOKENS))
        steps_after, own_ns_after = self.spent()
        own_us = (own_ns_after - own_ns) / (steps_after - steps) / 1e3
        return Turn(median(each.tpot_ms for each in times), beside.tpot_ms, own_us)


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[Engine]:
    launcher = Launcher(config)
    try:
        launcher.start()
        await launcher.serving()
        async with Client(launcher.cluster, 0) as client:
            yield Engine(launcher, client)
    finally:
        await launcher.stop()


def built(number: int) -> Grammar:
    source = GrammarSource("json_schema", schema(number), "json_schema")
    grammar = build_grammar(source)
    check_grammar(byte_tokenizer(), grammar, source)
    return grammar


async def compare(run: Run, name: str, config: EngineConfig, streams: int) -> tuple[Turn, float, float]:
    """Returns the ratios of structured over plain turns, and milliseconds to the first token over plain: with new
    schemas, and with a known one."""
    plain: list[Turn] = []
    structured: list[Turn] = []
    async with serving(config) as engine:
        opened_ms = (await engine.stream(0, built(0), 3)).first_ms  # reads the tokenizer
        for number in range(run.rounds + 1):
            turns = await engine.turn(streams, None), await engine.turn(streams, built(0))
            if number:  # the first round finds no blocks in the cache
                plain.append(turns[0])
                structured.append(turns[1])
        new_ms, known_ms = await first_tokens(engine, 4 * run.rounds)
    of_rounds = (map(truediv, own, none) for own, none in zip(structured, plain, strict=True))
    ratios = Turn(*map(median, zip(*of_rounds, strict=True)))
    record = {"plain": plain, "structured": structured, "ratios": ratios}
    run.output.record("turns", "penstock", engine=name, **record, new_ms=new_ms, known_ms=known_ms)
    medians = {
        "plain": map(median, zip(*plain, strict=True)),
        "structured": map(median, zip(*structured, strict=True)),
        "ratio": ratios,
    }
    run.output.table(
        f"{streams} streams, {name}: first token {new_ms:.2f} ms later with a new schema, {known_ms:.2f} with a known "
        f"one, {opened_ms:.0f} ms with the first one ever",
        ["ms a token", "of one beside", "core's own us a step"],
        [(row, [short(cell) for cell in cells]) for row, cells in medians.items()],
    )
    return ratios, new_ms, known_ms


async def first_tokens(engine: Engine, times: int) -> tuple[float, float]:
    firsts: dict[str, list[float]] = {"plain": [], "known": [], "new": []}
    for number in range(1, times):
        for kind, milliseconds in firsts.items():
            began = time.perf_counter()
            grammar = None if kind == "plain" else built(0 if kind == "known" else number)
            building_ms = (time.perf_counter() - began) * 1e3 if kind == "new" else 0.0  # the server remembers
            milliseconds.append(building_ms + (await engine.stream(number, grammar, 3)).first_ms)
    new, known = (median(firsts[kind]) - median(firsts["plain"]) for kind in ("new", "known"))
    return new, known


def engines(run: Run, vocabularies: Sequence[int], step_ms: float) -> Iterator[tuple[str, EngineConfig, float]]:
    """Yields the name of each engine, and the most that a token of structured streams may take over a plain one."""
    for vocabulary in vocabularies:
        folder = run.scratch / str(vocabulary)
        folder.mkdir()
        write_tokenizer(folder, vocabulary)
        device = SimulatedDevice(step_seconds=step_ms / 1e3, vocabulary=vocabulary, end_id=END, end_one_in=1 << 30)
        config = EngineConfig(simulated=device, model=str(folder), end_ids=(END,), log_level="warning")
        yield f"steps of {step_ms:g} ms, {vocabulary} ids", config, MAX_TPOT.get(vocabulary, 1.05)
    tiny = run.scratch / "tiny Llama"
    tiny.mkdir()
    make_model(tiny)
    yield "tiny Llama", EngineConfig(model=str(tiny), log_level="warning"), MAX_TINY_TPOT


def targets(run: Run, options: Any) -> Iterator[Target]:
    sizes = [int(size) for size in options.vocabularies.split(",")]
    for name, config, limit in engines(run, sizes, options.step_ms):
        ratios, new, known = asyncio.run(compare(run, name, config, options.streams))
        yield Target(f"time a token of structured streams, {name}", limit, "x", ratios.tpot_ms)
        if config.simulated is None:
            continue  # a plain stream waits for the masks of its batch
        yield Target(f"time a token of a plain stream beside them, {name}", MAX_BESIDE, "x", ratios.beside_ms)
        yield Target(f"core's own time a step, {name}", MAX_BESIDE, "x", ratios.own_us)
        yield Target(f"first token with a new schema over plain, {name}", MAX_NEW_MS, "ms", new)
        yield Target(f"first token with a known schema over plain, {name}", MAX_KNOWN_MS, "ms", known)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("grammars", __doc__)
    parser.add_argument("--vocabularies", default="32000,152000", help="numbers of token ids (32000,152000)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with Run("grammars", options) as run:
        return run.conclude("penstock", targets(run, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
