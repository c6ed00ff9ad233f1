"""The cost of open dashboards: the same load on the same server, without a page and with some, in turns."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.turns import Outcome
from bench.serve_cases import model
from bench.serve_cases.cases import Load, Servers, measured
from bench.serve_cases.servers import OURS, Failed, Ours, Server

NO_PAGE, PAGES = "no page", "10 pages"
COUNTS = {NO_PAGE: 0, PAGES: 10}
IDLE_S = 10.0  # seconds of a measurement without a load
POLL_S = 1.0  # seconds from an answer to the next poll, as the page waits
KEYS = ("requests_per_s", "ttft_ms", "tpot_ms", "cpu_s")


def pages(servers: Servers, directory: Path, load: Load, dtype: str) -> tuple[Outcome, float]:
    """Measures a server with each number of open pages, and prints the ratios. Returns the outcome, and the processor
    time of open pages without a load, in ms a second. Raises Failed if the server does not start."""
    longest = model.longest(directory)
    load = load.within(longest)

    def measure(server: Server, count: int, scratch: Path, seed: int) -> Figures:
        with open_pages(server, count):
            figures = measured(server, load, scratch, seed)
        roles = sum(value for key, value in figures.items() if key.endswith("_cpu_s") and key != "front_cpu_s")
        return {**{key: figures[key] for key in KEYS[:3]}, "cpu_s": roles}

    server = Ours.of_model(directory, servers.scratch / "pages.log", longest=longest, dtype=dtype)
    servers.up = dict.fromkeys(COUNTS, server)
    try:
        server.wait_for_an_answer()
        idle = {name: idle_cpu(server, count) for name, count in COUNTS.items()}
        cost = idle[PAGES] - idle[NO_PAGE]
        servers.output.record("idle pages", OURS, **idle)
        servers.output.say(
            f"\n{PAGES} take {cost:.1f} ms of a processor each second, beside {idle[NO_PAGE]:.1f} of an idle server"
        )
        outcome = servers.take(COUNTS, measure, servers.rounds)
    finally:
        servers.up = {}
        server.stop()
    rows = [(name, [short(outcome.figures(name)[key]) for key in KEYS]) for name in outcome.rounds]
    if outcome.rounds.keys() == COUNTS.keys():
        ratios = {f"{key}_ratio": outcome.ratio(PAGES, key, NO_PAGE) for key in KEYS}
        rows.append((f"{PAGES}, times {NO_PAGE}", [f"×{ratio:.3f}" for ratio in ratios.values()]))
        quiet = {"foreign_cores": outcome.foreign_cores, "quiet": outcome.is_quiet}
        servers.output.record("pages", OURS, **vars(load), **ratios, rounds=servers.rounds, **quiet)
    columns = ["requests/s", "TTFT, ms p50", "TPOT, ms p50", "CPU of all processes, s a 1,000 tokens"]
    servers.output.table(f"open dashboards; {load}", columns, rows)
    return outcome, cost


def idle_cpu(server: Server, count: int) -> float:
    """Returns the processor time of all processes of a server without requests, in ms a second."""
    with open_pages(server, count):
        time.sleep(POLL_S)  # the page itself and its history are read once
        before = sum(server.cpu_seconds().values())
        time.sleep(IDLE_S)
        return (sum(server.cpu_seconds().values()) - before) * 1e3 / IDLE_S


@contextlib.contextmanager
def open_pages(server: Server, count: int) -> Iterator[None]:
    """Polls what `count` open pages poll. Raises Failed if a poll was not answered."""
    is_over, failures = threading.Event(), list[str]()
    threads = [threading.Thread(target=_poll, args=(server, is_over, failures)) for _ in range(count)]
    for number, thread in enumerate(threads):
        thread.start()
        is_over.wait(POLL_S / len(threads) * (number < len(threads) - 1))  # pages are opened at different times
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise Failed(f"{server.name}: a page was not answered: {failures[0]}")


def _poll(server: Server, is_over: threading.Event, failures: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    addresses = ["/dashboard", "/dashboard/data", "/dashboard/history"]
    try:
        with contextlib.closing(connection):
            while not is_over.is_set():
                for address in addresses:
                    connection.request("GET", address)
                    answer = connection.getresponse()
                    if len(answer.read()) < 100 or answer.status != 200:
                        failures.append(f"{address}: status {answer.status}")
                addresses = ["/dashboard/data"]
                is_over.wait(POLL_S)
    except (OSError, http.client.HTTPException) as error:
        failures.append(repr(error))
