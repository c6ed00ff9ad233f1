"""`penstock bench serve`, as a user runs it, against our server on a simulated device."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")
pytest.importorskip("openai")
pytest.importorskip("rich")
pytest.importorskip("httptools")

from tests.e2e.test_server import KEY, MAX_OPEN, Served, run_server
from tests.support.loops import in_a_loop


async def bench(served: Served, path: Path, *options: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, figures, and what was said."""
    arguments = (
        "--base-url",
        f"http://127.0.0.1:{served.port}",
        "--api-key",
        KEY,
        "--result-filename",
        path / "figures",
    )
    command = ("-m", "penstock", "bench", "serve", *map(str, (*arguments, *options)))
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(sys.executable, *command, **pipes)
    output, _ = await process.communicate()
    return process.returncode or 0, json.loads((path / "figures").read_text())["figures"], output.decode()


@in_a_loop
async def test_load_counts_every_token_and_reports_more_streams_than_allowed(tmp_path: Path) -> None:
    async with run_server() as served:
        for backend in ("openai", "openai-chat"):
            options = ("--backend", backend, "--num-prompts", 30, "--output-len", "10-20", "--input-len", 40)
            tpots: list[float] = []
            # A step takes 2 ms. Where a busy machine lets the client read late, tokens come together.
            while not tpots or tpots[-1] <= 1.9:
                assert len(tpots) < 5, f"ms per token: {tpots}"
                before = await served.total("vllm:generation_tokens_total")
                status, figures, output = await bench(served, tmp_path, *options, "--max-concurrency", MAX_OPEN - 1)
                assert status == 0, output
                assert (figures["requests"], figures["failed"], figures["tokens_per_event"]) == (30, 0, 1)
                total = await served.total("vllm:generation_tokens_total")
                assert total - before == figures["output_tokens"] + 2  # of its two probes
                assert 30 * 30 < figures["prompt_tokens"] < 30 * 50
                assert "output tokens/s" in output and "TTFT" in output
                tpots.append(figures["tpot"]["mean"])

        # Fewer than one process takes connections: which of them takes how many is the kernel's affair.
        options = ("--num-prompts", 60, "--max-concurrency", 4 * MAX_OPEN - 2, "--output-len", 400)
        status, figures, output = await bench(served, tmp_path, *options)
        assert status == 1 and figures["requests"] + figures["failed"] == 60
        assert figures["requests"] >= MAX_OPEN and [error["kind"] for error in figures["errors"]] == ["status 429"], (
            output
        )
        assert "requests are open" in output
        await served.must_be_empty()
