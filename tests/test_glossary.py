"""Annotated parameters and attributes of src have the names of CONTRIBUTING's glossary."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
# "Class name" of parameters and attributes that still have another name. Remove each with its last use.
EXCEPTIONS = {
    "BatchState now",
    "FinishReason why",
    "Handle grammar",
    "Handle item",
    "HttpExchange _incoming",
    "KVCache memory",
    "Lease secret",
    "LinkSpec awaited",
    "Logprobs whole",
    "OutputStream streams",
    "Ref where",
    "Segment blame",
    "Segment board",
    "Segment page",
    "Segment server_info",
    "Segment tally",
    "Segment verdicts",
    "ServerCounters tally",
    "ServerInfo _info",
    "Store encodings",
    "Store keeper",
    "Submit first",
    "VideoPlan planned",
}


def glossary() -> dict[str, str]:
    """Returns the variable of each class."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| \S", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a class with two rows"
    return dict(rows)


def class_of(annotation: ast.expr) -> str | None:
    """Returns the class of `Class`, `module.Class`, `Class[…]`, `Class | None`, or of one of these as a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = [side for side in (annotation.left, annotation.right) if ast.unparse(side) != "None"]
        return class_of(sides[0]) if len(sides) == 1 else None
    if isinstance(annotation, ast.Subscript):
        return class_of(annotation.value)
    if isinstance(annotation, ast.Attribute):
        return annotation.attr
    return annotation.id if isinstance(annotation, ast.Name) else None


def annotated(source: str) -> Iterator[tuple[str, str]]:
    """Yields class and name of each annotated parameter and attribute."""
    for node in ast.walk(ast.parse(source)):
        name, annotation = None, None
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            target = node.target
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
            annotation = node.annotation
        if name is not None and annotation is not None and (kind := class_of(annotation)) is not None:
            yield kind, name


def misnamed(source: str, variables: dict[str, str]) -> set[str]:
    """Returns "Class name" of each name that is neither the class's variable nor ends in `_variable`."""
    return {
        f"{kind} {name}"
        for kind, name in annotated(source)
        if kind in variables and not f"_{name}".endswith(f"_{variables[kind]}")
    }


def test_annotated_names_of_src_are_those_of_the_glossary() -> None:
    variables = glossary()
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        names |= misnamed(path.read_text(), variables)
    assert sorted(names - EXCEPTIONS) == [], "use the variable of the glossary"
    assert sorted(EXCEPTIONS - names) == [], "renamed: remove the exception"


def test_classes_of_the_glossary_exist() -> None:
    sources = [path.read_text() for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]]
    classes = {name for source in sources for name in re.findall(r"^class (\w+)\b", source, re.MULTILINE)}
    assert len(glossary()) >= 30
    assert not glossary().keys() - classes


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(batch: BatchState): ...", set()),
        ("def f(last_batch: 'BatchState | None' = None): ...", set()),
        ("class C:\n    _batch: protocol.BatchState", set()),
        ("def f(now: BatchState): ...", {"BatchState now"}),
        ("def f(*, now: None | BatchState): ...", {"BatchState now"}),
        ("self._now: BatchState = begin()", {"BatchState _now"}),
        ("def f(rebatch: BatchState): ...", {"BatchState rebatch"}),
        ("def f(batches: list[BatchState], other: BatchState | Step): ...", set()),
    ],
)
def test_misnamed_parameters_and_attributes_are_found(source: str, expected: set[str]) -> None:
    assert misnamed(source, {"BatchState": "batch"}) == expected
