"""scripts/device: its table, kinds of rows and collected wheels. tests/e2e/test_device.py rehearses all rows."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT

BENCHMARK = """
import json, sys
targets = [("bandwidth", 0.95, {bandwidth}), ("wrong tensors", 0, {wrong})]
with open(sys.argv[-1] + "/copies.jsonl", "w") as file:
    for name, limit, figure in targets:
        record = dict(case="target", target=name, limit=limit, is_speed=limit > 0)
        if figure is None:
            record |= dict(missing="not measured")
        else:
            record |= dict(figure=figure, met=figure >= limit if limit else figure == 0)
        print(json.dumps(record), file=file)
"""
TESTS = """
import pytest

def test_passes(): ...

@pytest.mark.skipif(True, reason="needs {needed}")
def test_is_skipped(): ...

def test_of_numbers():
    assert 2 == {result}
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("device_script", str(ROOT / "scripts" / "device"))
    module: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    module.ROOT = tmp_path
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return module


def run_of(script: Any, *arguments: object) -> Any:
    return script.Run(script.parse([str(argument) for argument in arguments]))


def table(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "device.json").read_text())["rows"]
    return {row["name"]: row["result"] for row in rows}


def test_rows_that_fail_or_raise_give_status_1_and_the_others_run(script: Any, tmp_path: Path, capsys: Any) -> None:
    def fails(run: Any) -> Any:
        raise ValueError("no such tensor")

    tables = []

    def passes(run: Any) -> Any:
        tables.append(table(tmp_path / "out"))
        return script.Outcome(run.python("-c", "print('computed')").stdout == "computed\n", "12 tokens/s", [12])

    script.ROWS = tuple(script.Row(work.__name__, work, 20) for work in (fails, passes))
    assert script.main(["--rehearse", "--out", str(tmp_path / "out")]) == 1
    assert tables == [{"fails": "FAILED"}]  # written after each row
    assert table(tmp_path / "out") == {"fails": "FAILED", "passes": "passed"}
    output = capsys.readouterr().out
    assert output.count("ValueError: no such tensor") == 2 and output.endswith("\n1 passed, 1 failed\n")
    assert "computed" in (tmp_path / "out" / "device.log").read_text()


def test_rows_after_a_needed_row_that_fails_are_not_run(script: Any, tmp_path: Path) -> None:
    def fails(run: Any) -> Any:
        return script.Outcome(False, "no compiler")

    script.ROWS = (script.Row("build", fails, 20, is_needed=True), script.Row("tests", fails, 20))
    assert script.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert table(tmp_path) == {"build": "FAILED", "tests": "not run"}


def test_only_names_rows_after_the_build(script: Any, tmp_path: Path, capsys: Any) -> None:
    def passes(run: Any) -> Any:
        return script.Outcome(True, "")

    script.ROWS = tuple(script.Row(name, passes, 20, is_needed=name == "build") for name in ("build", "tests", "bench"))
    assert script.main(["--rehearse", "--only", "bench", "--out", str(tmp_path)]) == 0
    assert table(tmp_path) == {"build": "passed", "bench": "passed"}
    with pytest.raises(SystemExit):
        script.main(["--only", "bench,answer"])
    assert "expected rows of tests, bench, got answer" in capsys.readouterr().err


def test_command_ends_at_the_limit_of_its_row(script: Any, tmp_path: Path) -> None:
    run = run_of(script, "--rehearse", "--out", tmp_path)
    run.row_ends = 0.0
    done = run.python("-c", "import time; print('begun', flush=True); time.sleep(60)")
    assert done.returncode == -9
    assert script.last_line(done.stdout) == "ended after 1 s"


def test_row_is_not_begun_without_time(script: Any, tmp_path: Path, capsys: Any) -> None:
    script.ROWS = (script.Row("tests", lambda run: pytest.fail("begun"), 20),)
    assert script.main(["--rehearse", "--minutes", "0.1", "--out", str(tmp_path)]) == script.INCOMPLETE
    assert table(tmp_path) == {"tests": "not run"}
    assert capsys.readouterr().out.endswith("\n0 passed, 0 failed, 1 not run\n")


