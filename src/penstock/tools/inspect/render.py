"""Prints what `penstock inspect` found: with rich if that is installed, as plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from penstock.tools.format import counted, in_units
from penstock.tools.inspect.segments import Json
from penstock.tools.inspect.tables import processes_with_segments, tables_of
from penstock.tools.tables import Table

MAX_IDLE = 8  # names in the line about idle processes; the table has all
MAX_FRAMES = 16  # of a stack; --json has all


def headline(snapshot: Json) -> str:
    bad = [entry for entry in snapshot["verdict"] if entry["level"] in ("deadlock", "stuck")]
    num_segments = sum(entry["asked"] for entry in snapshot["segments"])
    if bad:
        return "a process is stuck:"
    if any(entry["level"] == "warning" for entry in snapshot["verdict"]):
        return "a process may be stuck:"
    num_processes = len(processes_with_segments(snapshot))
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return f"no process is stuck: {counted(num_segments, 'segment')}, {processes}"


def sentences(snapshot: Json) -> list[str]:
    """Returns the lines of the verdict. All idle processes are one line: no process is to blame for a lack of work."""
    others = [entry for entry in snapshot["verdict"] if entry["level"] != "idle"]
    lines = [f"{entry['level']:>8}: {entry['text']}" for entry in others]
    waiting = {pid for entry in snapshot["verdict"] if entry["level"] == "idle" for pid in entry["pids"]}
    names = [known_as(process) for process in snapshot["processes"] if process["pid"] in waiting]
    if names:
        more = f" and {len(names) - MAX_IDLE} more" if len(names) > MAX_IDLE else ""
        verb = "waits" if len(names) == 1 else "wait"
        lines.append(f"{'idle':>8}: {', '.join(names[:MAX_IDLE])}{more} {verb} for work")
    return lines


def lines_of_stacks(snapshot: Json) -> Iterator[str]:
    """Yields the stacks that `add_stacks` has read, the innermost call first."""
    for stack in snapshot.get("stacks", ()):
        title = f"'{stack['name']}' (pid {stack['pid']})"
        if stack["reason"]:
            yield f"no stack of {title}: {stack['reason']}"
            continue
        collective = f", in the collective {stack['collective']}" if stack["collective"] else ""
        yield f"stack of {title}{collective}:"
        yield from (f"    {frame}" for frame in stack["frames"][:MAX_FRAMES])
        if len(stack["frames"]) > MAX_FRAMES:
            yield f"    and {len(stack['frames']) - MAX_FRAMES} more"


def memory_line(snapshot: Json) -> str:
    return "memory: " + ", ".join(
        f"{in_units(nbytes)} of {kind}" for kind, nbytes in sorted(snapshot["memory"].items())
    )


def known_as(process: Json) -> str:
    return f"'{process['peers'][0]}'" if process["peers"] else f"pid {process['pid']}"


def show(snapshot: Json) -> None:
    """Prints verdict and tables."""
    lines = [headline(snapshot), *sentences(snapshot), memory_line(snapshot)]
    lines += [f"unreadable: {text}" for text in snapshot["unreadable"]]
    lines += lines_of_stacks(snapshot)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print("\n".join(lines))
        for table in tables_of(snapshot):
            print("\n" + plain(table))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    styles = {"deadlock": "bold red", "stuck": "bold red", "warning": "yellow", "idle": "dim"}
    for line in lines:
        # Text, not a string: a name may look like markup
        console.print(Text(line, style=styles.get(line.partition(":")[0].strip(), "")), soft_wrap=True)
    for table in tables_of(snapshot):
        if table.title:
            console.print(Text("\n" + table.title, style="bold"), soft_wrap=True)
        if not table.rows:
            continue
        shown = RichTable(box=box.SIMPLE, pad_edge=False)
        for column in table.columns:
            shown.add_column(column)
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)


def plain(table: Table) -> str:
    if not table.rows:
        return table.title
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*([table.title] if table.title else []), *(f"  {line}" for line in lines)])
