"""The server over HTTP, as its clients see it: beside vLLM's on the same weights, and alone on a simulated device.

Loads are made by `penstock bench serve`, the same for both, in rounds that take turns.

    PENSTOCK_PEER_PYTHON=… scripts/bench serve    all of it, beside vLLM where that interpreter has it: eight minutes
    scripts/bench serve --quick                   small, one round: does it run?
    scripts/bench serve --model DIR               another model than a small one with random weights
    scripts/bench serve --shape qwen3-0.6b --only load    random weights of that model's shape, in bfloat16
    PENSTOCK_LLAMA_SERVER=… scripts/bench serve --shape qwen3-0.6b --only load --impl penstock,llama.cpp
    scripts/bench serve --only streams,gone
    scripts/bench serve --impl penstock --only burst,step,tokens    1,024 chats at once; processor time of a step of one
                                                  stream, and of a token of 256 streams
    scripts/bench serve --quick --impl penstock --only pages --rounds 9    the cost of 10 open dashboards
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.harness.run import Run, side_by_side
from bench.impls import Unavailable
from bench.serve_cases import cases, front, goals, model, pages, pauses
from bench.serve_cases.cases import Load, Servers
from bench.serve_cases.servers import (
    LLAMA,
    OURS,
    PEERS,
    THEIRS,
    THEIRS_UNRESERVED,
    UNRESERVED,
    Failed,
    Llama,
    Ours,
    Server,
    Theirs,
)
from penstock.engine.model_dir import takes_images
from penstock.engine.protocol.config import EngineConfig

CASES = ("load", "pages", "streams", "gone", "burst", "step", "tokens", "migration")


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
    pages: Load
    streams: int
    stream_tokens: int
    disconnects: int
    burst: int  # chats at once
    token_streams: int
    kills: int
    migrating_streams: int
    kept_requests: int
    is_compiled: bool  # what vLLM computes: it is faster then, and starts later


DEFAULT = Scale(
    loads={"text": Load(96, 16), "images": Load(48, 8, "32", "32", images=1)},
    pages=Load(192, 16),
    streams=1000,
    stream_tokens=200,
    disconnects=20,
    burst=1024,
    token_streams=256,
    kills=7,
    migrating_streams=16,
    kept_requests=200,
    is_compiled=True,
)
QUICK = Scale(
    loads={"text": Load(8, 4, "32", "16"), "images": Load(4, 2, "16", "8", images=1)},
    pages=Load(96, 16),
    streams=50,
    stream_tokens=20,
    disconnects=2,
    burst=64,
    token_streams=32,
    kills=1,
    migrating_streams=8,
    kept_requests=40,
    is_compiled=False,
)
# A real size: what a machine computes, and not what processes and messages cost, decides there.
REAL_LOADS = {
    "16 requests, 8 at a time": Load(16, 8, "259", "48"),
    "decode of 8": Load(8, 8, "17", "48"),
    "decode of 8 behind 2,072": Load(8, 8, "2072", "48", is_repeated=True),
    "one request": Load(2, 1, "17", "48"),
    "prefill of 2,072": Load(2, 1, "2072", "2"),  # two tokens: one has no time per token
}


def measure(run: Run, scale: Scale) -> goals.Found:
    result, expected, ways = goals.Found(), run.named("only"), run.named("impl")
    servers = run.turns(OURS, Servers, scratch=run.scratch)
    served = Served(run.options.model, run.options.shape)
    if "load" in expected:
        directory = directory_of(served, servers)
        try:
            longest = model.longest(directory)
            start_all(run, servers, scale, result, replace(served, directory=directory), longest)
            has_images = takes_images(EngineConfig(model=str(directory)))
            for case, load in scale.loads.items():
                if has_images or not load.images:
                    result.loads[case] = cases.side_by_side(servers, case, load.within(longest))
        finally:
            for server in servers.up.values():
                server.stop()
            servers.up.clear()
    if "pages" in expected and OURS in ways:
        with failures_recorded(servers, "pages"):
            result.pages, result.page_cost = pages.pages(
                servers, directory_of(served, servers), scale.pages, served.dtype
            )
    if {"streams", "gone"} & set(expected) and OURS in ways:
        simulated = Ours.simulated(scale.streams, servers.scratch / "simulated.log")
        with failures_recorded(servers, "the simulated device"), contextlib.ExitStack() as stack:
            stack.callback(simulated.stop)
            result.starts.setdefault(OURS, simulated.wait_for_an_answer())
            if "streams" in expected:
                result.streams = cases.many_streams(servers, simulated, scale.streams, scale.stream_tokens)
            if "gone" in expected:
                result.gone = cases.clients_that_go(servers, simulated, scale.disconnects)
    if {"burst", "step", "tokens"} & set(expected) and OURS in ways:
        with failures_recorded(servers, "the front"):
            if "burst" in expected:
                result.burst = front.burst(servers, scale.burst, servers.rounds)
            if "step" in expected:
                result.step = front.light_step(servers, servers.rounds)
            if "tokens" in expected:
                result.tokens = front.streamed_tokens(servers, scale.token_streams, servers.rounds)
    if "migration" in expected and OURS in ways:
        directory = directory_of(served, servers)
        with failures_recorded(servers, "migration"):
            result.pauses = pauses.pauses(
                servers, directory, model.longest(directory), scale.kills, scale.migrating_streams
            )
            result.kept_memory = pauses.kept_memory(servers, servers.rounds, scale.kept_requests)
    cases.starts_told(servers, result.starts)
    return result


@contextlib.contextmanager
def failures_recorded(servers: Servers, name: str) -> Iterator[None]:
    """A case that fails is named with the reason, and the next begins."""
    try:
        yield
    except (Failed, OSError) as failure:
        servers.output.say(f"\n{name}: {failure}")
        servers.output.record("failed", OURS, reason=str(failure))


def directory_of(served: Served, servers: Servers) -> Path:
    """Returns the model's directory. Makes one with random weights at the first call, where none is given."""
    directory = served.directory or servers.scratch / "model"
    if not directory.exists():
        model.make(directory, served.shape)
    return directory


