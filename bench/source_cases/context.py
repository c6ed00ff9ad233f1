"""What every case of `bench/sources.py` is given, and how servers are brought up for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.output import Output
from bench.harness.quiet import Patience
from bench.impls import Unavailable
from bench.serve_cases.cases import Servers
from bench.serve_cases.servers import Failed, Server

if TYPE_CHECKING:
    from bench.source_cases.payloads import Payload


@dataclass(frozen=True)
class Context:
    output: Output
    scratch: Path
    rounds: int
    patience: float
    is_quick: bool
    is_noisy: bool
    ways: Sequence[str]
    payloads: Sequence[str] = ()  # names of sizes; none: all
    # Milliseconds from submit to view, by the case of servers, payload, hits and way: `transfer` fills it.
    transfers: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    def ways_among(self, ways: Sequence[str]) -> tuple[str, ...]:
        return tuple(way for way in ways if way in self.ways)

    def select(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [payload for payload in payloads if not self.payloads or payload.name in self.payloads]

    @contextlib.contextmanager
    def servers(self, kinds: Mapping[str, Callable[[Path], Server]], reference: str) -> Iterator[Servers]:
        """Servers that answer, by name; each is made with the path of its log. What cannot run here is named."""
        servers = Servers(
            self.output,
            Patience(self.patience),
            reference=reference,
            rounds=self.rounds,
            is_pinned=False,
            is_noisy=self.is_noisy,
            scratch=self.scratch,
        )
        with contextlib.ExitStack() as stopping:
            for name, make in kinds.items():
                try:
                    server = make(self.scratch / f"{name}.log")
                    stopping.callback(server.stop)
                    server.wait_for_an_answer()
                except (Unavailable, Failed, OSError) as reason:
                    self.output.say(f"skipped {name}: {reason}")
                    self.output.record("skipped", name, reason=str(reason))
                    continue
                servers.up[name] = server
                server.rest()
            yield servers
