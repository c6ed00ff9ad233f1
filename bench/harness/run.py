"""The command line of a benchmark, and a run of it: records, patience, a folder, turns, and the targets at its end."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from bench.harness.output import Output
from bench.harness.quiet import FOREIGN_LIMIT, Patience, load_between, look
from bench.harness.targets import Target, show
from bench.harness.turns import Turns
from bench.impls import Unavailable

if TYPE_CHECKING:
    from typing_extensions import Self


class Checked(Protocol):
    """What may not run on this machine."""

    @property
    def name(self) -> str: ...
    def check(self) -> None:
        """Raises Unavailable."""


Item = TypeVar("Item", bound=Checked)
Kind = TypeVar("Kind", bound=Turns)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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


def command_line(name: str, about: str | None, *, quick: str = "", out: str = "keep the records there too",
                 ) -> argparse.ArgumentParser:  # fmt: skip
    """Returns a parser with the options of all benchmarks; with `quick`, what --quick means here, also that one."""
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=(about or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object per line on stdout, tables on stderr")
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    parser.set_defaults(quick=False, rounds=None, patience=None, noisy=False)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def side_by_side(
    name: str,
    about: str | None,
    cases: Sequence[str],
    ways: Sequence[str],
    *,
    usual: Sequence[str] = (),
    quick: str = "small, one round: does it run?",
    **options: str,
) -> argparse.ArgumentParser:
    """For a benchmark in which several ways take turns. `usual`: those that run unless others are named; none: all."""
    parser = command_line(name, about, quick=quick, **options)
    parser.add_argument("--only", metavar="CASE,…", type=one_of(cases), default=",".join(cases), help="of %(default)s")
    parser.add_argument("--impl", metavar="NAME,…", type=one_of(ways), default=",".join(usual or ways))
    parser.add_argument("--rounds", metavar="N", type=int)
    parser.add_argument("--noisy", action="store_true", help="compare although foreign processes use the machine")
    parser.add_argument("--patience", metavar="S", type=float, help="seconds, in all, to wait for a quiet machine")
    return parser


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def end_on_signal(number: int, frame: object) -> NoReturn:
    """Ends by an exception, so that processes of the benchmark are ended on the way out."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


class Run:
    """A run of a benchmark, as a context: begins with a record of the machine, and has a folder until its end."""

    def __init__(
        self, name: str, options: argparse.Namespace, *, rounds: int = 1, quick_rounds: int = 1, patience: float = 0.0
    ) -> None:
        """`rounds` and `patience` (seconds) are those of a full run. A quick run does not wait."""
        self.options = options
        self.is_quick: bool = options.quick
        self.rounds: int = options.rounds or (quick_rounds if options.quick else rounds)
        usual = 0.0 if options.quick else patience
        self.patience = Patience(usual if options.patience is None else options.patience)
        self.output = Output(name, is_json=options.json, folder=options.out)
        self.results: dict[str, Any] = {}  # by case, if targets are computed from it
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.scratch = Path(self._folder.name)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, end_on_signal)
        self.output.begin()
        self._began = look()
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def named(self, option: str) -> list[str]:
        """Returns the names in the value of an option, such as `only` and `impl`."""
        names: str = getattr(self.options, option)
        return names.split(",")

    def turns(self, reference: str, kind: type[Kind], **more: Any) -> Kind:
        """Returns sessions, or servers, that take turns."""
        more = {"is_pinned": False, **more}
        return kind(
            self.output, self.patience, reference=reference, rounds=self.rounds, is_noisy=self.options.noisy, **more
        )

    def skip(self, name: str, reason: Exception) -> None:
        """Names what cannot run here."""
        self.output.say(f"skipped {name}: {reason}")
        self.output.record("skipped", name, reason=str(reason))

    def available(self, items: Iterable[Item]) -> list[Item]:
        """Returns those that can run here, and names the others with the reason."""
        usable = []
        for item in items:
            try:
                item.check()
                usable.append(item)
            except Unavailable as missing:
                self.skip(item.name, missing)
        return usable

    def attempt(self, name: str, case: Callable[[], object]) -> None:
        """Runs a case. A case that fails is named with the reason, and others go on."""
        try:
            case()
        except Unavailable as missing:
            self.skip(name, missing)
        except Exception as failure:
            self.output.say(f"\n{name} failed: {traceback.format_exc()}")
            self.output.record("failed", name, reason=f"{type(failure).__name__}: {failure}")

    def conclude(self, impl: str, targets: Iterable[Target]) -> int:
        """Prints the targets, and whether the machine was quiet. Returns the exit status: 1 if a target is missed."""
        met = show(self.output, impl, list(targets))
        load = load_between(self._began, look())
        self.output.record("load", "-", foreign_cores=load.cores, quiet=load.is_quiet)
        if not load.is_quiet:
            limit = f"with more than {FOREIGN_LIMIT:.2f}, times say little"
            self.output.say(f"\nforeign processes took {load.cores:.2f} cores; {limit}")
        return 0 if met else 1
