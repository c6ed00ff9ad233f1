"""scripts/prose, which measures the prose of each folder and the lines of each file."""

import importlib.util
import os
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT

PYTHON = '''"""Nobody reads this module."""

from hypothesis import given

nobody = "whoever asks"  # whose block it is


class Request:
    """A request, and who sent it."""

    def text(self, one: str) -> str:
        """Somebody's text, which that process asked for."""
        found = given(one)
        return """everybody found it"""
'''
NATIVE = """// whose turn it is
const char* url = "http://whom";  /* everybody
    waits */
char nobody = '"';  // who"
auto found = told.kept;
"""
PAGE = """Whoever waits, and whom it waits for; `who` is code.

    indented who

```bash
nobody  # who
```
"""
SHELL = """#!/usr/bin/env bash
# For whoever reads this.
echo "${1#who}" # who it was
"""
TEST = f"def test_{'x' * 65}(): ...\n\n\ndef test_{'x' * 66}(): ...\n"


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("prose", str(ROOT / "scripts" / "prose"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("prose", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "people", "anaphora"),
    [
        ("request.py", PYTHON, ["nobody", "who", "whose", "somebody"], ["this", "it", "it", "that", "which"]),
        ("request.h", NATIVE, ["whose", "everybody", "who"], ["it"]),
        ("page.md", PAGE, ["whoever", "whom", "who"], ["it"]),
        ("script", SHELL, ["whoever", "who"], ["this", "it"]),
    ],
)
def test_words_are_counted_in_prose_and_not_in_code(
    prose: Any, tmp_path: Path, name: str, text: str, people: list[str], anaphora: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    words = "\n".join(prose.prose(path)).lower()
    assert sorted(prose.PEOPLE.findall(words)) == sorted(people)
    assert sorted(prose.ANAPHORA.findall(words)) == sorted(anaphora)


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("request.py", PYTHON, ["found", "one", "one"]),
        ("request.h", NATIVE, ["found", "kept", "told"]),
        ("page.md", PAGE, []),
    ],
)
def test_names_are_counted_unless_they_are_imported(
    prose: Any, tmp_path: Path, name: str, text: str, names: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert sorted(set(prose.NAMES) & set(prose.identifiers(path))) == sorted(set(names))
    assert prose.measure([path]).figures.names == len(names)


def test_test_names_of_over_70_characters_are_counted(prose: Any, tmp_path: Path) -> None:
    path = tmp_path / "test_request.py"
    path.write_text(TEST)
    assert prose.measure([path]).figures.long == 1


def test_native_tests_have_no_prose(prose: Any, tmp_path: Path) -> None:
    path = tmp_path / "tests" / "request.cpp"
    path.parent.mkdir()
    path.write_text(NATIVE)
    assert not list(prose.prose(path))


def test_every_source_is_in_one_folder(prose: Any) -> None:
    files = [path for paths in prose.folders().values() for path in paths]
    assert len(files) == len(set(files))
    sources = [path for top in ("src", "tests", "bench", "examples") for path in (ROOT / top).rglob("*.py")]
    assert set(sources) | set((ROOT / "native").rglob("*.h")) <= set(files)


def test_folder_over_its_limit_is_an_error(prose: Any) -> None:
    reached = {folder: prose.limit(folder) for folder in prose.folders()}
    assert not prose.too_many(reached)
    for folder, figures in reached.items():
        for column in figures._fields:
            higher = figures._replace(**{column: getattr(figures, column) + 1})
            (complaint,) = prose.too_many({**reached, folder: higher})
            assert complaint.startswith(f"{folder}: {column} ")
    for folder in prose.LIMITS:
        assert len(prose.too_many({**reached, folder: prose.TARGET})) == 1, "the entry can go"
    assert len(prose.too_many({})) == len(prose.LIMITS)


@pytest.mark.parametrize("option", ["--help", "--size"])
def test_prose_ends_quietly_when_its_output_is_closed(option: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, ROOT / "scripts" / "prose", option]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize(("option", "line"), [("--help", "usage: "), ("--size", "src ")])
def test_prose_has_help_and_sizes(option: str, line: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "prose", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(line)


def test_file_over_its_length_is_an_error(prose: Any) -> None:
    named = {path: lines for path, (lines, _) in prose.LONGER.items()}
    assert not prose.too_long(named)
    for path, lines in named.items():
        assert len(prose.too_long({**named, path: lines + 1})) == 1
        assert len(prose.too_long({**named, path: prose.MAX_LINES[Path(path).suffix]})) == 1, "the name can go"
    for suffix, lines in prose.MAX_LINES.items():
        assert len(prose.too_long({**named, f"src/penstock/x{suffix}": lines + 1})) == 1
        assert not prose.too_long({**named, f"src/penstock/x{suffix}": lines})
    assert len(prose.too_long({})) == len(named), "a named file that is not there"
