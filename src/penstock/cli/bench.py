"""`penstock bench serve`: sends requests to a server of OpenAI's API, and measures its answers."""

from __future__ import annotations

import argparse

from penstock.cli.argument_parser import Commands
from penstock.cli.failures import status_of
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
    return status_of(lambda: bench(options), "penstock bench serve", "load")


def bench(options: argparse.Namespace) -> int:
    from penstock.tools.load import command

    return command.run(options)
