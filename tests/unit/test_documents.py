"""What the documents say is true: blocks, links, names, figures. That their commands run is shown in e2e."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import lowlevel
from penstock.cli import parser
from penstock.cli.argument_parser import ArgumentParser
from penstock.environment import VARIABLES
from penstock.memory import Holder, PoolStats
from penstock.tensor import ScopeStats, StoreStats
from penstock.tools import inspect
from tests.support.documents import EXAMPLES, NEEDS, PAGES, ROOT, RUN, SHOWN, fences, load_making, normalized, sessions

DOCS = ROOT / "docs"
MAKING = DOCS / "making"
COUNTERS = DOCS / "operations" / "counters.md"
VLLM = DOCS / "howto" / "from-vllm.md"

tables = load_making("tables")


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_block_of_the_documents_runs_is_shown_or_names_its_needs() -> None:
    for fence in (fence for page in PAGES for fence in fences(page)):
        assert fence.language in RUN | SHOWN, f"{fence.where}: a block of {fence.language or 'nothing'}"
        assert fence.needs is None or fence.needs in NEEDS, f"{fence.where}: needs {fence.needs}: what is that?"
        assert not fence.text.startswith("# needs"), f"{fence.where}: a marker for tests that readers see"


def test_text_blocks_are_compared_with_what_prints_them() -> None:
    """The session of a page, an example, or a test of the command prints them: `printed by` names the last two."""
    printers = {f"examples/{path.name}" for path in EXAMPLES} | {"penstock trace"}
    compared = {fence.where for session in sessions().values() for fence in session.shown.values()}
    for fence in (fence for page in PAGES for fence in fences(page) if fence.language == "text"):
        assert fence.printed_by in printers or fence.needs or fence.where in compared, f"{fence.where}: by what?"
    assert len(compared) >= 2


def test_normalized_text_keeps_words_and_drops_numbers() -> None:
    line = "stuck: 'core 0.0 #1' (pid 4711) waits since 2.1 s, 3 records (1.5 KiB) behind; `kill -CONT 4711`"
    again = line.replace("4711", "12").replace("2.1 s", "950 ms").replace("3 records (1.5 KiB)", "17 records (88 B)")
    assert normalized(line) == normalized(again)
    for word, other in (("core 0.0 #1", "core 0.1 #1"), ("waits", "waited"), ("#1", "#2")):
        assert normalized(line) != normalized(line.replace(word, other))


def test_every_block_of_python_stands_in_an_example() -> None:
    examples = [path.read_text() for path in EXAMPLES]
    blocks = [fence for page in PAGES for fence in fences(page) if fence.language == "python" and fence.needs is None]
    assert blocks, "looked at nothing"
    for fence in blocks:
        indented = [textwrap.indent(fence.text, " " * depth) for depth in (0, 4, 8)]
        is_there = any(f"\n{text}" in f"\n{example}" for text in indented for example in examples)
        assert is_there, f"{fence.where}: in no file of examples/, which is what is run"


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_of_documents_lead_to_files_of_the_repository() -> None:
    """Pages are read in the repository, too, where no page and no picture is generated."""
    checked = 0
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for target in links(page):
            path, _, anchor = target.partition("#")
            there = (page.parent / path) if path else page
            assert there.exists(), f"{page.relative_to(ROOT)}: {target}"
            if not page.is_relative_to(DOCS):  # the strict build of the site checks the others
                assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
            checked += 1
    assert checked > 50


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def names_in(page: Path) -> set[str]:
    """What stands in code on a page."""
    return set(re.findall(r"`([^`\n]+)`", page.read_text()))


def test_every_metric_is_explained() -> None:
    pytest.importorskip("prometheus_client")
    from penstock import Ring, Store
    from penstock.engine.cluster.status_board import StatusBoard
    from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
    from penstock.server.http.metrics import Metrics
    from penstock.server.http.segment_metrics import SegmentMetrics
    from penstock.server.status.counters import ServerCounters

    board = StatusBoard(StatusBoard.create(1))
    with Store(1 << 20) as store, Ring(bytes) as ring, ring.open_sender():
        segments = SegmentMetrics([ring], store, EngineConfig(simulated=SimulatedDevice()), os.getpid())
        text = Metrics(ServerCounters(ServerCounters.create(1), 1), board, "m", segments).text().decode()
    board.close()
    names = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    assert len(names) > 10 and "<!-- metrics -->" in COUNTERS.read_text()
    rows = [row.strip("| ").split(" | ") for row in run_module("metrics").splitlines()[2:]]
    assert {row[0].strip("`") for row in rows} == names and all(len(row[1]) > 5 for row in rows)


def keys_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set()


def test_names_of_inspect_are_explained() -> None:
    with penstock.Store(1 << 20) as store, penstock.Inbox(senders=2) as inbox:
        held = store.put(np.zeros(100_000, np.uint8), key=bytes(32))
        with inbox.open_sender() as first, inbox.open_sender() as second, inbox.open_receiver():
            first.send(b"x")
            second.send(b"x")
            observed = inspect.look(os.getpid())
        held.release()
    columns = {column for table in inspect.tables_of(observed) for column in table.columns}
    names = keys_of(observed) | columns
    assert len(names) > 60
    assert not names - names_in(COUNTERS), f"to be explained in {COUNTERS.relative_to(ROOT)}"


def test_every_number_that_an_object_counts_is_explained() -> None:
    counted: tuple[type[msgspec.Struct], ...] = (*(ScopeStats, StoreStats, PoolStats, Holder),)
    for kind in counted:
        missing = set(kind.__struct_fields__) - names_in(COUNTERS)
        assert not missing, f"{kind.__name__}: {missing}"


def test_every_name_of_the_package_is_in_the_reference() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    for module in (penstock, lowlevel):
        there = set(re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", pages, re.MULTILINE))
        assert there == set(module.__all__) - {"__version__"}, module.__name__


def leaves(command: ArgumentParser, name: str) -> Iterator[tuple[str, ArgumentParser]]:
    """The commands below one, or itself where there is none."""
    if not command.commands:
        yield name, command
    for inner, (_, own) in command.commands.items():
        yield from leaves(own, f"{name} {inner}")


def test_every_command_and_option_is_on_the_page_that_is_made_of_them() -> None:
    sections = dict(word.split("\n", 1) for word in re.split(r"^## ", run_module("commands"), flags=re.MULTILINE)[1:])
    commands = dict(leaves(parser(), "penstock"))
    assert sections.keys() == commands.keys() and "penstock bench serve" in commands
    for name, command in commands.items():
        for action in command.arguments:
            for option in set(action.option_strings) - {"-h", "--help"}:
                assert re.search(rf"`{option}[ `]", sections[name]), f"{name} {option}"


def test_options_beside_those_of_vllm_are_the_ones_there_are() -> None:
    """The table of `vllm serve` is made of the parser."""
    section = re.split(r"^## Options of `vllm bench serve`$", VLLM.read_text(), flags=re.MULTILINE)[1]
    table, _, alone = section.partition("Only Penstock has:")
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    arguments = dict(leaves(parser(), "penstock"))["penstock bench serve"].arguments
    there = {name for action in arguments for name in action.option_strings if name.startswith("--")}
    assert set(re.findall(r"--[\w-]+", "".join(rows) + alone)) == there - {"--help"}


def test_tables_of_pages_are_made_of_the_declarations() -> None:
    shown = []
    for page in DOCS.rglob("*.md"):
        shown += re.findall(r"<!-- table (\w+) -->", page.read_text())
        assert tables.with_tables(page.read_text()) == page.read_text(), f"{page}: python {MAKING}/tables.py writes it"
    assert sorted(shown) == sorted(tables.TABLES)


# ── environment variables ────────────────────────────────────────────────────────────────────────────────────────────
def test_environment_variables_of_the_code_are_declared() -> None:
    declared = {variable.name for variable in VARIABLES}
    assert len(declared) == len(VARIABLES) > 10
    python = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    native = "".join(path.read_text() for path in (ROOT / "native").glob("**/*.[hc]*") if path.parent.name != "tests")
    names = {*re.findall(r"PENSTOCK_[A-Z_*]+", python), *re.findall(r'getenv\("(\w+)"', native)}
    assert names == declared


def test_environment_variables_are_read_where_they_are_declared() -> None:
    """A name in another module is a name in prose: code reads `Variable.name` or calls `Variable.read`."""
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "environment.py":
            assert not re.findall(r"""["']PENSTOCK_\w+["']""", path.read_text()), path


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_module(module: str) -> str:
    """What one of the programs that write the site writes."""
    done = subprocess.run([sys.executable, MAKING / f"{module}.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_headline_stands_in_the_entry_of_the_ledger_that_it_names() -> None:
    ledger = (ROOT / "bench" / "RESULTS.md").read_text()
    headlines = json.loads((ROOT / "bench" / "headlines.json").read_text())
    entries: dict[str, str] = {}
    for name, source in headlines["sources"].items():
        result = [item for item in re.split(r"^## ", ledger, flags=re.MULTILINE) if item.startswith(source["entry"])]
        assert len(result) == 1, f"{name}: {source['entry']}"
        entries[name] = result[0]
        words = source["command"].split() + source["machine"].split()
        assert not [word for word in words if word.strip("(),") not in result[0]], name
    figures = [
        (row, row[key]) for row in headlines["rows"] for key in ("ours", "theirs", "times", "ratio") if key in row
    ]
    figures += [
        (chart, figure) for chart in headlines["charts"] for _, bars in chart["groups"] for figure in bars.values()
    ]
    assert len(figures) > 100
    for of, figure in figures:
        is_there = re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.])", entries[of["source"]])
        assert is_there, f"{figure} of {of.get('what', of.get('title'))}"


def test_the_table_of_the_readme_is_made_of_the_headlines() -> None:
    assert run_module("charts").strip() in (ROOT / "README.md").read_text(), "python docs/making/charts.py prints it"
