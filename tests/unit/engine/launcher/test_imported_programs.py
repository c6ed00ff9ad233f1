"""What the fork server imports: a fork that imports later would read files that may be of another version."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")

ENGINE = Path(penstock.__file__).parent / "engine"
FOLDERS = ("cluster", "core", "output", "protocol", "worker")  # not worker/cuda: nothing is forked there
PROGRAM = """
import json, sys
from penstock.engine.launcher.launcher import import_programs
from penstock.engine.protocol.config import SHIPPED, EngineConfig

import_programs(EngineConfig(model=str(SHIPPED)))
print(json.dumps([name for name in sys.modules if name.startswith("penstock")]))
"""


def late_imports(path: Path) -> Iterator[str]:
    """Yields the modules of Penstock that functions of a file import."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                    yield node.module or ""
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_fork_server_has_imported_what_functions_of_forks_import() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, timeout=300).stdout
    imported = json.loads(output)
    late = {name for folder in FOLDERS for path in (ENGINE / folder).glob("*.py") for name in late_imports(path)}
    modules = {name for name in late if (ENGINE.parent.parent / name.replace(".", "/")).with_suffix(".py").exists()}
    modules = {name for name in modules if "cuda" not in name.split(".")}
    assert "penstock.engine.worker.model_runner" in modules
    assert modules <= set(imported), modules - set(imported)
