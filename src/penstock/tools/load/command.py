"""The command `penstock bench serve`: asks a server, and tells how it answered.

0: every request was answered. 1: some were not, and the table says why. 2: there was nothing to measure. 130 and 143:
SIGINT and SIGTERM ended the benchmark; the table is marked as partial, and has the requests answered by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import resource
import signal
import time
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.command_signals import REPEAT_S
from penstock.tools import tables
from penstock.tools.load import prompts, report
from penstock.tools.load.arrivals import Load
from penstock.tools.load.chat_request import Outcome, Whole, ask
from penstock.tools.load.http_client import Failure, Wire
from penstock.tools.load.latency_stats import Figures, figures_of, tokens_of
from penstock.tools.load.prompts import Body, Lines, RequestOptions, Size
from penstock.tools.load.sse_events import shown


class NothingToMeasure(ValueError):
    """The server does not answer as OpenAI's API does; the text says in which way."""


class Results(msgspec.Struct, kw_only=True):
    """The content of the file of `--result-filename`: the figures, after a description of the load."""

    url: str
    model: str
    workload: str
    interrupted: str | None  # name of the signal that ended the benchmark before its end
    figures: Figures


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark. Raises ValueError for invalid options, NothingToMeasure, and OSError for files."""
    is_chat = options.backend == "openai-chat" or (options.backend is None and options.images + options.videos > 0)
    for name in ("images", "videos"):
        if getattr(options, name) and not is_chat:
            raise ValueError(f"--{name} are for --backend openai-chat")
    if any(side % 2 for side in options.video_size):
        raise ValueError("--video-size has even numbers of pixels, as H.264 wants them")
    request_options = RequestOptions(
        is_chat=is_chat,
        **{name: getattr(options, name) for name in RequestOptions.__struct_fields__ if name != "is_chat"},
    )
    lines = None
    if options.dataset_path is not None:
        lines = prompts.read(options.dataset_path)  # once: it may be a pipe
        prompts.build_from_lines(lines, request_options, 1)  # what is wrong with them is said before anybody is asked
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each stream is one
    with EndSignal() as end_signal:
        results = asyncio.run(_run(options, request_options, lines, end_signal))
        _print(results, options)
    if results.interrupted:
        return 128 + signal.Signals[results.interrupted]
    return 1 if results.figures.failed else 0


def _print(results: Results, options: argparse.Namespace) -> None:
    title = f"{results.model} at {results.url}: {results.workload}"
    if results.interrupted:
        title += f"; partial: ended by {results.interrupted}"
    tables.print_tables(report.tables(title, results.figures))
    if options.result_filename is not None:
        options.result_filename.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


class EndSignal:
    """The first SIGINT or SIGTERM: it cancels the load, and the process prints its table. Handled until then; another
    signal after REPEAT_S ends the process without a table."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._received_at = 0.0
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> EndSignal:
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if self.name is None else signal.SIG_IGN)  # the process is about to end

    def _receive(self, number: int, _: object) -> None:
        if self.name is None:
            self.name, self._received_at = signal.Signals(number).name, time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the table is being printed
                self._cancel()
        elif time.monotonic() - self._received_at >= REPEAT_S:
            raise KeyboardInterrupt

    def cancels(self, task: asyncio.Future[None]) -> None:
        """Makes the signal cancel `task`, a task of the running loop."""
        self._cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self.name is not None:
            task.cancel()


async def _run(
    options: argparse.Namespace, request_options: RequestOptions, lines: Lines | None, end_signal: EndSignal
) -> Results:
    async with Wire(options.base_url, options.api_key, options.timeout) as wire:
        measured = Measured(options, request_options, wire, lines)
        doing = asyncio.ensure_future(measured.run())
        end_signal.cancels(doing)
        await asyncio.wait([doing])
        if not doing.cancelled():
            doing.result()
        return measured.results(end_signal.name if doing.cancelled() else None)


