"""`penstock measure`: measures the bytes on channels of live processes, or in recordings of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.argument_parser import Commands
from penstock.errors import LayoutMismatch
from penstock.memory import Ticket
from penstock.tools.load.arguments import above_0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "measure", help="measure the bytes on channels of a process, by message and field, and the share that is new"
    )
    parser.add_argument(
        "target",
        metavar="PID|TICKET|FILE",
        type=parse_target,
        help="Process, ticket or recording to measure (required)",
    )
    parser.add_argument("--channel", metavar="NAME", help="Name of the channels to measure (default: all)")
    parser.add_argument("--seconds", metavar="N", type=above_0, help="Seconds to measure (default: until Ctrl-C)")
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="File that keeps the messages, to be measured again (default: none)"
    )
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="File for a chart (default: none)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line (default: off)")
    parser.set_defaults(run=run)


def parse_target(text: str) -> int | Ticket | Path:
    from penstock.tools.capture.command import target_of

    try:
        return target_of(text)
    except LayoutMismatch as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    from penstock.tools.capture import command

    return command.run(
        command.CaptureOptions(
            target=options.target,
            channel=options.channel,
            seconds=options.seconds,
            record=options.record,
            plot=options.plot,
            is_json=options.json,
        )
    )
