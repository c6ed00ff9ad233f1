"""`penstock serve`: serves a model over HTTP, until a signal drains it."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.argument_parser import Commands
from penstock.cli.vllm_options import explain
from penstock.installing import how_to_install
from penstock.server import cli_args as server_args


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI's HTTP API")
    server_args.add(parser)
    parser.explain = explain
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from penstock.server import server_launcher

        return server_launcher.run(
            server_args.engine_config(options), server_args.server_options(options), options.ray_address
        )
    except ImportError as error:
        print(f"penstock serve: {error}: {how_to_install('engine')}", file=sys.stderr)
    except (ValueError, TypeError, OSError) as error:
        print(f"penstock serve: {error}", file=sys.stderr)
    return 2
