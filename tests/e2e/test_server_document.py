"""The server against its own OpenAPI document: schemathesis asks what the document allows and what it does not."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("schemathesis")
pytest.importorskip("openai")

from penstock.server.chat import response_schema
from tests import tiers
from tests.e2e.test_server import KEY, Served, run_server
from tests.support.engine import simulated_device
from tests.support.loops import in_a_loop

SECONDS = tiers.limit(300, soak=3600)  # then it hangs: ten times what it takes on a machine at rest
# What a document cannot say is refused too: a prompt that is too long, another model's name.
BEYOND_THE_DOCUMENT = "positive_data_acceptance"


@in_a_loop
async def test_answers_and_events_of_all_options_fit_the_openapi_document() -> None:
    async def answered(served: Served, path: str, body: dict[str, Any]) -> str:
        status, text = await served.exchange("POST", path, body)
        assert status == 200, text
        assert ("data: [DONE]\n\n\r\n0\r\n\r\n" in text) == body["stream"]
        return text

    async with run_server(simulated=simulated_device(step_seconds=0.0), api_server_count=1) as served:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body, whole, chunk in (
            (
                "/v1/completions",
                {"prompt": "hi"},
                response_schema.TextCompletion,
                response_schema.CompletionChunk,
            ),
            ("/v1/chat/completions", chat, response_schema.ChatCompletion, response_schema.ChatChunk),
        ):
            for options in ({}, {"n": 2}, {"stop": [" 1", " 2"]}, {"stream_options": {"include_usage": True}}):
                asking = {**body, "max_tokens": 30, **options}
                if "stream_options" not in options:
                    msgspec.json.decode(await answered(served, path, {**asking, "stream": False}), type=whole)
                lines = (await answered(served, path, {**asking, "stream": True})).splitlines()
                events = [line[6:] for line in lines if line.startswith("data: {")]
                chunks = [msgspec.json.decode(event, type=chunk) for event in events]
                ends = [choice for part in chunks for choice in part.choices if choice.finish_reason]
                assert len(ends) == options.get("n", 1)


def pooling_options(folder: Path) -> dict[str, Any]:
    pytest.importorskip("torch")
    from tests.support.tiny_models import write_llama

    return {
        "simulated": None,
        "model": str(write_llama(folder)),
        "runner": "pooling",
        "store_nbytes": 1 << 22,
        "num_gpu_blocks_override": 1024,
    }


@tiers.needs_all
@pytest.mark.parametrize("runner", ["generate", "pooling"])
@pytest.mark.timeout(SECONDS)
@in_a_loop
async def test_what_the_server_answers_is_what_its_document_says(runner: str, seed: int, tmp_path: Path) -> None:
    # 413, of which the document cannot say to what it belongs, is no answer to too many messages.
    limits = {"max_body_nbytes": 8 << 20}
    options = {"simulated": simulated_device(step_seconds=0.0)} if runner == "generate" else pooling_options(tmp_path)
    async with run_server(limits, **{**options, "max_model_len": 48}) as served:
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            *(f"http://127.0.0.1:{served.port}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--phases", "coverage,fuzzing", "--exclude-checks", BEYOND_THE_DOCUMENT, "--seed", str(seed)),
            *("--max-examples", str(tiers.SCHEMA_EXAMPLES), "--request-timeout", "20"),
            # Two of its threads at a time in `ast.parse` are a SystemError of CPython 3.11.
            *("--workers", "1", "--output-truncate", "true", "--warnings", "off"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,  # where it leaves what it knows
        )
        assert process.stdout is not None
        output = (await process.stdout.read()).decode(errors="replace")
        await process.wait()
        print(output)
        assert process.returncode == 0, output
        for phase in ("Coverage", "Fuzzing"):
            assert f"✅  {phase}" in output, f"{phase} did not run"
        cases = re.search(r"(\d+) generated, (\d+) passed", output)
        assert cases is not None and int(cases[1]) == int(cases[2]) > 300, "too few to tell"
        await served.must_be_empty()
