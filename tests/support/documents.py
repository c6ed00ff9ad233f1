"""The documents of this repository as tests see them: their fenced blocks, and which blocks are run.

A block of Python stands in a file of `examples/`, word for word. The shell blocks of a page are one session, from the
first to the last; the JSON that follows one is what its command prints. What cannot be run by a test says so in a
comment in the line before the block: `<!-- needs a model -->`. A page with a session, or an example, says what is to be
installed, and nothing else is there when it is run.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import textwrap
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {
    "a GPU",
    "OpenSSL",
    "a model",
    "a compiler",
    "the sources of it",
    "a quiet machine",
    "a browser",
    "root",
    "vLLM",
    "Ray",
}
RUN, SHOWN = {"python", "bash"}, {"text", "json", "nginx", "toml", "yaml"}


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    comment: str = ""  # in the line before the block

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def printed_by(self) -> str | None:
        match = re.fullmatch(r"printed by (.+)", self.comment)
        return match[1] if match else None

    @property
    def needs(self) -> str | None:
        match = re.fullmatch(r"needs ([^:]+?)(?:: .*)?", self.comment)
        return match[1] if match else None


def fences(page: Path) -> list[Fence]:
    blocks: list[Fence] = []
    begun, lines = 0, page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if begun:
            text = textwrap.dedent("\n".join(lines[begun : number - 1])) + "\n"
            comment = re.fullmatch(r"<!-- (.*) -->", lines[begun - 2].strip()) if begun > 1 else None
            language = lines[begun - 1].strip()[3:].strip()
            blocks.append(Fence(page, begun, language, text, comment[1] if comment else ""))
        begun = 0 if begun else number
    assert not begun, f"{page.name}:{begun}: a block without an end"
    return blocks


class Session(NamedTuple):
    """The shell blocks of a page that can be run, in order. Texts that the page shows are written to files."""

    script: str
    shown: dict[str, Fence]  # by the name of the file in which the session leaves what its command prints


def sessions() -> dict[Path, Session]:
    """Returns the session of each page that has one; JSON that is shown is compared within it."""
    sessions_of_pages = {}
    for page in PAGES:
        blocks: list[str] = []
        shown: dict[str, Fence] = {}
        for fence in fences(page):
            if fence.language == "bash" and fence.needs is None:
                blocks.append(fence.text)
            elif fence.language == "json":
                blocks.append(f'test "$({_one_command(blocks, fence)})" = {shlex.quote(fence.text.rstrip())}\n')
            elif fence.language == "text" and not fence.comment:
                name = f"shown-{len(shown)}"
                blocks.append(f"{{ {_one_command(blocks, fence)}; }} >{name}\n")
                shown[name] = fence
        if blocks:
            sessions_of_pages[page] = Session("\n".join(blocks), shown)
    return sessions_of_pages


def _one_command(blocks: list[str], fence: Fence) -> str:
    """Removes the last block, and returns its only line."""
    assert blocks, f"{fence.where}: the output of no command"
    command = blocks.pop().rstrip()
    assert "\n" not in command, f"{fence.where}: the output of one command"
    return command


def normalized(text: str) -> str:
    """Returns the text without what differs from run to run: pids, times, sizes and other numbers.

    A death on a busy machine is reported before what the process held has been counted.
    """
    text = re.sub(r"it held (\d+ blocks? \([^)]*\), given back|what has not been given back yet)", "it held HELD", text)
    text = re.sub(r"(pid|-CONT) \d+", r"\1 N", text.strip())
    text = re.sub(r"\d[\d.,]* (µs|ms|s|min|B|KB|MB|KiB|MiB|GiB)\b", "SIZE", text)
    return re.sub(r"(?<![\w.'#])\d[\d.,]*(?![\w.]| #)", "N", text)  # 'core 0.0 #1' is a name


# ── what is installed ────────────────────────────────────────────────────────────────────────────────────────────────
def stated(document: Path) -> list[str]:
    """What a page or an example says is to be installed, as in `pip install '.[engine]' openai`."""
    match = re.search(r"`pip install (\S+(?: [\w-]+)*)`", document.read_text())
    if match is None:  # an example that says nothing needs nothing
        assert document.suffix == ".py", f"{document.name} has commands, and does not say what they need"
        return ["penstock"]
    return [
        requirement.replace(".", "penstock", 1) if requirement.startswith(".") else requirement
        for requirement in shlex.split(match[1])
    ]


def hidden(requirements: list[str]) -> set[str]:
    """Modules that are installed here, and would not be by these."""
    allowed: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    known: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras)
        if (name, extras) in known:
            continue
        known.add((name, extras))
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or to be had in another way
        allowed.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append(need)
    modules = importlib.metadata.packages_distributions()
    named = {module: {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} for module, owners in modules.items()}
    return {module for module, owners in named.items() if not owners & allowed}


def environment(document: Path) -> dict[str, str]:
    """In which only that can be imported which the document says is installed."""
    paths = [str(ROOT / "tests" / "hiding"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PENSTOCK_HIDDEN": ",".join(sorted(hidden(stated(document))))}


def load_making(name: str) -> ModuleType:
    """Loads a program of docs/making as a module."""
    spec = spec_from_file_location(name, ROOT / "docs" / "making" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
