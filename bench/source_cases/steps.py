"""What goes to and from a worker in a step, measured on a live engine by `penstock measure` (#6241).

The document's four prompts, sampling parameters 0.8 and 0.95, TP 2, a Llama of OPT-125m's shape with random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.output import short
from bench.harness.targets import Target
from bench.serve_cases import model as tiny
from bench.serve_cases.servers import NAME, OURS, Ours
from bench.source_cases.context import Context
from bench.vs_vllm.workload import PROMPTS, TEMPERATURE, TOP_P, VOCABULARY

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
}
QUICK_SHAPE = {**SHAPE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
TOKENS, QUICK_TOKENS = 256, 64
SECONDS, QUICK_SECONDS = 8, 2
MESSAGES = {"in": "Step", "out": "StepDone"}
KEYS = ("messages", "median_bytes", "median_distance_bytes", "decode_us", "encode_us")
SOURCE = {"in": 2616, "out": 605}  # bytes a step of the document's engine


def run(context: Context) -> Iterator[Target]:
    model = context.scratch / "opt"
    _make(model, QUICK_SHAPE if context.is_quick else SHAPE)
    server = Ours.of(
        [str(model), "-tp", "2", "--dtype", "float32", "--max-model-len", "1024"], context.scratch / "opt.log"
    )
    try:
        server.wait_for_an_answer()
        result = _measured(server, context.is_quick)
    finally:
        server.stop()
    rows = []
    for way, name in MESSAGES.items():
        figures = {key: result[name][key] for key in KEYS}
        cells = [short(figures[key]) for key in KEYS]
        rows.append((f"{way}: {name}", [*cells, f"{SOURCE[way]:,}"]))
        context.output.record("steps", OURS, way=way, message=name, **figures)
    heads = ["seen", "bytes", "distance to the one before", "decode, us", "encode, us", "the document's bytes"]
    context.output.table("A step and its result, live: four prompts at TP 2 (#6241); medians", heads, rows)
    yield Target("four prompts, TP 2, live: bytes in a step", 24, "B", result["Step"]["median_bytes"])
    yield Target("bytes out", 64, "B", result["StepDone"]["median_bytes"])


def _make(directory: Path, shape: dict[str, int]) -> None:
    """Its tokenizer has fewer ids than the model: prompts are ids, and texts do not matter."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **shape, bos_token_id=2, eos_token_id=2)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tiny.make_tokenizer(directory)


def _measured(server: Ours, is_quick: bool) -> dict[str, Any]:
    pids = {role: process.pid for role, process in server.processes()}
    seconds = QUICK_SECONDS if is_quick else SECONDS
    is_over = threading.Event()

    def decode() -> None:
        body = {
            "model": NAME,
            "prompt": [list(prompt) for prompt in PROMPTS],
            "max_tokens": QUICK_TOKENS if is_quick else TOKENS,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "ignore_eos": True,
        }
        while not is_over.is_set():
            server.request("POST", "/v1/completions", body)

    asking = threading.Thread(target=decode)
    asking.start()
    try:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "measure",
            str(pids["launcher"]),
            "--json",
            "--seconds",
            str(seconds),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    finally:
        is_over.set()
        asking.join()
    return _figures([json.loads(line) for line in done.stdout.splitlines()])


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a step, and of its result."""
    by_name = {row["message"]: row for row in rows if row["case"] == "message"}
    return {name: by_name[name] for name in MESSAGES.values()}