def start_all(run: Run, servers: Servers, scale: Scale, result: goals.Found, served: Served, longest: int) -> None:
    """One after the other, as the time is taken. What cannot run here is named, with the reason."""
    assert served.directory is not None
    remote = partial(Theirs.of_model, longest=longest, is_compiled=scale.is_compiled, dtype=served.dtype)
    kinds: dict[str, Callable[[Path, Path], Server]] = {
        OURS: partial(Ours.of_model, longest=longest, dtype=served.dtype),
        THEIRS: remote,
        THEIRS_UNRESERVED: partial(remote, environment=UNRESERVED),
        LLAMA: partial(Llama.of_model, longest=longest),
    }
    for name in run.named("impl"):
        with contextlib.ExitStack() as unless_up:
            try:
                server = kinds[name](served.directory, servers.scratch / f"{name}.log")
                server.name = name
                unless_up.callback(server.stop)
                result.starts[name] = server.wait_for_an_answer()
            except (Unavailable, Failed, OSError) as reason:
                run.skip(name, reason)
            else:
                servers.up[name] = server
                server.rest()
                unless_up.pop_all()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side("serve", __doc__, CASES, (OURS, *PEERS, LLAMA))
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


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    scale = (
        QUICK if options.quick else replace(DEFAULT, loads=REAL_LOADS if options.shape == model.REAL else DEFAULT.loads)
    )
    with Run("serve", options, rounds=3, patience=60.0) as run:
        result = measure(run, scale)
        if options.quick:  # the target is not for fewer streams
            result.streams, result.burst, result.tokens = {}, {}, {}
        return run.conclude(OURS, goals.targets(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
