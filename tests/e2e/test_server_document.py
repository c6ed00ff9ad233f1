"""The server against its own OpenAPI document: schemathesis asks what the document allows and what it does not."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("schemathesis")
pytest.importorskip("openai")

from tests.e2e.test_server import KEY, served
from tests.engine import told

IS_FULL = os.environ.get("PENSTOCK_FULL") == "1"
EXAMPLES, SECONDS = (1000, 600) if IS_FULL else (15, 20)
# What a document cannot say is refused too: a prompt that is too long, another model's name.
BEYOND_THE_DOCUMENT = "positive_data_acceptance"


@pytest.mark.timeout(SECONDS + 80)
def test_what_the_server_answers_is_what_its_document_says(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(simulated=told(step_seconds=0.0), max_model_len=48) as tree:
            process = await asyncio.create_subprocess_exec(
                *(str(Path(sys.executable).with_name("schemathesis")), "run"),
                *(f"http://127.0.0.1:{tree.port}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
                *("--phases", "coverage,fuzzing", "--exclude-checks", BEYOND_THE_DOCUMENT, "--seed", str(seed)),
                *("--max-examples", str(EXAMPLES), "--max-time", str(SECONDS), "--request-timeout", "20"),
                *("--workers", "2", "--output-truncate", "true", "--warnings", "off"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=tmp_path,  # where it leaves what it knows
            )
            assert process.stdout is not None
            said = (await process.stdout.read()).decode(errors="replace")
            await process.wait()
            print(said)
            assert process.returncode == 0, said
            for phase in ("Coverage", "Fuzzing") if IS_FULL else ("Coverage",):  # a busy machine may come to one alone
                assert f"✅  {phase}" in said, f"{phase} did not run"
            cases = re.search(r"(\d+) generated, (\d+) passed", said)
            assert cases is not None and int(cases[1]) == int(cases[2]) > 100, "too few to tell"
            await tree.must_be_empty()

    asyncio.run(scene())
