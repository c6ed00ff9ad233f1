"""`penstock bench serve`: sends requests to a server of OpenAI's API, and measures its answers."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.argument_parser import Commands
from penstock.installing import how_to_install
from penstock.tools.load import arguments as load_args


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="benchmark a server")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    serve = benches.add_parser(
        "serve", help="send load to a server of OpenAI's API, and measure its latency and throughput"
    )
    load_args.add(serve)
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from penstock.tools.load import command

        return command.run(options)
    except ImportError as error:
        print(f"penstock bench serve: {error}: {how_to_install('load')}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"penstock bench serve: {error}", file=sys.stderr)
    return 2
