"""Which test modules a stage collects, found by what they import."""

from pathlib import Path

import pytest

from tests.imports import calls_core, imports_torch


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", True),
        ("import torch.nn as nn", True),
        ("from transformers import logging", True),
        ("import pytest\npytest.importorskip('torch', reason='x')", True),
        ("if True:\n    import torch", True),
        ("from penstock.engine.worker.model_loader import load", True),  # which imports it
        ("def test():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("import numpy, penstock", False),
        ("import torches", False),
    ],
)
def test_module_imports_torch_when_it_or_an_imported_module_does(source: str, expected: bool, tmp_path: Path) -> None:
    module = tmp_path / "test_x.py"
    module.write_text(source)
    assert imports_torch(module) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import penstock", True),
        ("from penstock import Pool", True),
        ("def test():\n    import penstock.codec", True),
        ("from penstock.engine.core.request import Request", False),
        ("import penstock\nfrom penstock.server import app", False),
        ("from penstock import _native\nfrom penstock.engine.core.request import Request", True),
        ("from penstock._native import Segment\nfrom penstock.engine import core", True),
        ("import numpy", False),
    ],
)
def test_a_module_calls_the_core_when_it_imports_it_and_nothing_above(
    source: str, expected: bool, tmp_path: Path
) -> None:
    module = tmp_path / "test_x.py"
    module.write_text(source)
    assert calls_core(module) == expected
