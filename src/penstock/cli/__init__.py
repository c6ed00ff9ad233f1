"""The command `penstock`: what stands on its command line, and what it answers with.

0: well. 1: something is wrong with what was looked at. 2: there is nothing to look at, or it was not asked rightly.
Leaves to `inspect`, `measure` and the library: everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import penstock
from penstock.cli.argument_parser import ArgumentParser
from penstock.engine import cli_args as engine_arguments
from penstock.errors import LayoutMismatch
from penstock.installing import how_to_install
from penstock.memory import Ticket
from penstock.server import cli_args as arguments
from penstock.tools import inspect
from penstock.tools.load import arguments as load_arguments
from penstock.tools.load.arguments import above_0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `penstock inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that closing it at the end succeeds
        return 0


def parser() -> argparse.ArgumentParser:
    found = ArgumentParser(prog="penstock", description="The data plane of an inference engine.")
    found.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = found.add_subparsers(title="commands", metavar="COMMAND", required=True)

    inspect = commands.add_parser("inspect", help="what processes share, and why one of them waits")
    inspect.add_argument(
        "target",
        nargs="?",
        metavar="PID|TICKET",
        type=target,
        help="Process, with its descendants, or ticket to look at (default: list processes with segments open)",
    )
    inspect.add_argument("--json", action="store_true", help="Print one JSON document per look (default: off)")
    inspect.add_argument("--watch", metavar="SECONDS", type=above_0, help="Seconds between looks (default: look once)")
    inspect.set_defaults(run=run_inspect)

    measure = commands.add_parser(
        "measure", help="what goes over the channels of a process: bytes by message and field, and how many are new"
    )
    measure.add_argument(
        "target",
        metavar="PID|TICKET|FILE",
        type=measured,
        help="Process, ticket or recording to measure (required)",
    )
    measure.add_argument("--channel", metavar="NAME", help="Name of the channels to measure (default: all)")
    measure.add_argument("--seconds", metavar="N", type=above_0, help="Seconds to measure (default: until Ctrl-C)")
    measure.add_argument(
        "--record", metavar="FILE", type=Path, help="File that keeps the messages, to be measured again (default: none)"
    )
    measure.add_argument("--plot", metavar="FILE.svg", type=Path, help="File for a chart (default: none)")
    measure.add_argument("--json", action="store_true", help="Print one JSON object per line (default: off)")
    measure.set_defaults(run=run_measure)

    generate = commands.add_parser("generate", help="answers to a file of prompts, from a model or a simulated device")
    engine_arguments.add(generate)
    add_requests(generate)
    engine_arguments.add_logging(generate)
    generate.set_defaults(run=run_generate)

    serve = commands.add_parser("serve", help="a model behind an HTTP interface that clients of OpenAI's speak")
    arguments.add(serve)
    serve.set_defaults(run=run_serve)

    top = commands.add_parser("top", help="a running server: processes, channels, store, step time and tokens, live")
    top.add_argument(
        "target",
        nargs="?",
        metavar="PID|NAME|URL",
        help="Launcher, model or URL of a server, also on another machine (default: the only one on this machine)",
    )
    top.add_argument(
        "--interval", metavar="SECONDS", type=above_0, default=1.0, help="Seconds between looks (default: %(default)s)"
    )
    top.add_argument("--seconds", metavar="N", type=above_0, help="Seconds to run (default: until q or Ctrl-C)")
    top.add_argument("--once", action="store_true", help="Print one view after one interval (default: off)")
    top.add_argument("--json", action="store_true", help="Print one view as a JSON document (default: off)")
    top.add_argument("--svg", metavar="FILE", type=Path, help="File for a picture of the last view (default: none)")
    top.add_argument(
        "--api-key", metavar="KEY", help=f"Key for a URL (default: {arguments.KEY_VARIABLE}, or none is sent)"
    )
    top.set_defaults(run=run_top)

    bench = commands.add_parser("bench", help="how a server fares under load")
    benches = bench.add_subparsers(title="of what", metavar="WHAT", required=True)
    serving = benches.add_parser("serve", help="any server that speaks OpenAI's interface")
    load_arguments.add(serving)
    serving.set_defaults(run=run_bench_serve)

    doctor = commands.add_parser("doctor", help="whether this machine has what penstock needs")
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default="",
        help="Directory of a model to check (default: the one that ships)",
    )
    doctor.add_argument("--host", default="127.0.0.1", help="Address of the port to check (default: %(default)s)")
    doctor.add_argument(
        "--port",
        metavar="N",
        type=int,
        help="Port on which a server must be able to listen (default: 8000, which may be taken)",
    )
    doctor.set_defaults(run=run_doctor)
    return found


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Options of `generate` alone."""
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
        type=positive,
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
        type=positive,
        default=1024,
        help="Maximum number of requests open at a time (default: %(default)s)",
    )


