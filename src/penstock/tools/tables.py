"""Tables for people, and lines of JSON for programs. Leaves to `format` how a number is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TextIO

from penstock.tools.format import tidy

Row = dict[str, Any]


class Table(NamedTuple):
    """The first column is text, the others are numbers and words about them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def row(bench: str, case: str, impl: str, **figures: Any) -> Row:
    """One line of JSON; parameters first, then figures with their unit in the key."""
    return {"bench": bench, "case": case, "impl": impl, **{key: tidy(value) for key, value in figures.items()}}


def print_rows(rows: Iterable[Row], to: TextIO | None = None) -> None:
    for row in rows:
        print(json.dumps(row), file=to or sys.stdout, flush=True)


def print_tables(tables: Iterable[Table], to: TextIO | None = None) -> None:
    """Raises ImportError where rich is not installed."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    file = to or sys.stdout
    console = Console(file=file, highlight=False, width=None if file.isatty() else 160)
    for table in tables:
        console.print(Text(f"\n{table.title}", style="bold"), soft_wrap=True)
        if table.rows:
            shown = RichTable(box=box.SIMPLE, pad_edge=False)
            for index, column in enumerate(table.columns):
                shown.add_column(column, justify="right" if index else "left")
            for cells in table.rows:
                shown.add_row(*map(Text, cells))  # Text, not strings: a name may look like markup
            console.print(shown)
        for note in table.notes:
            console.print(Text(f"  {note}"), soft_wrap=True)