class Measured:
    """A run of the benchmark, with its results when it ends or is cancelled."""

    def __init__(
        self, options: argparse.Namespace, request_options: RequestOptions, wire: Wire, lines: Lines | None
    ) -> None:
        """`lines`: of a file of prompts; None: prompts are generated."""
        self._options = options
        self._request_options = request_options
        self._wire = wire
        self._lines = lines
        self._load = Load(wire, [], lambda outcome: None)
        self._cpu = 0.0
        self._until = 0.0

    async def run(self) -> None:
        options, wire, request_options = self._options, self._wire, self._request_options
        if not request_options.model:
            self._request_options = request_options = msgspec.structs.replace(
                request_options, model=await _first_model(wire)
            )
        if self._lines is None:
            size = await _size(wire, request_options)
            warming = await _build_bodies(request_options, size, options.num_warmups, "warm-up")
            bodies = await _build_bodies(request_options, size, options.num_prompts, "load")
        else:
            bodies = prompts.build_from_lines(self._lines, request_options, options.num_prompts)
            warming = bodies[: options.num_warmups]
        await Load(wire, warming, lambda outcome: None).closed(options.max_concurrency)
        with _progress(len(bodies)) as ended:
            self._load = load = Load(wire, bodies, ended)
            before = time.process_time()
            try:
                if options.request_rate is None:
                    await load.closed(options.max_concurrency)
                else:
                    await load.open(options.request_rate, request_options.seed)
            finally:
                self._until, self._cpu = time.perf_counter(), time.process_time() - before

    def results(self, interrupted: str | None) -> Results:
        options = self._options
        how = (
            f"{options.max_concurrency} at a time"
            if options.request_rate is None
            else f"{options.request_rate:g} a second"
        )
        return Results(
            url=options.base_url,
            model=self._request_options.model,
            workload=f"{options.num_prompts:,} requests, {how}",
            interrupted=interrupted,
            figures=figures_of(self._load.outcomes, self._until, self._cpu),
        )


async def _first_model(wire: Wire) -> str:
    answer = Whole()
    try:
        await wire.get("/v1/models", answer)
        if answer.status != 200:
            raise Failure(f"status {answer.status}", shown(bytes(answer.body)))
        named = msgspec.json.decode(bytes(answer.body))
        model: str = msgspec.convert(named["data"][0]["id"], str)
    except Failure as failure:
        raise NothingToMeasure(f"/v1/models: {failure.kind}: {failure}") from None
    except (ValueError, LookupError, TypeError):
        raise NothingToMeasure(f"/v1/models: {shown(bytes(answer.body))}: name the model with --model") from None
    return model


async def _size(wire: Wire, request_options: RequestOptions) -> Size:
    """Returns the tokens per word, from the server's token counts of two probes."""
    counts = []
    for words in prompts.PROBES:
        outcome = Outcome(time.perf_counter())
        await ask(wire, *prompts.probe(request_options, words), outcome)
        if outcome.failure is not None:
            raise NothingToMeasure(f"a request of {words} words: {outcome.failure.kind}: {outcome.failure}")
        if outcome.prompt_tokens is None:
            return Size()
        counts.append(outcome.prompt_tokens)
    return Size.of(counts)


async def _build_bodies(request_options: RequestOptions, size: Size, requests: int, purpose: str) -> list[Body]:
    bodies = []
    for index in range(requests):
        bodies.append(prompts.build_body(request_options, size, index, purpose))
        await asyncio.sleep(0)  # it can be cancelled
    return bodies


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """Yields a function to call with each outcome. Shows a progress bar on a terminal."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=total, failed=0, tokens=0)
        failed = tokens = 0

        def ended(outcome: Outcome) -> None:
            nonlocal failed, tokens
            failed += outcome.failure is not None
            tokens += tokens_of(outcome)
            progress.update(bar, advance=1, failed=failed, tokens=tokens)

        yield ended
