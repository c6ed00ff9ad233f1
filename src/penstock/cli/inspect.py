"""`penstock inspect`: prints the shared memory of processes, and why one of them waits, once or every few seconds."""

from __future__ import annotations

import argparse
import json
import sys
import time

from penstock.cli.argument_parser import Commands
from penstock.errors import LayoutMismatch
from penstock.memory import Ticket
from penstock.tools import inspect
from penstock.tools.format import counted
from penstock.tools.inspect.segments import PAGE_KIND
from penstock.tools.load.arguments import above_0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help="show the shared memory of processes, and why one of them waits")
    parser.add_argument(
        "target",
        nargs="?",
        metavar="PID|TICKET",
        type=parse_target,
        help="Process, with its descendants, or ticket to look at (default: list processes with segments open)",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON document per snapshot (default: off)")
    parser.add_argument(
        "--watch", metavar="SECONDS", type=above_0, help="Seconds between snapshots (default: one snapshot)"
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="Print the Python stacks of processes that others wait for, by py-spy or a signal (default: off)",
    )
    parser.set_defaults(run=run)


def parse_target(text: str) -> int | Ticket:
    if text.isdecimal():
        return int(text)
    try:
        return Ticket.parse(text)
    except LayoutMismatch as error:
        raise argparse.ArgumentTypeError(f"{error}, or a process number") from None


def run(options: argparse.Namespace) -> int:
    has_looked = False
    while True:
        try:
            if options.target is None:
                show_holders(options.json)
            else:
                snapshot = inspect.look(options.target)
                if isinstance(options.target, int):
                    add_lost_groups(snapshot, options.target)
                if options.stacks:
                    inspect.add_stacks(snapshot)
                if options.watch and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                if options.json:
                    print(json.dumps(snapshot, indent=None if options.watch else 2), flush=True)
                else:
                    inspect.show(snapshot)
        except inspect.NotFound as error:
            print(f"penstock inspect: {error}", file=sys.stderr)
            return 0 if has_looked else 2  # what was watched has ended
        if not options.watch:
            return 0
        has_looked = True
        time.sleep(options.watch)


def add_lost_groups(snapshot: inspect.Json, pid: int) -> None:
    """Adds a sentence for each group that is coming back, if the process is one of `penstock serve`."""
    if all(segment["kind"] != PAGE_KIND for segment in snapshot["segments"]):
        return  # the import below takes longer than the rest of the command
    try:
        from penstock.server.status.snapshot_reader import NoServer, SnapshotReader
    except ImportError:  # the data plane is installed alone
        return
    try:
        lost = SnapshotReader(pid).take().coming_back
    except NoServer:
        return
    for group, waiting in lost.items():
        text = f"group {group} is coming back: {counted(waiting, 'request')} to resume"
        inspect.add_sentence(snapshot, "note", "group", text)


def show_holders(as_json: bool) -> None:
    holders = inspect.holders_of_segments()
    if as_json:
        rows = [{"pid": process.pid, "command": process.name, "segments": many} for process, many in holders]
        print(json.dumps(rows), flush=True)
        return
    if not holders:
        print("no process that we may look into has a segment of penstock open")
    for process, many in holders:
        print(f"{process.pid:>8}  {process.name}: {counted(many, 'segment')}")
