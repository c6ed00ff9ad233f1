"""What a worker does not import with transformers: each second of it is a second of every start."""

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from penstock.engine.protocol.config import SHIPPED
from penstock.engine.worker import stock
from tests import tiers

# Stands for torchvision: a package of this name, and modules of any content.
TORCHVISION = """
    import sys
    import torch._dynamo.utils
    from unittest.mock import MagicMock
    names = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    sys.modules |= {f"torchvision.{name}": MagicMock() for name in names}
"""
LOADS = """
    import sys
    from penstock.engine.worker.model_runner import ModelRunner
    ModelRunner({model!r}, slots=1, blocks=1)
    print(*{{"sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"}} & set(sys.modules))
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "transformers" and getattr(module, "__file__", None):
            print(module.__file__)
    import torch
    print(torch.distributed.is_available(), torch.compile(lambda row: row + 1, backend="eager")(torch.ones(1)).item())
"""


@pytest.fixture(scope="module")
def loading() -> list[str]:
    """The output of a process that loads a model."""
    program = textwrap.dedent(LOADS).format(model=str(SHIPPED))
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return output.stdout.splitlines()


@tiers.needs_all  # the process imports torch; without this the other tests hold, but the start is longer
def test_worker_that_has_loaded_a_model_has_imported_no_compiler(loading: list[str]) -> None:
    assert (loading[0], loading[-1]) == ("", "True 2.0")


@tiers.needs_all
def test_each_package_that_transformers_may_import_is_hidden(loading: list[str]) -> None:
    needed = {"PIL", "jinja2", "psutil", "tokenizers", "torch", "transformers", *sys.stdlib_module_names}
    optional = {name for module in loading[1:-1] for name in optional_packages(Path(module))}
    assert "torchvision" in optional
    assert optional - needed <= set(stock.HIDDEN)


def optional_packages(module: Path) -> Iterator[str]:
    """Yields the packages that a module of transformers imports at once if they are available."""
    for branch in ast.parse(module.read_text()).body:
        if isinstance(branch, ast.If) and "_available" in ast.unparse(branch.test):
            for node in branch.body:
                if isinstance(node, ast.Import):
                    yield from (alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    yield node.module.partition(".")[0]


def test_packages_are_hidden_meanwhile_and_found_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("torchvision", "accelerate"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stock, "IS_FIRST", True)
    with stock.without_compiler():
        assert importlib.util.find_spec("torchvision") is importlib.util.find_spec("accelerate") is None
    assert importlib.util.find_spec("torchvision") and importlib.util.find_spec("accelerate")


@tiers.needs_all  # each process imports torch
@pytest.mark.parametrize("program", ["", "import transformers", "import torchvision"])
def test_torchvision_does_not_keep_a_worker_from_its_start(program: str, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text(textwrap.dedent(TORCHVISION))
    program += "\nfrom penstock.engine.worker.model_runner import ModelRunner"
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120, check=True
    )
