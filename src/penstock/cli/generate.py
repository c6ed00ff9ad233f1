"""`penstock generate`: answers a file of prompts, without a server."""

from __future__ import annotations

import argparse

from penstock.cli.argument_parser import Commands
from penstock.cli.failures import status_of
from penstock.engine import cli_args as engine_args

SAMPLING = ("max_tokens", "temperature", "seed")  # options that each request without its own takes


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="answer the prompts of a file, with a model or a simulated device")
    engine_args.add(parser, *engine_args.GROUPS)
    _add_requests(parser)
    engine_args.add(parser, "logging")
    parser.set_defaults(run=run)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add(
        "--prompts",
        metavar="FILE",
        default="-",
        help="File of JSON lines: a text, a list of token ids, or an object with either and sampling parameters; "
        "- is standard input (default: %(default)s)",
    )
    add(
        "--output",
        metavar="FILE",
        default="-",
        help="File for the answers, a JSON line each, in the same order; - is standard output (default: %(default)s)",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=parse_positive,
        help="Maximum number of tokens of an answer (default: the model's max_new_tokens, or 16)",
    )
    add(
        "--temperature",
        metavar="T",
        type=float,
        help="Temperature of sampling; 0 always takes the likeliest token (default: the model's, or 0)",
    )
    add("--seed", metavar="N", type=int, help="Seed of each answer (default: drawn by the engine)")
    add(
        "--max-concurrency",
        metavar="N",
        type=parse_positive,
        default=1024,
        help="Maximum number of requests open at a time (default: %(default)s)",
    )


def parse_positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"1 to 100000, not {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    return status_of(lambda: generate(options), "penstock generate", "engine")


def generate(options: argparse.Namespace) -> int:
    from penstock.engine import offline
    from penstock.engine.launcher.hub_model import with_hub_model

    options = with_hub_model(options)
    config = engine_args.engine_config(options)
    defaults = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    return offline.run(config, options.prompts, options.output, defaults, options.max_concurrency)
