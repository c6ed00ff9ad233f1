"""The documents of this repository as tests see them: their fenced blocks, and which of these somebody can run.

A block of Python stands in a file of `examples/`, word for word. The shell blocks of a page are one session, from the
first to the last. What cannot be run by a test says so in its first line: `# needs a model`.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"a GPU", "a model", "a compiler", "the sources of it", "a quiet machine", "a browser", "root"}
RUN, SHOWN = {"python", "bash"}, {"text", "json", "nginx", "toml"}


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> str | None:
        found = re.match(r"# needs ([^:\n]+)", self.text)
        return found[1].strip() if found else None


def fences(page: Path) -> list[Fence]:
    found: list[Fence] = []
    begun, lines = 0, page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if begun:
            text = textwrap.dedent("\n".join(lines[begun : number - 1])) + "\n"
            found.append(Fence(page, begun, lines[begun - 1].strip()[3:].strip(), text))
        begun = 0 if begun else number
    assert not begun, f"{page.name}:{begun}: a block that nobody has ended"
    return found


def sessions() -> dict[Path, str]:
    """For each page with a shell block that can be run: all of them, in order."""
    found = {}
    for page in PAGES:
        blocks = [one.text for one in fences(page) if one.language == "bash" and one.needs is None]
        if blocks:
            found[page] = "\n".join(blocks)
    return found
