"""How much `bench device` measures, and what all cases need: a model, a server, the answers of a command."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.run import Run
from bench.harness.targets import Target
from bench.serve_cases import model
from bench.serve_cases.servers import Failed, Ours

GENERATED = re.compile(r"event=generated requests=(\d+) failed=(\d+) tokens=(\d+) tokens_per_second=([\d.]+)")
ANSWERED = 100.0  # seconds; for all requests of a command


class Scale(NamedTuple):
    device: str
    shape: str
    slots: int
    max_model_len: int
    families: tuple[str, ...]  # of tests.support.models
    scored: tuple[str, ...]  # with log-probabilities of prompts
    vision: tuple[str, ...]
    near_prompts: int  # that are compared in bfloat16
    near_tokens: int
    sequences: int  # nano-vllm's load
    lengths: tuple[int, int]  # of prompts and answers
    streams: tuple[tuple[int, int], ...]  # requests, and how many at a time
    stream_tokens: tuple[int, int]  # of a prompt and of the answer
    killed_streams: int
    killed_tokens: int
    idle_steps: int


DEVICE = Scale(
    device="cuda",
    shape=model.REAL,
    slots=256,
    max_model_len=2560,
    families=("llama", "qwen3", "gemma2", "mistral", "qwen2_vl", "llava", "idefics3"),
    scored=("llama", "gemma2"),
    vision=("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"),
    near_prompts=32,
    near_tokens=32,
    sequences=256,
    lengths=(100, 1024),
    streams=((8, 1), (96, 32), (512, 256), (1024, 1024)),
    stream_tokens=(512, 128),
    killed_streams=64,
    killed_tokens=384,
    idle_steps=50,
)
REHEARSAL = Scale(
    device="cpu",
    shape=model.SMALL,
    slots=8,
    max_model_len=1024,
    families=("llama", "gemma2"),
    scored=("llama",),
    vision=("qwen2_vl",),
    near_prompts=2,
    near_tokens=4,
    sequences=8,
    lengths=(4, 16),
    streams=((2, 1), (8, 8)),
    stream_tokens=(16, 4),
    killed_streams=4,
    killed_tokens=600,
    idle_steps=5,
)


@dataclass
class Device:
    """A run on a device. Cases add targets as they come, so that a case that fails leaves its first ones."""

    run: Run
    scale: Scale
    targets: list[Target]

    @property
    def is_rehearsal(self) -> bool:
        return self.scale is REHEARSAL

    @property
    def ids(self) -> int:
        return model.REAL_IDS if self.scale.shape == model.REAL else model.IDS

    def model(self) -> Path:
        """Returns the directory of a model with random weights, which the runs with one --out share."""
        folder: Path = (self.run.options.out or self.run.scratch).resolve() / "model"
        if not folder.exists():
            unfinished = folder.with_name(f"model-{os.getpid()}")
            unfinished.mkdir(parents=True)
            # Another process makes it: this one holds no memory of the device.
            arguments = (unfinished, self.scale.shape, 0, self.scale.device)
            process = multiprocessing.get_context("spawn").Process(target=model.make, args=arguments)
            process.start()
            process.join()
            if process.exitcode:
                raise Failed(f"the process that makes the model ended with {process.exitcode}")
            unfinished.rename(folder)
        return folder

    def record(self, case: str, headline: str = "", **figures: Any) -> None:
        """`headline`: for the table of scripts/device."""
        self.run.output.record(case, "penstock", headline=headline, **figures)
        rounded = (f"{value:.4g}" if isinstance(value, float) else value for value in figures.values())
        texts = (f"{name} {value}" for name, value in zip(figures, rounded, strict=True))
        self.run.output.say(f"{case}: {', '.join(texts)}")

    @property
    def options(self) -> list[str]:
        return [f"--device={self.scale.device}", f"--max-num-seqs={self.scale.slots}"]

    def prompts(self, count: int, least: int, most: int, chance: random.Random) -> list[list[int]]:
        largest = min(10_000, self.ids - 1)
        return [[chance.randint(3, largest) for _ in range(chance.randint(least, most))] for _ in range(count)]

    def generate(self, requests: Sequence[dict[str, Any]]) -> tuple[list[list[int]], float]:
        """Returns the answers of `penstock generate`, and its tokens per second. Raises Failed."""
        requests_file, answers_file = self.run.scratch / "requests.jsonl", self.run.scratch / "answers.jsonl"
        requests_file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        command = [sys.executable, "-m", "penstock", "generate", str(self.model()), *self.options]
        command += [
            "--dtype=bfloat16",
            f"--max-model-len={self.scale.max_model_len}",
            f"--max-concurrency={self.scale.slots}",
        ]
        command += [f"--prompts={requests_file}", f"--output={answers_file}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWERED, check=False)
        self.run.output.say(done.stderr)
        match = GENERATED.search(done.stderr)
        if done.returncode or match is None or match[2] != "0":
            raise Failed(f"penstock generate ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        answers = [json.loads(line)["ids"] for line in answers_file.read_text().splitlines()]
        return answers, float(match[4])

    @contextmanager
    def serving(self, dtype: str) -> Iterator[Ours]:
        log = self.run.scratch / "server.log"
        open_requests = max(at_once for _, at_once in self.scale.streams) + 64
        options = [*self.options, f"--max-open-requests={open_requests}"]
        server = Ours.of_model(self.model(), log, longest=self.scale.max_model_len, dtype=dtype, options=options)
        try:
            server.wait_until_ready()  # silent: a refused prompt leaves a line in the log
            self.record("start", dtype=dtype, seconds=server.wait_for_an_answer())
            yield server
        finally:
            server.stop()
            self.run.output.say(log.read_text(errors="replace"))
