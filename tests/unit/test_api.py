"""The public names of the data plane: as many as are said, each described, and each with lines that run."""

import ast
import asyncio
import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import lowlevel
from tests.support.documents import EXAMPLES, PAGES, ROOT

pytestmark = pytest.mark.unit

NAMES = {
    *("Ring", "Broadcast", "Inbox", "EndGroup", "attach", "Ticket"),
    *("Sender", "Receiver", "AsyncSender", "AsyncReceiver"),
    *("Store", "Scope", "Lease", "Loan", "Handle", "Empty", "content_key"),
    *("Buffer", "DeathCause", "LongRecords", "MemoryOptions"),
}
ERRORS = {
    *("PenstockError", "PeerDied", "ClosedError", "EndOfChannel", "Timeout", "WouldBlock"),
    *"Missing DecodeError MemoryExhausted ChannelError CorruptRecord LayoutMismatch UnsupportedTensor".split(),
}
MAX_LOWLEVEL = 2  # names of it that the engine, the examples and the pages need

GLOBALS = {
    **{name: getattr(penstock, name) for name in penstock.__all__},
    **{name: getattr(lowlevel, name) for name in lowlevel.__all__},
    "asyncio": asyncio,
    "contextlib": __import__("contextlib"),
    "msgspec": msgspec,
    "np": np,
    "os": __import__("os"),
}


def test_the_package_has_21_names_and_13_errors() -> None:
    assert set(penstock.__all__) == NAMES | ERRORS | {"__version__"}
    assert len(NAMES) == 21 and len(ERRORS) == 13
    for name in ERRORS:
        assert issubclass(getattr(penstock, name), penstock.PenstockError)


def names_from_lowlevel(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "penstock.lowlevel":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            whole = ast.unparse(node.value)
            if whole in ("lowlevel", "penstock.lowlevel"):
                names.add(node.attr)
    return names


def test_engine_examples_and_pages_need_few_names_of_lowlevel() -> None:
    folders = [ROOT / "src" / "penstock" / name for name in ("engine", "server", "cli", "tools")]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    sources += [path.read_text() for path in EXAMPLES]
    for page in PAGES:
        sources += re.findall(r"^```python\n(?!# needs)(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    needed = set().union(*map(names_from_lowlevel, sources))
    assert needed, "looked at nothing"
    assert needed <= set(lowlevel.__all__) and len(needed) <= MAX_LOWLEVEL, needed


@pytest.mark.parametrize("name", lowlevel.__all__)
def test_a_name_of_lowlevel_is_described_and_its_lines_run(name: str) -> None:
    must_run(name, inspect.getdoc(getattr(lowlevel, name)) or "")


def must_run(name: str, text: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, dict(GLOBALS), name, None, None)
    assert test.examples, f"{name} has no lines to run"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failures: list[str] = []
    runner.run(test, out=failures.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(failures)


def public_members(name: str) -> Iterator[tuple[str, Any]]:
    """The object of a public name, and its public methods and properties."""
    result = getattr(penstock, name)
    yield name, result
    if inspect.isclass(result) and name not in ERRORS:
        for key in dir(result):
            if not key.startswith("_") and callable(getattr(result, key)):
                yield f"{name}.{key}", getattr(result, key)


MEMBERS = [member for name in sorted(NAMES | ERRORS) for member in public_members(name)]
# What says all in a line, and is shown where the name that it belongs to is.
SHORT = {"close", "peers", "trim", "snapshot", "hold", "of_message"}


@pytest.mark.parametrize(("name", "value"), MEMBERS, ids=[name for name, _ in MEMBERS])
def test_a_public_name_is_described_and_its_lines_run(name: str, value: Any) -> None:
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    is_async = name.startswith("Async") and "." in name  # shown by its class, and by the method that does not wait
    if "Args:" not in text and "Args and Raises are those of" not in text:
        assert not parameters_of(value), f"{name} has no Args"
    if ">>>" in text or (name.rpartition(".")[2] not in SHORT and not is_async):
        must_run(name, text)


def parameters_of(function: Any) -> list[str]:
    """Those of a method besides itself. None for a class, which says them where it is made, and for native code."""
    if inspect.isclass(function):
        return []
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in parameters if name != "self"]


@pytest.mark.parametrize("library", [penstock, lowlevel], ids=lambda library: library.__name__)
def test_instances_of_a_public_class_have_a_repr(library: Any) -> None:
    classes = [cls for name in library.__all__ if inspect.isclass(cls := getattr(library, name))]
    assert [cls for cls in classes if cls.__repr__ is object.__repr__] == []