def target(text: str) -> int | Ticket:
    if text.isdecimal():
        return int(text)
    try:
        return Ticket.parse(text)
    except LayoutMismatch as error:
        raise argparse.ArgumentTypeError(f"{error}, or a process number") from None


def measured(text: str) -> int | Ticket | Path:
    from penstock.tools.capture.command import target_of

    try:
        return target_of(text)
    except LayoutMismatch as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"1 to 100000, not {text!r}")
    return int(text)


# ── inspect ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_inspect(options: argparse.Namespace) -> int:
    has_looked = False
    while True:
        try:
            if options.target is None:
                show_holders(options.json)
            else:
                seen = inspect.look(options.target)
                if options.watch and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                if options.json:
                    print(json.dumps(seen, indent=None if options.watch else 2), flush=True)
                else:
                    inspect.show(seen)
        except inspect.NotFound as error:
            print(f"penstock inspect: {error}", file=sys.stderr)
            return 0 if has_looked else 2  # what was watched has ended
        if not options.watch:
            return 0
        has_looked = True
        time.sleep(options.watch)


def show_holders(as_json: bool) -> None:
    found = inspect.holders_of_segments()
    if as_json:
        print(json.dumps([{"pid": one.pid, "command": one.name, "segments": many} for one, many in found]), flush=True)
    elif not found:
        print("no process that we may look into has a segment of penstock open")
    for one, many in found if not as_json else []:
        print(f"{one.pid:>8}  {one.name}: {many} segment{'' if many == 1 else 's'}")


# ── measure ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_measure(options: argparse.Namespace) -> int:
    from penstock.tools.capture import command

    return command.run(
        command.Options(
            target=options.target,
            channel=options.channel,
            seconds=options.seconds,
            record=options.record,
            plot=options.plot,
            is_json=options.json,
        )
    )


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_generate(options: argparse.Namespace) -> int:
    from penstock.engine import offline

    try:
        config = engine_arguments.engine_config(options)
        asked = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
        given = {name: value for name, value in asked.items() if value is not None}
        return offline.run(config, options.prompts, options.output, given, options.max_concurrency)
    except ImportError as error:
        print(f"penstock generate: {missing(error, 'engine')}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError) as error:
        print(f"penstock generate: {error}", file=sys.stderr)
        return 2


def missing(error: ImportError, extra: str) -> str:
    return f"{error}: {how_to_install(extra)}"


# ── serve ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_serve(options: argparse.Namespace) -> int:
    try:
        from penstock.cli import serve as command

        return command.run(arguments.engine_config(options), arguments.server_options(options))
    except ImportError as error:
        print(f"penstock serve: {missing(error, 'engine')}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError) as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        return 2


# ── top ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_top(options: argparse.Namespace) -> int:
    try:
        from penstock.tools.top import command
    except ImportError as error:
        print(f"penstock top: {missing(error, 'engine')}", file=sys.stderr)
        return 2
    return command.run(
        command.Options(
            target=int(options.target) if options.target and options.target.isdecimal() else options.target,
            key=options.api_key or os.environ.get(arguments.KEY_VARIABLE, ""),
            interval=options.interval,
            seconds=options.seconds,
            is_once=options.once,
            is_json=options.json,
            svg=options.svg,
        )
    )


# ── bench ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_bench_serve(options: argparse.Namespace) -> int:
    try:
        from penstock.tools.load import command

        return command.run(options)
    except ImportError as error:
        print(f"penstock bench serve: {missing(error, 'load')}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"penstock bench serve: {error}", file=sys.stderr)
    return 2


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_doctor(options: argparse.Namespace) -> int:
    from penstock.cli import doctor

    return doctor.run(options.model, options.host, options.port)
