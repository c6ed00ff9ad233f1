"""What every case of `bench/sources.py` is given, and how servers are brought up for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.run import Run
from bench.impls import Unavailable
from bench.serve_cases.cases import Servers
from bench.serve_cases.servers import Failed, Server

if TYPE_CHECKING:
    from bench.source_cases.payloads import Payload


class Context(Run):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ways = self.named("impl")
        # Milliseconds from submit to view, by the case of servers, payload, hits and way: `transfer` fills it.
        self.transfers: dict[tuple[str, str, str, str], float] = {}

    def ways_among(self, ways: Sequence[str]) -> tuple[str, ...]:
        return tuple(way for way in ways if way in self.ways)

    def select(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [payload for payload in payloads if payload.name in self.named("payloads")]

    @contextlib.contextmanager
    def servers(self, kinds: Mapping[str, Callable[[Path], Server]], reference: str) -> Iterator[Servers]:
        """Servers that answer, by name; each is made with the path of its log. What cannot run here is named."""
        servers = self.turns(reference, Servers, scratch=self.scratch)
        with contextlib.ExitStack() as stopping:
            for name, make in kinds.items():
                try:
                    server = make(self.scratch / f"{name}.log")
                    stopping.callback(server.stop)
                    server.wait_for_an_answer()
                except (Unavailable, Failed, OSError) as reason:
                    self.skip(name, reason)
                    continue
                servers.up[name] = server
                server.rest()
            yield servers
