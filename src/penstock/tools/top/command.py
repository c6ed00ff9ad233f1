"""`penstock top`: shows snapshots of a server at an interval, until q or Ctrl-C.

`source` takes the snapshots, and `view` draws them.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from penstock.server.status.snapshot_rates import View
from penstock.server.status.snapshot_reader import NoServer
from penstock.tools.top import keys
from penstock.tools.top.source import LocalSource, Refused, RemoteSource, SnapshotSource, choose, servers_here
from penstock.tools.top.view import History, drawn

PICTURE = (112, 40)  # columns and lines of an SVG
KEYS = "q or Ctrl-C: end"
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # rich's is fetched from elsewhere


@dataclass(frozen=True)
class Options:
    target: int | str | None  # the launcher's pid, the model's name, a URL; None: the only one on this machine
    key: str
    interval: float  # seconds
    seconds: float | None  # None: until it is ended
    is_once: bool
    is_json: bool
    svg: Path | None  # where the last picture is kept


def run(options: Options) -> int:
    """Runs the command. Returns 0, or 2 if there is no server or the arguments are wrong."""
    try:
        source = source_of(options)
        if options.is_json or options.is_once:
            return show_once(options, source)
        return show(options, source)
    except (NoServer, Refused, ValueError, OSError) as error:
        print(f"penstock top: {error}", file=sys.stderr)
        return 2


def source_of(options: Options) -> SnapshotSource:
    if isinstance(options.target, str) and "://" in options.target:
        return RemoteSource(options.target, options.key, 10 * options.interval)
    return LocalSource(choose(options.target, servers_here()), 10 * options.interval)


def show_once(options: Options, source: SnapshotSource) -> int:
    """Takes two snapshots, as the second has rates, and prints it."""
    view, history = source.look(), History()
    while view.rates is None:
        time.sleep(options.interval)
        view = source.look()
    history.add(view.rates)
    if options.is_json:
        print(msgspec.json.encode(view).decode(), flush=True)
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PICTURE[0])
        console.print(drawn(view, history, console))
    keep(options, view, history)
    return 0


def show(options: Options, source: SnapshotSource) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PICTURE[0])
    history, view = History(), None
    with contextlib.ExitStack() as screen:
        live = None
        if console.is_terminal:
            screen.enter_context(keys.listening())
            live = screen.enter_context(Live(console=console, screen=True, auto_refresh=False))
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
            for view, gone in looks(options, source):
                if not gone:
                    history.add(view.rates)
                if live is not None:
                    live.update(drawn(view, history, console, gone, KEYS), refresh=True)
                else:
                    console.print(drawn(view, history, console, gone))
    if view is not None:
        keep(options, view, history)
    return 0


def looks(options: Options, source: SnapshotSource) -> Iterator[tuple[View, str]]:
    """Yields the last snapshot, and the reason if the server is gone. Raises NoServer if there is none at the start."""
    end = None if options.seconds is None else time.monotonic() + options.seconds
    view = source.look()
    gone = ""
    while True:
        yield view, gone
        if keys.is_enough(options.interval) or (end is not None and time.monotonic() >= end):
            return
        try:
            view, gone = source.look(), ""
        except NoServer as error:
            gone = str(error)


def keep(options: Options, view: View, history: History) -> None:
    if options.svg is None:
        return
    width, height = PICTURE
    console = Console(
        record=True, file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="truecolor",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(drawn(view, history, console))
    options.svg.write_text(FONT.sub("", console.export_svg(title="penstock top", unique_id="top")))
