"""scripts/prose, which counts words for people in comments, docstrings and documents, and the lines of each file."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT

PYTHON = '''"""Nobody reads this module."""

nobody = "whoever asks"  # whose block it is


class Request:
    """A request, and who sent it."""

    def text(self) -> str:
        """Somebody's text."""
        return """everybody"""
'''
NATIVE = """// whose turn it is
const char* url = "http://whom";  /* everybody
    waits */
char nobody = '"';  // who"
"""
PAGE = """Whoever waits, and whom it waits for; `who` is code.

    indented who

```bash
nobody  # who
```
"""


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("prose", str(ROOT / "scripts" / "prose"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("prose", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("request.py", PYTHON, ["nobody", "who", "whose", "somebody"]),
        ("request.h", NATIVE, ["whose", "everybody", "who"]),
        ("page.md", PAGE, ["whoever", "whom", "who"]),
    ],
)
def test_words_are_counted_in_prose_and_not_in_code(
    prose: Any, tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = prose.FOR_PEOPLE.findall("\n".join(prose.prose(path)))
    assert sorted(word.lower() for word in found) == sorted(words)


def test_native_tests_have_no_prose(prose: Any, tmp_path: Path) -> None:
    path = tmp_path / "tests" / "request.cpp"
    path.parent.mkdir()
    path.write_text(NATIVE)
    assert not list(prose.prose(path))


def test_every_file_of_the_source_is_in_one_room(prose: Any) -> None:
    files = [path for paths in prose.rooms().values() for path in paths]
    assert len(files) == len(set(files))
    assert set((ROOT / "src").rglob("*.py")) | set((ROOT / "native").rglob("*.h")) <= set(files)


def test_a_room_over_its_limit_is_found(prose: Any) -> None:
    assert not prose.too_many(prose.LIMITS)
    for room, limit in prose.LIMITS.items():
        assert room in prose.too_many({**prose.LIMITS, room: limit + 0.1})[0]
    assert len(prose.too_many({**prose.LIMITS, "elsewhere": 0.0})) == 1
    assert len(prose.too_many({})) == len(prose.LIMITS)


def test_a_file_over_its_length_is_found(prose: Any) -> None:
    named = {path: lines for path, (lines, _) in prose.LONGER.items()}
    assert not prose.too_long(named)
    for path, lines in named.items():
        assert len(prose.too_long({**named, path: lines + 1})) == 1
        assert len(prose.too_long({**named, path: prose.MAX_LINES[Path(path).suffix]})) == 1, "the name can go"
    for suffix, lines in prose.MAX_LINES.items():
        assert len(prose.too_long({**named, f"src/penstock/x{suffix}": lines + 1})) == 1
        assert not prose.too_long({**named, f"src/penstock/x{suffix}": lines})
    assert len(prose.too_long({})) == len(named), "a named file that is not there"