@pytest.mark.parametrize("kind", ["tests", "benchmark", "memcheck", "raises"])
@pytest.mark.parametrize(("is_end_of_run", "result"), [(True, "not run"), (False, "FAILED")])
def test_row_that_is_cut_is_not_run_if_the_run_ends(
    script: Any, tmp_path: Path, monkeypatch: Any, kind: str, is_end_of_run: bool, result: str
) -> None:
    """A row fails by the limit of the row."""
    write_sanitizer(tmp_path, monkeypatch, "exec sleep 60")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "copies.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "test_it.py").write_text("import time\ntime.sleep(60)")

    def raises(run: Any) -> Any:
        run.python("-c", "import time; time.sleep(60)")
        raise RuntimeError("no answer")

    rows = {"tests": script.tests("test_it.py"), "benchmark": script.benchmark("copies"), "memcheck": script.memcheck}

    def work(run: Any) -> Any:
        run.row_ends = 0.0
        if is_end_of_run:
            run.ends = 0.0
        return rows.get(kind, raises)(run)

    run = run_of(script)
    run.row(script.Row(kind, work, 20))
    assert run.results[0].result == result
    assert run.conclude() == (script.INCOMPLETE if is_end_of_run else script.FAILED)


@pytest.mark.parametrize(
    ("result", "needed", "is_passed", "figure"),
    [
        (2, "two devices", True, "2 passed, 0 failed, 1 skipped"),
        (3, "a device", False, "1 passed, 1 failed, 1 skipped; test_of_numbers; skipped: needs a device"),
    ],
)
def test_row_of_tests_allows_no_skip_but_for_a_second_device(
    script: Any, tmp_path: Path, result: int, needed: str, is_passed: bool, figure: str
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(result=result, needed=needed))
    outcome = script.tests("test_it.py")(run_of(script))
    assert (outcome.is_passed, outcome.figure) == (is_passed, figure)


def test_row_of_tests_that_leave_no_report_fails(script: Any) -> None:
    outcome = script.tests("--no-such-option")(run_of(script))
    assert not outcome.is_passed


