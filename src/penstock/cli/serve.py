"""`penstock serve`: serves a model over HTTP, until a signal drains it."""

from __future__ import annotations

import argparse

from penstock.cli.argument_parser import Commands
from penstock.cli.config_file import OPTION, with_config_file
from penstock.cli.failures import status_of
from penstock.cli.vllm_options import explain, without_always_on
from penstock.server import cli_args as server_args


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI's HTTP API")
    server_args.add(parser)
    parser.add_argument(
        OPTION, metavar="FILE", help="YAML file of options by name; the command line takes precedence (default: none)"
    )
    parser.explain = explain

    def prepare(words: list[str]) -> list[str]:
        words, notes = without_always_on(with_config_file(words, parser))
        parser.set_defaults(notes=notes)
        return words

    parser.prepare = prepare
    parser.set_defaults(run=run, notes=[])


def run(options: argparse.Namespace) -> int:
    return status_of(lambda: serve(options), "penstock serve", "engine")


def serve(options: argparse.Namespace) -> int:
    from penstock.engine.launcher.hub_model import with_hub_model
    from penstock.server import server_launcher

    options = with_hub_model(options)
    return server_launcher.run(
        server_args.engine_config(options), server_args.server_options(options), options.ray_address, options.notes
    )
