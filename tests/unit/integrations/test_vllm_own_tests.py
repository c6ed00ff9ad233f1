"""What known.toml says, and the run that compares it with what came of vLLM's own tests."""

from pathlib import Path

import pytest

from penstock.integrations.vllm import MODULES
from tests.support.own_tests import (
    Outcome,
    complaints,
    copied,
    lines_to_replace,
    of_version,
    outcome_of,
    parts,
    without_lines,
)

SOURCE = """\
def helper():
    assert looks == 1

@mark
def test_queue():
    if ready:
        assert looks == 1
    assert result

class Other: ...
assert looks == 1
"""


def test_known_names_tests_and_lines_with_a_reason_for_each() -> None:
    assert parts().keys() <= MODULES.keys()
    for entry in parts().values():
        assert entry["files"]
        assert all(reason for reason in entry["known"].values())
        assert set(entry.get("added", ())) <= entry["known"].keys()
        assert set(entry.get("looks", {})) | set(entry.get("set", {})) <= set(entry["files"])


def test_lines_are_replaced_within_their_function_only() -> None:
    text = without_lines(SOURCE, {"test_queue": [("assert looks == 1", "pass")]})
    assert text == SOURCE.replace("        assert looks == 1", "        pass")
    assert without_lines(SOURCE, {"*": [("assert looks == 1", "pass")]}).count("pass") == 3


@pytest.mark.parametrize("functions", [{"test_queue": [("assert looks == 2", "")]}, {"test_other": []}])
def test_a_line_or_function_that_is_not_there_is_an_error(functions: dict[str, list[tuple[str, str]]]) -> None:
    with pytest.raises(ValueError, match=r"has no line|there is no function"):
        without_lines(SOURCE, functions)


def test_lines_for_looks_are_added_to_lines_that_are_always_set() -> None:
    entry = {"set": {"a.py": {"*": [["m", "n"]]}}, "looks": {"a.py": {"f": [["x", "pass"]]}}}
    assert lines_to_replace(entry, has_looks=True) == {"a.py": {"*": [["m", "n"]]}}
    assert lines_to_replace(entry, has_looks=False) == {"a.py": {"*": [["m", "n"]], "f": [["x", "pass"]]}}


def test_a_test_that_a_version_lacks_is_not_known_there(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def test_old(): ...")
    lines = {"test_old": [["x", "y"]], "test_new": [["x", "y"]], "test_gone": [["x", "y"]]}
    entry = {"files": ["a.py"], "added": ["test_new"], "known": dict.fromkeys(lines, "why"), "looks": {"a.py": lines}}
    ours = of_version(entry, tmp_path)
    assert ours["known"].keys() == ours["looks"]["a.py"].keys() == {"test_old", "test_gone"}
    (tmp_path / "a.py").write_text("def test_new(): ...")
    assert of_version(entry, tmp_path) == entry


def test_a_run_is_complained_of_where_it_differs_from_what_is_known() -> None:
    outcome = Outcome({"passed", "passed but known"}, {"known": "", "new": "why"})
    assert complaints(outcome, {"known": "", "passed but known": "", "gone": ""}) == [
        "new failed: why",
        "passed but known passed, which known.toml names",
        "gone was not run, which known.toml names",
    ]


def test_an_outcome_is_read_from_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure>text</failure></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error message="lost"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcome_of(report) == Outcome({"a"}, {"b": "text", "d": "lost"})


def test_a_copy_of_the_tests_has_links_but_for_what_is_changed(tmp_path: Path) -> None:
    (tmp_path / "tests" / "queues").mkdir(parents=True)
    for name in ("conftest.py", "queues/test_a.py", "queues/test_b.py"):
        (tmp_path / "tests" / name).write_text("as it was")
    copy = copied(tmp_path / "copy", tmp_path, {"tests/queues/test_a.py": "changed"})
    assert (copy / "tests/queues/test_a.py").read_text() == "changed"
    assert (copy / "tests/queues/test_b.py").is_symlink()
    assert (copy / "tests/conftest.py").read_text() == "as it was"
    assert (tmp_path / "tests/queues/test_a.py").read_text() == "as it was"
