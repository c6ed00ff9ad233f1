"""Each sampling parameter that a request may have is read by a process of the engine."""

import ast
from pathlib import Path

import pytest

import penstock
from penstock.engine.protocol.config import SamplingDefaults
from penstock.engine.protocol.sampling_params import SamplingParams

SOURCE = Path(penstock.__file__).parent
READERS = ("engine/core", "engine/worker", "engine/output", "engine/client")


def fields_read(source: str) -> set[str]:
    """Returns the attributes that are loaded of a variable or attribute called `params`."""
    fields = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "params":
                fields.add(node.attr)
    return fields


READ = set().union(*(fields_read(path.read_text()) for folder in READERS for path in (SOURCE / folder).glob("*.py")))


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_sampling_parameter_is_read_by_core_worker_output_or_client(field: str) -> None:
    assert field in READ, f"{field} is accepted, and has no effect: CONTRIBUTING, 'A sampling parameter'"


def test_a_field_that_is_only_declared_counts_as_unread() -> None:
    assert fields_read("class A:\n    x: int\nparams.y = 1\nself.params.z + params.w + other.v") == {"z", "w"}


def test_defaults_of_a_model_are_sampling_parameters() -> None:
    assert set(SamplingDefaults.__struct_fields__) <= set(SamplingParams.__struct_fields__)
