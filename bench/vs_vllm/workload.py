"""The workload of public vLLM issue #6241: four prompts, sampling parameters 0.8/0.95, decoding, blocks of 16 tokens.

For more than four requests the prompts are repeated. Plain data: every format makes of it what it sends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK = 16  # tokens
TEMPERATURE, TOP_P = 0.8, 0.95
PROMPTS = (
    (2, 31414, 6, 127, 766, 16),  # Hello, my name is
    (2, 133, 394, 9, 5, 315, 532, 16),  # The president of the United States is
    (2, 133, 812, 9, 1470, 16),  # The capital of France is
    (2, 133, 499, 9, 4687, 16),  # The future of AI is
)
VOCABULARY = 50_272
AHEAD = 2  # blocks of tokens that each request has decoded when we begin to look


@dataclass
class Running:
    """One request that is being decoded."""

    name: str  # as an API server calls it
    prompt: tuple[int, ...]
    output: list[int]
    blocks: list[int]
    logprob: float  # of the output so far

    @property
    def computed(self) -> int:
        """Tokens that lie in the cache; the last one sampled does not, yet."""
        return len(self.prompt) + len(self.output) - 1


@dataclass(frozen=True)
class Advance:
    """One step: each request computes one token; some are given a block before."""

    due: dict[int, int]  # row: block
    sampled: list[int]  # by row: what comes of the step


class Decode:
    """So many requests, all decoding. `step()` says what happens next, `finish()` that it has happened.

    Spread: they have come at different times, so that in every step every sixteenth needs a block. Not spread: none
    does, for `BLOCK - 2` steps (`room` gives them that many more blocks, so that it lasts longer).
    """

    def __init__(self, requests: int, *, is_spread: bool, room: int = 0, seed: int = 6241) -> None:
        self._chance = random.Random(seed)
        self._blocks = 0
        self.running: list[Running] = []
        for row in range(requests):
            prompt = PROMPTS[row % len(PROMPTS)]
            # The next token to be computed is the `phase`-th of its block.
            phase = row % BLOCK if is_spread else 1
            computed = AHEAD * BLOCK + phase
            output = [self._token() for _ in range(computed + 1 - len(prompt))]
            name = f"cmpl-{self._chance.getrandbits(128):032x}-0-{self._chance.getrandbits(32):08x}"
            blocks = [self._block() for _ in range(-(-computed // BLOCK) + room)]
            logprob = sum(self._logprob() for _ in output)
            self.running.append(Running(name, prompt, output, blocks, logprob))

    def _token(self) -> int:
        return self._chance.randrange(VOCABULARY)

    def _logprob(self) -> float:
        return -self._chance.expovariate(1)

    def _block(self) -> int:
        self._blocks += 1
        return self._blocks

    def step(self) -> Advance:
        """Gives out the blocks that fall due."""
        due = {}
        for row, entry in enumerate(self.running):
            if entry.computed == len(entry.blocks) * BLOCK:
                due[row] = self._block()
                entry.blocks.append(due[row])
        return Advance(due, [self._token() for _ in self.running])

    def finish(self, advance: Advance) -> None:
        for item, token in zip(self.running, advance.sampled, strict=True):
            item.output.append(token)
            item.logprob += self._logprob()
