"""The server over HTTP, as its clients see it: beside vLLM's on the same weights, and alone on a simulated device.

Loads are made by `penstock bench serve`, the same for both, in rounds that take turns.

    PENSTOCK_PEER_PYTHON=… scripts/bench serve    all of it, beside vLLM where that interpreter has it: eight minutes
    scripts/bench serve --quick                   small, one round: does it run?
    scripts/bench serve --model DIR               another model than a small one with random weights
    scripts/bench serve --shape qwen3-0.6b --only load    random weights of that model's shape, in bfloat16
    scripts/bench serve --only streams,gone
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.harness.options import side_by_side
from bench.harness.output import Output
from bench.harness.quiet import Patience, load_between, look
from bench.harness.targets import conclude
from bench.impls import Unavailable
from bench.serve_cases import cases, goals, model, pauses
from bench.serve_cases.cases import Load, Servers
from bench.serve_cases.servers import OURS, PEERS, THEIRS, THEIRS_UNRESERVED, UNRESERVED, Failed, Ours, Server, Theirs
from penstock.engine.model_dir import takes_images
from penstock.engine.protocol.config import EngineConfig

CASES = ("load", "streams", "gone", "migration")


@dataclass(frozen=True)
class Served:
    """The model under load: a directory, or random weights of a shape."""

    directory: Path | None
    shape: str

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.shape == model.REAL else "float32"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    loads: Mapping[str, Load]
    rounds: int
    streams: int
    stream_tokens: int
    disconnects: int
    kills: int
    migrating_streams: int
    kept_requests: int
    is_compiled: bool  # what vLLM computes: it is faster then, and starts later
    patience: float


DEFAULT = Scale(
    loads={"text": Load(96, 16), "images": Load(48, 8, "32", "32", images=1)},
    rounds=3,
    streams=1000,
    stream_tokens=200,
    disconnects=20,
    kills=7,
    migrating_streams=16,
    kept_requests=200,
    is_compiled=True,
    patience=60.0,
)
QUICK = Scale(
    loads={"text": Load(8, 4, "32", "16"), "images": Load(4, 2, "16", "8", images=1)},
    rounds=1,
    streams=50,
    stream_tokens=20,
    disconnects=2,
    kills=1,
    migrating_streams=8,
    kept_requests=40,
    is_compiled=False,
    patience=0.0,
)
# A real size: what a machine computes, and not what processes and messages cost, decides there.
REAL_LOADS = {
    "16 requests, 8 at a time": Load(16, 8, "259", "48"),
    "decode of 8": Load(8, 8, "17", "48"),
    "one request": Load(2, 1, "17", "48"),
    "prefill of 2,072": Load(2, 1, "2072", "2"),  # two tokens: one has no time per token
}


def run(servers: Servers, scale: Scale, expected: Sequence[str], ways: Sequence[str], served: Served) -> goals.Found:
    result = goals.Found()
    directory = served.directory
    if "load" in expected:
        if directory is None:
            directory = servers.scratch / "model"
            model.make(directory, served.shape)
        try:
            longest = model.longest(directory)
            start_all(servers, scale, result, ways, replace(served, directory=directory), longest)
            has_images = takes_images(EngineConfig(model=str(directory)))
            for case, load in scale.loads.items():
                if has_images or not load.images:
                    result.loads[case] = cases.side_by_side(servers, case, load.within(longest))
        finally:
            for server in servers.up.values():
                server.stop()
            servers.up.clear()
    if {"streams", "gone"} & set(expected) and OURS in ways:
        simulated = Ours.simulated(scale.streams, servers.scratch / "simulated.log")
        try:
            result.starts.setdefault(OURS, simulated.wait_for_an_answer())
            if "streams" in expected:
                result.streams = cases.many_streams(servers, simulated, scale.streams, scale.stream_tokens)
            if "gone" in expected:
                result.gone = cases.clients_that_go(servers, simulated, scale.disconnects)
        except (Failed, OSError) as failure:
            servers.output.say(f"\nthe simulated device: {failure}")
            servers.output.record("failed", OURS, reason=str(failure))
        finally:
            simulated.stop()
    if "migration" in expected and OURS in ways:
        if directory is None:
            directory = servers.scratch / "model"
            model.make(directory)
        try:
            result.pauses = pauses.pauses(
                servers, directory, model.longest(directory), scale.kills, scale.migrating_streams
            )
            result.kept = pauses.kept_memory(servers, servers.rounds, scale.kept_requests)
        except (Failed, OSError) as failure:
            servers.output.say(f"\nmigration: {failure}")
            servers.output.record("failed", OURS, reason=str(failure))
    cases.starts_told(servers, result.starts)
    return result


def start_all(
    servers: Servers, scale: Scale, result: goals.Found, ways: Sequence[str], served: Served, longest: int
) -> None:
    """One after the other, as the time is taken. What cannot run here is named, with the reason."""
    assert served.directory is not None
    remote = partial(Theirs.of_model, longest=longest, is_compiled=scale.is_compiled, dtype=served.dtype)
    kinds: dict[str, Callable[[Path, Path], Server]] = {
        OURS: partial(Ours.of_model, longest=longest, dtype=served.dtype),
        THEIRS: remote,
        THEIRS_UNRESERVED: partial(remote, environment=UNRESERVED),
    }
    for name in ways:
        with contextlib.ExitStack() as unless_up:
            try:
                server = kinds[name](served.directory, servers.scratch / f"{name}.log")
                server.name = name
                unless_up.callback(server.stop)
                result.starts[name] = server.wait_for_an_answer()
            except (Unavailable, Failed, OSError) as reason:
                servers.output.say(f"skipped {name}: {reason}")
                servers.output.record("skipped", name, reason=str(reason))
            else:
                servers.up[name] = server
                server.rest()
                unless_up.pop_all()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side("serve", __doc__, CASES, (OURS, *PEERS), quick="small, one round: does it run?")
    parser.add_argument("--model", metavar="DIR", type=Path, help="instead of a small one with random weights")
    shape_help = "of the model with random weights, in bfloat16 if it is not the small one; default: %(default)s"
    parser.add_argument("--shape", choices=(model.SMALL, model.REAL), default=model.SMALL, help=shape_help)
    options = parser.parse_args(arguments)
    if options.model is not None:
        try:
            model.longest(options.model)
        except ValueError as error:
            parser.exit(2, f"bench serve: {error}\n")
    return options


def told_to_end(number: int, frame: object) -> NoReturn:
    """Servers are stopped on the way out, and with them what they have started: nobody else knows of that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, told_to_end)
    values = {name: getattr(options, name) for name in ("rounds", "patience") if getattr(options, name) is not None}
    scale = replace(QUICK if options.quick else DEFAULT, **values)
    if options.shape == model.REAL and not options.quick:
        scale = replace(scale, loads=REAL_LOADS)
    output = Output("serve", is_json=options.json, folder=options.out)
    output.begin()
    before = look()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        servers = Servers(
            output,
            Patience(scale.patience),
            reference=OURS,
            rounds=scale.rounds,
            is_pinned=False,
            is_noisy=options.noisy,
            scratch=Path(scratch),
        )
        result = run(
            servers, scale, options.only.split(","), options.impl.split(","), Served(options.model, options.shape)
        )
    load = load_between(before, look())
    if scale.streams < DEFAULT.streams:  # the target is not for fewer
        result.streams = {}
    return conclude(output, OURS, list(goals.targets(result)), load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
