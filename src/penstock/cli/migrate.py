"""`penstock migrate`: restarts the engine of a running server, group by group, without a dropped request."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.argument_parser import Commands
from penstock.installing import how_to_install
from penstock.tools.load.arguments import above_0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "migrate", help="restart the engine of a server, one group after the other; open requests go on"
    )
    parser.add_argument("pid", metavar="PID", type=int, help="Launcher of the server (required)")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=above_0,
        default=1800.0,
        help="Seconds until all groups serve again (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from penstock.server.status import planned_migration
    except ImportError as error:
        print(f"penstock migrate: {error}: {how_to_install('engine')}", file=sys.stderr)
        return 2
    return planned_migration.run(options.pid, options.timeout)
