"""The sections of the page of commands: every command and option, as the parsers know them.

Leaves to `penstock.cli` what there is.
"""

import argparse
import os
from collections.abc import Iterator

from penstock.cli import parser
from penstock.cli.argument_parser import ArgumentParser


def page() -> str:
    lines: list[str] = []
    for name, summary, command in commands_of(parser()):
        lines += ["", f"## penstock {name}", "", f"{escaped(summary)}.", "", "```text", usage(command), "```", ""]
        rows = [row_of(action) for action in command.arguments if is_shown(action)]
        if rows:
            lines += ["| | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def commands_of(root: ArgumentParser) -> Iterator[tuple[str, str, ArgumentParser]]:
    """Name, one line, and parser; those below a command (`bench serve`) by both names."""
    for name, (summary, command) in root.commands.items():
        if command.commands:
            yield from ((f"{name} {inner}", *rest) for inner, *rest in commands_of(command))  # type: ignore[misc]
        else:
            yield name, summary, command


def is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and "--help" not in action.option_strings


def row_of(action: argparse.Action) -> str:
    value = (
        "|".join(map(str, action.choices)) if action.choices is not None else str(action.metavar or action.dest.upper())
    )
    takes_one = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    names = [f"{name} {value}" if takes_one else name for name in action.option_strings] or [value]
    text = (action.help or "") % vars(action)
    return f"| {', '.join(f'`{escaped(name)}`' for name in names)} | {escaped(text)} |"


def usage(command: ArgumentParser) -> str:
    os.environ["COLUMNS"] = "100"  # a terminal's width is asked for otherwise
    return command.format_usage().removeprefix("usage: ").strip()


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
