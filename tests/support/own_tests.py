"""vLLM's own tests, run in the interpreter that has vLLM with a part replaced, and what known.toml says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import peer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = peer.SOURCE / "integrations" / "vllm" / "known.toml"
TESTS = "PENSTOCK_PEER_TESTS"  # a folder that has vLLM's tests/, where that is not beside the interpreter
LIMIT = 900.0  # seconds for the tests of one part
EACH_LIMIT = 400  # seconds for one test


class Outcome(NamedTuple):
    passed: set[str]
    failed: dict[str, str]  # name: the end of what it said


def parts() -> dict[str, dict[str, Any]]:
    """By part what known.toml says of its tests."""
    return tomllib.loads(KNOWN.read_text())


def tests_of_vllm(python: str) -> Path:
    """The folder that has vLLM's tests/. Skips the test that asks where there is none."""
    folder = Path(os.environ.get(TESTS) or Path(python).parents[1] / "vllm-tests")
    if not (folder / "tests" / "conftest.py").exists():
        pytest.skip(f"there is no {folder}/tests with vLLM's own tests: scripts/vllm-env puts them there, or {TESTS}")
    return folder


def of_version(entry: Mapping[str, Any], tests: Path) -> dict[str, Any]:
    """The entry without the functions that only other versions of vLLM have: `added` names those."""
    text = "".join((tests / name).read_text() for name in entry["files"])
    absent = {name for name in entry.get("added", ()) if f"def {name}(" not in text}
    known = {name: reason for name, reason in entry["known"].items() if name not in absent}
    looks = {
        name: {function: lines for function, lines in functions.items() if function not in absent}
        for name, functions in entry.get("looks", {}).items()
    }
    return {**entry, "known": known, "looks": looks}


def without_lines(text: str, functions: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The source with these lines replaced, by function; the indentation stays. Raises ValueError for one that is not
    there."""
    lines = text.splitlines()
    for name, replacements in functions.items():
        begin, end = _extent(lines, name)
        for line, replacement in replacements:
            places = [number for number in range(begin, end) if lines[number].strip() == line]
            if not places:
                raise ValueError(f"{name} has no line {line!r}")
            for number in places:
                lines[number] = lines[number].replace(line, replacement)
    return "\n".join(lines) + "\n"


def _extent(lines: Sequence[str], function: str) -> tuple[int, int]:
    """The lines of a function; of "*" all."""
    if function == "*":
        return 0, len(lines)
    begin = next((number for number, line in enumerate(lines) if line.startswith(f"def {function}(")), None)
    if begin is None:
        raise ValueError(f"there is no function {function}")
    after = (number for number in range(begin + 1, len(lines)) if re.match(r"[A-Za-z@#]", lines[number]))
    return begin, next(after, len(lines))


def lines_to_replace(entry: Mapping[str, Any], has_looks: bool) -> dict[str, dict[str, Any]]:
    """By file and function the lines that a run replaces."""
    merged: dict[str, dict[str, Any]] = {}
    for files in (entry.get("set", {}), {} if has_looks else entry.get("looks", {})):
        for name, functions in files.items():
            for function, replacements in functions.items():
                merged.setdefault(name, {}).setdefault(function, []).extend(replacements)
    return merged


def copied(folder: Path, tests: Path, changed: Mapping[str, str]) -> Path:
    """A folder with the same tests/ as links, but for the files that are changed."""
    for path in sorted({Path("tests"), *(parent for name in changed for parent in Path(name).parents)} - {Path(".")}):
        (folder / path).mkdir(parents=True, exist_ok=True)
    for path in [path for path in folder.rglob("*") if path.is_dir()]:
        for original in (tests / path.relative_to(folder)).iterdir():
            if not (path / original.name).exists() and str((path / original.name).relative_to(folder)) not in changed:
                (path / original.name).symlink_to(original)
    for name, text in changed.items():
        (folder / name).write_text(text)
    return folder


def run(
    part: str, entry: Mapping[str, Any], tests: Path, site: Path, report: Path, variables: Mapping[str, str]
) -> Outcome:
    """Runs the part's tests in that folder, with the part replaced."""
    command = [peer.python_of_vllm(), "-m", "pytest", "-q", "-p", "penstock.integrations.vllm.rebind"]
    command += ["-p", "no:cacheprovider", f"--timeout={EACH_LIMIT}", f"--junit-xml={report}"]
    command += [*entry.get("options", []), *entry["files"]]
    environment = peer.environment(site, **{"PENSTOCK_VLLM": part, "PENSTOCK_VLLM_STRICT": "1", **variables})
    done = subprocess.run(command, env=environment, cwd=tests, capture_output=True, text=True, timeout=LIMIT)
    if not report.exists():
        raise AssertionError(f"pytest ended with {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    return outcome_of(report)


def outcome_of(report: Path) -> Outcome:
    outcome = Outcome(set(), {})
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            outcome.failed[case.attrib["name"]] = (bad.text or bad.attrib.get("message", ""))[-2000:]
        elif case.find("skipped") is None:
            outcome.passed.add(case.attrib["name"])
    return outcome


def complaints(outcome: Outcome, known: Mapping[str, str]) -> list[str]:
    """What failed and is not named, what is named and passed, and what is named and was not run."""
    sentences = [f"{name} failed: {text}" for name, text in outcome.failed.items() if name not in known]
    sentences += [f"{name} passed, which known.toml names" for name in known if name in outcome.passed]
    missing = known.keys() - outcome.passed - outcome.failed.keys()
    return sentences + [f"{name} was not run, which known.toml names" for name in sorted(missing)]
