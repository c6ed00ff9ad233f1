"""A parser of command lines that answers a misspelled word with the nearest one, and with its own command's usage."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol


class ArgumentParser(argparse.ArgumentParser):
    """The parser of `penstock` and of each command; argparse creates the parsers of commands with the same class.

    Options are not abbreviated: `--max-num` is a mistake today, and would be another option's name tomorrow.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuses what is left over: the parser above knows neither this command's options nor its usage."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            known = re.findall(r"(?<![\w-])-[\w-]+", self.format_usage())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(options, known)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            message += _nearest([wrong[1]], re.findall(r"[\w-]+", wrong[2]))
        super().error(message)


class Commands(Protocol):
    """What `add_subparsers` returns."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...


def _nearest(words: Iterable[str], known: Sequence[str]) -> str:
    nearest = [match for word in words for match in difflib.get_close_matches(word, known, 1)]
    return f": did you mean {', '.join(nearest)}?" if nearest else ""
