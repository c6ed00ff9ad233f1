"""`penstock doctor`: says whether this machine has what penstock needs, and a model what the engine needs."""

from __future__ import annotations

import argparse

from penstock.cli.argument_parser import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="check whether this machine has what penstock needs")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default="",
        help="Directory of a model to check (default: the bundled model)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address of the port to check (default: %(default)s)")
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        help="Port on which a server must be able to listen (default: 8000, which may be taken)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from penstock.tools import doctor

    return doctor.run(options.model, options.host, options.port)