@pytest.mark.parametrize(
    ("bandwidth", "wrong", "options", "result"),
    [
        (0.98, 0, (), "passed"),
        (0.5, 0, (), "missed"),
        (0.5, 1, (), "FAILED"),
        (None, 0, (), "missed"),
        (0.98, None, (), "FAILED"),
        (0.5, 0, ("--rehearse",), "passed"),
        (None, 0, ("--rehearse",), "passed"),
        (0.98, 1, ("--rehearse",), "FAILED"),
        (0.98, None, ("--rehearse",), "not measured"),
    ],
)
def test_row_of_a_benchmark_fails_by_wrong_results_not_by_slow_ones(
    script: Any, tmp_path: Path, bandwidth: float | None, wrong: int | None, options: tuple[str, ...], result: str
) -> None:
    for path, text in (
        ("bench/copies.py", BENCHMARK.format(bandwidth=bandwidth, wrong=wrong)),
        ("tests/support/run_on_double.py", "import runpy, sys\nrunpy.run_module(sys.argv[1])"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    run = run_of(script, *options)
    run.row(script.Row("copies", script.benchmark("copies"), 60))
    row = run.results[0]
    assert (row.result, run.conclude()) == (result, int(result == "FAILED"))
    texts = ["not measured" if figure is None else figure for figure in (bandwidth, wrong)]
    assert row.figure == f"bandwidth: {texts[0]} (0.95); wrong tensors: {texts[1]} (0)"
    assert [record.get("figure") for record in row.records] == [bandwidth, wrong]


def test_row_of_a_benchmark_that_raises_has_its_last_line(script: Any, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "copies.py").write_text("raise ValueError('no device')")
    outcome = script.benchmark("copies")(run_of(script))
    assert (outcome.is_passed, outcome.figure) == (False, "ValueError: no device")


def test_row_of_a_benchmark_fails_if_a_case_fails(script: Any, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    failed = 'print(json.dumps(dict(case="failed", impl="kill", reason="no worker")), file=file)'
    headline = 'print(json.dumps(dict(case="streams", headline="3 streams")), file=file)'
    text = BENCHMARK.format(bandwidth=0.98, wrong=0) + f"    {failed}\n    {headline}\n"
    (tmp_path / "bench" / "copies.py").write_text(text)
    outcome = script.benchmark("copies")(run_of(script))
    assert not outcome.is_passed
    assert outcome.figure == "kill: no worker; bandwidth: 0.98 (0.95); wrong tensors: 0 (0); 3 streams"


def write_sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    tool = folder / "compute-sanitizer"
    tool.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("output", "status", "result", "figure"),
    [
        ("ERROR SUMMARY: 0 errors", 0, "passed", "0 errors in a few steps of a tiny model"),
        ("ERROR SUMMARY: 2 errors", 1, "FAILED", "2 errors in a few steps of a tiny model"),
        ("no such device", 1, "not run", "the sanitizer ended with 1: no such device"),
        (None, 0, "not run", "there is no compute-sanitizer"),
    ],
)
def test_memcheck_passes_if_the_sanitizer_counts_no_errors(
    script: Any, tmp_path: Path, monkeypatch: Any, output: str | None, status: int, result: str, figure: str
) -> None:
    script.SANITIZERS = ()
    if output is not None:
        write_sanitizer(tmp_path, monkeypatch, f"echo {output}", f"exit {status}")
    run = run_of(script)
    run.row(script.Row("memcheck", script.memcheck, 60))
    assert (run.results[0].result, run.results[0].figure) == (result, figure)


def test_memcheck_of_a_rehearsal_counts_no_errors(script: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "device.py").write_text("")
    run = run_of(script, "--rehearse", "--out", tmp_path)
    run.row(script.Row("memcheck", script.memcheck, 60))
    assert (run.results[0].result, run.conclude()) == ("not measured", 0)
    assert capsys.readouterr().out.endswith("\n0 passed, 0 failed, 1 not measured\n")


def test_memcheck_that_is_killed_by_its_limit_fails(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    write_sanitizer(tmp_path, monkeypatch, "echo begun", "exec sleep 60")
    run = run_of(script)
    run.row_ends = 0.0
    outcome = script.memcheck(run)
    assert (outcome.is_passed, outcome.figure) == (False, "ended by its limit: ended after 1 s")


# ── wheels ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", nbytes: int = 0) -> None:
    file = name.replace("-", "_")
    information = f"{file}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{file}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{file}_content", bytes(nbytes))
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{information}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that needs packages of names that no index has."""
    text = 'requires = ["pnstk-build>=2"]\ndependencies = ["numpy>=1.26", "pnstk-native>=1,<2"]\n'
    path = tmp_path / "pyproject.toml"
    path.write_text(text + 'cuda = ["torch>=2"]\nengine = [\n    "tokenizers",\n]\ndev = ["pytest>=8", "ruff"]\n')
    return path


def test_packages_that_are_missing_are_installed_from_wheels(script: Any, project: Path, tmp_path: Path) -> None:
    script.WITH_TORCH = ()
    project.write_text(project.read_text().replace("torch>=2", "numpy"))
    outcome = script.install(run_of(script, "--rehearse"))
    assert not outcome.is_passed and outcome.figure.startswith("missing: pnstk-build>=2, pnstk-native>=1,<2: ")
    for name, version in (("pnstk-build", "2.1"), ("pnstk-native", "1.0")):
        write_wheel(tmp_path, name, version)
    outcome = script.install(run_of(script, "--rehearse", "--wheels", tmp_path))
    assert outcome.is_passed, outcome.figure


def test_collect_takes_the_wheels_of_the_other_python(
    script: Any, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    index, folder = tmp_path / "index", tmp_path / "wheels"
    index.mkdir()
    for name, version, tag in (
        ("pnstk-build", "2.1", "py3-none-any"),
        ("pnstk-native", "1.1", "cp312-cp312-manylinux_2_28_x86_64"),
        ("pnstk-native", "1.2", "cp311-cp311-manylinux_2_28_x86_64"),
        ("pnstk-native", "1.3", "cp312-cp312-musllinux_1_2_x86_64"),
        ("pytest", "8.9", "py3-none-any"),
    ):
        write_wheel(index, name, version, tag, nbytes=1000)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert script.main(["--collect", str(folder)]) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert [name.partition("-")[0] for name in names] == ["pnstk_build", "pnstk_native", "pytest"]
    assert "pnstk_native-1.1-cp312-cp312-manylinux_2_28_x86_64.whl" in names
    assert script.main(["--collect", str(folder)]) == 1
    assert "expected an empty folder" in capfd.readouterr().err
    script.MAX_WHEELS_MB = 0.001
    assert script.main(["--collect", str(tmp_path / "other")]) == 1
    assert "expected at most 0.001 MB" in capfd.readouterr().err
