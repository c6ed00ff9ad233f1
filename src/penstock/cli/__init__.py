"""The command `penstock`: each command is a file of this folder, with `add_parser(commands)` and `run(options)`.

Exit status 0: well. 1: something is wrong with what was looked at. 2: there is nothing to look at, or the command line
is wrong. 130: interrupted. What only one command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import penstock
from penstock.cli.argument_parser import ArgumentParser

COMMANDS = ("inspect", "trace", "measure", "generate", "serve", "migrate", "top", "bench", "doctor")
ENGINE_COMMANDS = ("generate", "serve", "migrate", "top")


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # its descriptor is closed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without µ
    try:
        try:
            options = parser(words[:1]).parse_args(words)
            return int(options.run(options))
        finally:
            sys.stdout.flush()  # of --help and --version, too
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that closing it at the end succeeds
        if isinstance(error, BrokenPipeError):  # `penstock inspect … | head`
            return 0
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # a console of rich ends with status 1 then
            return 0
        raise


class PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(f"penstock {penstock.__version__}")
        parser.exit()


def parser(only: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser of all commands, or of the commands `only`: the options of the engine take long to import."""
    root = ArgumentParser(prog="penstock", description="The data plane of an inference engine.")
    root.add_argument("--version", action=PrintVersion, nargs=0, help="print the version and exit")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    has_engine = importlib.util.find_spec("penstock.server") is not None  # the build of the data plane has none
    names = [name for name in COMMANDS if has_engine or name not in ENGINE_COMMANDS]
    for name in [name for name in names if name in only] or names:
        importlib.import_module(f"penstock.cli.{name}").add_parser(commands)
    return root
