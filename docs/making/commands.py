"""The page of the commands: every command and option, as the parsers know them.

Leaves to `penstock.cli` what there is.
"""

import argparse
import os
from collections.abc import Iterator

from penstock.cli import parser


def page() -> str:
    lines = ["# Commands", "", "Made from the parsers of `penstock` itself; `penstock COMMAND --help` says the same."]
    for name, summary, command in commands_of(parser()):
        lines += ["", f"## penstock {name}", "", f"{escaped(summary)}.", "", "```text", usage(command), "```", ""]
        rows = [row_of(action) for action in command._actions if is_told(action)]
        if rows:
            lines += ["| | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def commands_of(root: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, one line, and parser; those below a command (`bench serve`) by both names."""
    for action in root._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {one.dest: one.help or "" for one in action._choices_actions}
        for name, command in action.choices.items():
            below = list(commands_of(command))
            if below:
                yield from ((f"{name} {inner}", *rest) for inner, *rest in below)  # type: ignore[misc]
            else:
                yield name, helps.get(name, ""), command


def is_told(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def row_of(action: argparse.Action) -> str:
    value = (
        "|".join(map(str, action.choices)) if action.choices is not None else str(action.metavar or action.dest.upper())
    )
    takes_one = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    names = [f"{name} {value}" if takes_one else name for name in action.option_strings] or [value]
    text = (action.help or "").replace("%(default)s", str(action.default))
    return f"| {', '.join(f'`{escaped(name)}`' for name in names)} | {escaped(text)} |"


def usage(command: argparse.ArgumentParser) -> str:
    os.environ["COLUMNS"] = "100"  # a terminal's width is asked for otherwise
    return command.format_usage().removeprefix("usage: ").strip()


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
