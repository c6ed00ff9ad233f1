"""`penstock trace`: writes a timeline of live processes, for Perfetto: their records, waits and steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.argument_parser import Commands
from penstock.cli.inspect import parse_target
from penstock.tools.load.arguments import above_0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace", help="write a timeline of live processes, for Perfetto: their records, waits and steps"
    )
    parser.add_argument(
        "target",
        metavar="PID|TICKET",
        type=parse_target,
        help="Process, with its descendants, or ticket of a channel to trace (required)",
    )
    parser.add_argument(
        "--seconds", metavar="N", type=above_0, default=5.0, help="Seconds to trace (default: %(default)s)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("trace.json"),
        help="File for the timeline, in Chrome's trace format (default: %(default)s)",
    )
    parser.add_argument("--channel", metavar="NAME", help="Name of the channels to trace (default: all)")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="Id of a request, as in X-Request-Id: trace until it has ended, and print where its time went "
        "(default: all requests, for the file)",
    )
    parser.add_argument("--json", action="store_true", help="Print the summary as a JSON document (default: off)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from penstock.tools.trace import command

    return command.run(
        command.TraceOptions(
            target=options.target,
            output=options.output,
            seconds=options.seconds,
            channel=options.channel,
            is_json=options.json,
            request=options.request,
        )
    )
