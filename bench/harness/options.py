"""What the benchmarks' command lines have in common, so that an option is called the same in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Checks one or several names, separated by commas."""

    def check(text: str) -> str:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; there are {', '.join(known)}")
        return text

    return check


def side_by_side(
    name: str,
    about: str | None,
    cases: Sequence[str],
    ways: Sequence[str],
    *,
    usual: Sequence[str] = (),
    quick: str = "small, few rounds: does it run?",
    out: str = "keep the records there too",
) -> argparse.ArgumentParser:
    """For a benchmark in which several ways take turns. `usual`: those that run unless others are named; none: all."""
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=(about or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object per line on stdout, tables on stderr")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", metavar="CASE,…", type=one_of(cases), default=",".join(cases), help="of %(default)s")
    parser.add_argument("--impl", metavar="NAME,…", type=one_of(ways), default=",".join(usual or ways))
    parser.add_argument("--rounds", metavar="N", type=int)
    parser.add_argument("--noisy", action="store_true", help="compare although foreign processes use the machine")
    parser.add_argument("--patience", metavar="S", type=float, help="seconds, in all, to wait for a quiet machine")
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    return parser
