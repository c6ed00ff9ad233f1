"""What the server was to reach, from what a run found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.harness.figures import Figures
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.serve_cases.pages import NO_PAGE, PAGES
from bench.serve_cases.pauses import ANOTHER, ONLY
from bench.serve_cases.servers import LLAMA, OURS, PEERS


@dataclass
class Found:
    """What a run has measured so far."""

    loads: dict[str, Outcome] = field(default_factory=dict)  # by case
    pages: Outcome = field(default_factory=Outcome)
    page_cost: float | None = None
    streams: Figures = field(default_factory=dict)
    gone: Figures = field(default_factory=dict)
    burst: Figures = field(default_factory=dict)
    step: Figures = field(default_factory=dict)
    tokens: Figures = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, Figures] = field(default_factory=dict)  # by what is there besides the group that is lost
    kept_memory: Figures = field(default_factory=dict)

    def ratio(self, case: str, key: str, *, is_least: bool = False) -> float | None:
        """Returns our figure divided by vLLM's, at the setting of vLLM that is worse for us."""
        outcome = self.loads.get(case)
        if outcome is None or OURS not in outcome.rounds:
            return None
        ratios = [1 / outcome.ratio(peer, key, OURS) for peer in PEERS if peer in outcome.rounds]
        return (min if is_least else max)(ratios, default=None)

    def served_at_once(self) -> float | None:
        """Returns the streams served at once: a stream that began after the end of another does not count."""
        if not self.streams:
            return None
        return min(self.streams["served"], self.streams["open_at_once"])


def targets(result: Found) -> Iterator[Target]:
    for case in result.loads or ("text", "images"):
        requests = result.ratio(case, "requests_per_s", is_least=True)
        yield Target(f"{case}: requests/s, ours over vLLM's", 1, "x", requests, is_least=True)
        yield Target(f"{case}: TTFT p50, ours over vLLM's", 1, "x", result.ratio(case, "ttft_ms"))
        yield Target(f"{case}: TPOT p50, ours over vLLM's", 1, "x", result.ratio(case, "tpot_ms"))
    for case, least in (("one request", 1.0), ("decode of 8", 1.3)):
        outcome = result.loads.get(case, Outcome())
        faster = outcome.ratio_if_measured(OURS, "requests_per_s", LLAMA)
        yield Target(f"{case}: requests/s, ours over llama.cpp's", least, "x", faster, is_least=True)
    front = result.ratio("text", "front_cpu_s")
    yield Target("CPU per token, server + core + output over API server + engine core", 0.5, "x", front)
    pages = result.pages.ratio_if_measured(NO_PAGE, "requests_per_s", PAGES)
    yield Target("10 open dashboards: time of a load, beside none", 1.01, "x", pages)
    pages = result.pages.ratio_if_measured(PAGES, "cpu_s", NO_PAGE)
    yield Target("10 open dashboards: CPU of a load, beside none", 1.01, "x", pages)
    yield Target("10 open dashboards: CPU beside an idle server", 10, "ms/s", result.page_cost)
    yield Target("streams open at once on one server, all served", 1000, "", result.served_at_once(), is_least=True)
    yield Target("server's memory for each of them", 100, "KB", result.streams.get("growth_kb"))
    yield Target("from the start to the first answer", 15, "s", result.starts.get(OURS))
    yield Target("a client goes, until its request is gone everywhere", 100, "ms", result.gone.get("gone_most_ms"))
    yield Target("a burst of 1,024 chats: TTFT p50", 200, "ms", result.burst.get("ttft_ms"))
    yield Target("a step of one stream: CPU of all processes", 0.5, "ms", result.step.get("sum"))
    yield Target("256 streams: CPU of server, core and output, 1,000 tokens", 9, "ms", result.tokens.get("front"))
    pause = result.pauses.get(ANOTHER, {}).get("pause_max_ms")
    yield Target("a worker is killed, another group is there: longest pause of a stream", 300, "ms", pause)
    beyond = result.pauses.get(ONLY, {}).get("beyond_restart_ms")
    yield Target("the same, the only group: longest pause beyond the restart", 200, "ms", beyond)
    yield Target("server's memory for an open request of 4,000 tokens", 40, "KB", result.kept_memory.get("difference"))
