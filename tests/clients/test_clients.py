"""Clients of others, each a script in the environment of requirements.txt, or of package.json, at a server.

The model is random.
"""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

for library in ("openai", "httptools", "torch", "llguidance"):
    pytest.importorskip(library)

from tests.e2e.test_server import KEY, run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.tiny_models import LLAMA, write_llama  # noqa: E402

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("PENSTOCK_CLIENTS_PYTHON", "")
NODE = Path(os.environ.get("PENSTOCK_CLIENTS_NODE", "/nowhere"))  # a folder with packages of JavaScript
MODULES = {
    "dspy": "dspy",
    "llama_index": "llama_index.llms.openai_like",
    "openai": "openai",
    "anthropic": "anthropic",
    "agents": "agents",
    "langchain": "langchain_openai",
    "instructor": "instructor",
    "litellm": "litellm",
    "pydantic_ai": "pydantic_ai",
    "smolagents": "smolagents",
}
LIMITS = {"max_open_requests": 64, "max_body_nbytes": 1 << 20, "client_timeout": 20.0}
WITHOUT_TRACES = {"LANGSMITH_TRACING": "false", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


pytestmark = pytest.mark.timeout(300)
needs_clients = pytest.mark.skipif(
    not PYTHON, reason="PENSTOCK_CLIENTS_PYTHON names no interpreter: scripts/test clients makes it"
)


def is_installed(module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module.partition('.')[0]!r}) is None)"
    return subprocess.run([PYTHON, "-c", look], check=False).returncode == 0


@needs_clients
@pytest.mark.parametrize("name", MODULES)
@in_a_loop
async def test_client_gets_each_kind_of_answer(name: str, tmp_path: Path) -> None:
    await run_python(f"with_{name}.py", MODULES[name], tmp_path)


@needs_clients
@pytest.mark.parametrize("name", ["openai", "langchain", "llama_index"])
@in_a_loop
async def test_client_gets_embeddings(name: str, tmp_path: Path) -> None:
    await run_python(f"with_{name}_embeddings.py", MODULES[name], tmp_path, runner="pooling", store_nbytes=1 << 22)


@pytest.mark.skipif(
    not NODE.exists() or shutil.which("node") is None,
    reason="PENSTOCK_CLIENTS_NODE names no packages, or there is no node: scripts/test clients installs them",
)
@pytest.mark.parametrize("name", ["openai_js", "ai_sdk"])
@in_a_loop
async def test_javascript_client_gets_each_kind_of_answer(name: str, tmp_path: Path) -> None:
    for script in FOLDER.glob("*.mjs"):
        shutil.copy(script, tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")  # node looks for packages beside a script
    await run_script(["node", str(tmp_path / f"with_{name}.mjs")], tmp_path)


async def run_python(name: str, module: str, folder: Path, **options: Any) -> None:
    if not is_installed(module):
        pytest.skip(f"the client {module} is not installed")
    await run_script([PYTHON, str(FOLDER / name)], folder, **options)


async def run_script(command: list[str], folder: Path, **options: Any) -> None:
    """Runs a script at a server with a random model, which is written into `folder`."""
    model = write_llama(folder)
    sizes = {"simulated": None, "api_server_count": 1, "max_num_seqs": 16, **options}
    async with run_server(LIMITS, model=str(model), **sizes) as served:
        url = {"OPENAI_BASE_URL": f"http://127.0.0.1:{served.port}/v1", "OPENAI_API_KEY": KEY}
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **WITHOUT_TRACES, **url, "PENSTOCK_CLIENT_MODEL": LLAMA},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), 240)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        print(output.decode())
        assert process.returncode == 0, command
