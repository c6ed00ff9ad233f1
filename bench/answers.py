"""What parsing an answer costs an output processor: reasoning, content and arguments of calls, over plain chunks.

Messages of the core are decoded, turned into chunks and encoded for a server, in one process and without channels.

    scripts/bench answers [--streams 64] [--tokens 600] [--rounds 7] [--json]
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from bench.harness.output import short
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.answer_format import AnswerFormat
from penstock.engine.protocol.messages import DELTAS, TOKENS, ChunkFormat, SamplingParams, Started, Style, Tokens
from penstock.engine.text.detokenizer import Vocabulary

HEAD = b'{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1795300000,"model":"bench"'
WORDS = "the of and to in is that for it as was with be by on not he at are this have from or had an but about".split()
HERMES, THINKS = AnswerFormat("hermes"), AnswerFormat("hermes", "qwen3", in_reasoning=True)
PLAIN = "plain"
LIMITS = {"reasoning": 1.3, "content": 1.3, "arguments": 2.5}
PARTS = re.compile(r" ?\w{1,5}| ?[^\w\s]{1,3}|\s+")  # as byte-level tokenizers cut texts, about


def texts(tokens: int) -> dict[str, tuple[str, AnswerFormat | None]]:
    """Returns a text of each kind, with more than `tokens` tokens, and its format."""
    chance = random.Random(1)
    words = [chance.choice(WORDS) for _ in range(tokens + 9)]
    prose = " ".join(words)
    numbered = enumerate(words)
    values = [{"name": word, "values": [number, True], "text": f"{word} {prose[:60]}"} for number, word in numbered]
    call = f'<tool_call>\n{{"name": "write", "arguments": {json.dumps({"values": values})}'
    return {
        PLAIN: (prose, None),
        "reasoning": (prose, THINKS),
        "content": (prose, HERMES),
        "arguments": (call, HERMES),
    }


class Processor:
    """An output processor without a process, and messages for it."""

    def __init__(self, text: str, answer: AnswerFormat | None, streams: int, tokens: int) -> None:
        parts = [part.encode() for part in PARTS.findall(text)][:tokens]
        unique = sorted({*parts})
        self._vocabulary = Vocabulary(unique)
        chunk_format = ChunkFormat(Style.CHAT, HEAD, answer=answer)
        params = SamplingParams(max_tokens=tokens + 1)
        started = tuple(Started(slot, slot, params, (), chunk_format) for slot in range(streams))
        messages = [
            Tokens(
                np.full(streams, unique.index(part), np.int32),
                None if number else np.arange(streams, dtype=np.uint16),
                started=() if number else started,
            )
            for number, part in enumerate(parts)
        ]
        encoder = FrameEncoder(Catalogue.of(TOKENS))
        frames = [encoder.encode(message) for message in messages]
        self._frames = [frame if isinstance(frame, bytes) else b"".join(frame) for frame in frames]
        self._tokens = streams * len(parts)

    def cpu_ms(self) -> float:
        """Returns milliseconds of processor time for 1,000 tokens."""
        state = OutputState(self._vocabulary, 256)
        decoder, encoder = FrameDecoder(Catalogue.of(TOKENS)), FrameEncoder(Catalogue.of(DELTAS))
        began = time.process_time()
        for frame in self._frames:
            for _, delta in state.process(decoder.decode(frame)).deltas:
                encoder.encode(delta)
        return (time.process_time() - began) * 1e6 / self._tokens


def targets(run: Run, streams: int, tokens: int) -> Iterator[Target]:
    processors = {kind: Processor(*part, streams, tokens) for kind, part in texts(tokens).items()}
    figures: dict[str, list[float]] = {kind: [] for kind in processors}
    for _ in range(run.rounds):
        for kind, processor in processors.items():
            figures[kind].append(processor.cpu_ms())
    medians = {kind: median(values) for kind, values in figures.items()}
    run.output.record("answers", "penstock", streams=streams, **figures)
    rows = [(kind, [short(figure), short(figure / medians[PLAIN])]) for kind, figure in medians.items()]
    run.output.table(f"{streams} streams: processor time of 1,000 tokens", ["ms", "over plain"], rows)
    for kind, limit in LIMITS.items():
        yield Target(f"processor time of {kind}, {streams} streams", limit, "x", medians[kind] / medians[PLAIN])


def main(arguments: Sequence[str]) -> int:
    parser = command_line("answers", __doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream (600)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with Run("answers", options) as run:
        return run.conclude("penstock", targets(run, options.streams, options.tokens))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
