"""What a grammar costs: the mean time from a token to the next of structured streams beside plain ones.

A simulated device with a tokenizer of so many ids, in turns with and without grammars; and the time to the first token
with a schema that is new, and with one that is known.

    scripts/bench grammars [--vocabularies 32000,152000] [--streams 64] [--step-ms 5] [--rounds 7] [--json]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from penstock.engine.client.client import Client
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.grammar import build_grammar, byte_tokenizer, check_grammar
from penstock.engine.text.grammar_fields import Grammar, GrammarSource

END = 0
TOKENS = 100  # of an answer
KINDS = ["string", "integer", "boolean", "number"]
MAX_TPOT = {32_000: 1.02, 152_000: 1.05}  # of plain streams
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


class Times(NamedTuple):
    first_ms: float
    tpot_ms: float


async def stream(client: Client, number: int, grammar: Grammar | None, tokens: int) -> Times:
    began = time.perf_counter()
    params = SamplingParams(max_tokens=tokens)
    prompt = [number % 250 + 1, *range(1, 40)]
    async with await client.submit(prompt, params, grammar=grammar) as answer:
        async for _ in answer:
            first = time.perf_counter()
            break
        async for _ in answer:
            pass
    generated = max(2, answer.completion_tokens)
    return Times((first - began) * 1e3, (time.perf_counter() - first) * 1e3 / (generated - 1))


async def turn(client: Client, streams: int, grammar: Grammar | None, tokens: int) -> float:
    """Returns the median of the streams' mean time a token."""
    times = await asyncio.gather(*(stream(client, number, grammar, tokens) for number in range(streams)))
    return median(each.tpot_ms for each in times)


@asynccontextmanager
async def serving(folder: Path, vocabulary: int, step_ms: float) -> AsyncIterator[Client]:
    device = SimulatedDevice(step_seconds=step_ms / 1e3, vocabulary=vocabulary, end_id=END, end_one_in=1 << 30)
    config = EngineConfig(simulated=device, model=str(folder), end_ids=(END,), log_level="warning")
    launcher = Launcher(config)
    try:
        launcher.start()
        await launcher.serving()
        async with Client(launcher.cluster, 0) as client:
            yield client
    finally:
        await launcher.stop()


def built(number: int) -> Grammar:
    source = GrammarSource("json_schema", schema(number), "json_schema")
    grammar = build_grammar(source)
    check_grammar(byte_tokenizer(), grammar, source)
    return grammar


async def measure(run: Run, vocabulary: int, streams: int, step_ms: float) -> tuple[float, float, float]:
    """Returns the ratio of times a token, and the milliseconds to the first token over plain: new and known schemas."""
    folder = run.scratch / str(vocabulary)
    folder.mkdir()
    write_tokenizer(folder, vocabulary)
    async with serving(folder, vocabulary, step_ms) as client:
        began = time.perf_counter()
        await stream(client, 0, built(0), 3)  # reads the tokenizer
        opened_ms = (time.perf_counter() - began) * 1e3
        plain, structured = [], []
        for _ in range(run.rounds):
            plain.append(await turn(client, streams, None, TOKENS))
            structured.append(await turn(client, streams, built(0), TOKENS))
        firsts: dict[str, list[float]] = {"plain": [], "known": [], "new": []}
        for number in range(1, 4 * run.rounds):
            for kind, times in firsts.items():
                began = time.perf_counter()
                grammar = None if kind == "plain" else built(0 if kind == "known" else number)
                building_ms = (time.perf_counter() - began) * 1e3 if kind == "new" else 0.0  # the server remembers
                times.append(building_ms + (await stream(client, number, grammar, 3)).first_ms)
    ratio = median(structured) / median(plain)
    new, known = (median(firsts[kind]) - median(firsts["plain"]) for kind in ("new", "known"))
    columns = {"plain_ms": plain, "structured_ms": structured, "opened_ms": opened_ms}
    run.output.record("tpot", "penstock", vocabulary=vocabulary, **columns, ratio=ratio, new_ms=new, known_ms=known)
    cells = [median(plain), median(structured), ratio, new, known, opened_ms]
    run.output.table(
        f"{streams} streams of {vocabulary} ids, steps of {step_ms:g} ms",
        ["plain", "structured", "ratio", "new", "known", "first ever"],
        [("ms", [short(cell) for cell in cells])],
    )
    return ratio, new, known


def targets(run: Run, vocabularies: Sequence[int], streams: int, step_ms: float) -> Iterator[Target]:
    for vocabulary in vocabularies:
        ratio, new, known = asyncio.run(measure(run, vocabulary, streams, step_ms))
        limit = MAX_TPOT.get(vocabulary, 1.05)
        yield Target(f"time a token of structured streams, {vocabulary} ids", limit, "x", ratio)
        yield Target(f"first token with a new schema over plain, {vocabulary} ids", MAX_NEW_MS, "ms", new)
        yield Target(f"first token with a known schema over plain, {vocabulary} ids", MAX_KNOWN_MS, "ms", known)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("grammars", __doc__)
    parser.add_argument("--vocabularies", default="32000,152000", help="numbers of token ids (32000,152000)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with Run("grammars", options) as run:
        sizes = [int(size) for size in options.vocabularies.split(",")]
        return run.conclude("penstock", targets(run, sizes, options.streams, options.step_ms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
