"""`penstock top`: shows a running server, live, once, or as a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.cli.argument_parser import Commands
from penstock.environment import API_KEY
from penstock.installing import how_to_install
from penstock.tools.load.arguments import above_0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "top", help="show a running server live: processes, channels, store, step time and tokens"
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="PID|NAME|URL",
        help="Launcher, model or URL of a server, also on another machine (default: the only one on this machine)",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=above_0,
        default=1.0,
        help="Seconds between snapshots (default: %(default)s)",
    )
    parser.add_argument("--seconds", metavar="N", type=above_0, help="Seconds to run (default: until q or Ctrl-C)")
    parser.add_argument("--once", action="store_true", help="Print one view after one interval (default: off)")
    parser.add_argument("--json", action="store_true", help="Print one view as a JSON document (default: off)")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="File for a picture of the last view (default: none)")
    parser.add_argument("--api-key", metavar="KEY", help=f"Key for a URL (default: {API_KEY.name}, or none is sent)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from penstock.tools.top import command
    except ImportError as error:
        print(f"penstock top: {error}: {how_to_install('engine')}", file=sys.stderr)
        return 2
    return command.run(
        command.Options(
            target=int(options.target) if options.target and options.target.isdecimal() else options.target,
            key=options.api_key or API_KEY.read(),
            interval=options.interval,
            seconds=options.seconds,
            is_once=options.once,
            is_json=options.json,
            svg=options.svg,
        )
    )
