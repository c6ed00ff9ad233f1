"""A parser of command lines that answers a mistake with one line: what is wrong, and the nearest word that is right."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """The parser of `penstock` and of each command; argparse creates the parsers of commands with the same class.

    Options are not abbreviated: `--max-num` is a mistake today, and would be another option's name tomorrow.
    `arguments` are those of all groups, and `commands` has a line and a parser for each name: argparse shows neither.
    `explain` names the replacement of an option of another program, or returns None. `prepare` rewrites the words of
    the command line before parsing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.commands: dict[str, tuple[str, ArgumentParser]] = {}
        self.explain: Callable[[str], str | None] = lambda option: None
        self.prepare: Callable[[list[str]], list[str]] = list
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.arguments.append(action)
        return action

    def add_argument_group(self, *args: Any, **options: Any) -> Any:
        return self._with_arguments_kept(super().add_argument_group(*args, **options))

    def _with_arguments_kept(self, group: Any) -> Any:
        add_argument, add_exclusive = group.add_argument, group.add_mutually_exclusive_group

        def add(*names: str, **options: Any) -> argparse.Action:
            action: argparse.Action = add_argument(*names, **options)
            self.arguments.append(action)
            return action

        group.add_argument = add
        group.add_mutually_exclusive_group = lambda **options: self._with_arguments_kept(add_exclusive(**options))
        return group

    def add_subparsers(self, **options: Any) -> Commands:  # type: ignore[override]
        return Commands(super().add_subparsers(**options).add_parser, self.commands)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuses what is left over: the parser above does not know this command's options."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            words = self.prepare(words)
        except ValueError as error:
            self.error(str(error))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            explained = [text for option in options if (text := self.explain(option))]
            if explained:
                self.error("; ".join(explained))
            known = re.findall(r"(?<![\w-])-[\w-]+", self.format_usage())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(options, known)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            message += _nearest([wrong[1]], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}\n")


class Commands:
    """What `add_subparsers` returns."""

    def __init__(self, add: Callable[..., ArgumentParser], commands: dict[str, tuple[str, ArgumentParser]]) -> None:
        self._add = add
        self._commands = commands

    def add_parser(self, name: str, *, help: str) -> ArgumentParser:
        parser = self._add(name, help=help)
        self._commands[name] = help, parser
        return parser


def _nearest(words: Iterable[str], known: Sequence[str]) -> str:
    nearest = [match for word in words for match in difflib.get_close_matches(word, known, 1)]
    return f": did you mean {', '.join(nearest)}?" if nearest else ""
