"""Draws a snapshot on a terminal: summary lines first, then as many table rows as fit.

`snapshot` and `snapshot_rates` have the numbers. Names are `Text`, as they may look like markup.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.server.status.snapshot import ChannelView, ProcessView, ServerSnapshot
from penstock.server.status.snapshot_rates import Rates, View
from penstock.tools.format import counted, in_seconds, in_units

BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 240  # snapshots
LABEL = 12  # columns in front of a curve or a bar
FIGURES = 26  # columns behind it
DEVICE, WAITING, CORE, DIM = "green", "red", "cyan", "dim"
STATES = {"serves": "green", "starting": "yellow", "draining": "yellow", "stopped": "bold red", "gone": "bold red"}
UNKNOWN = "–"
POOL_COLUMNS = ("spills", "no room")  # shown if one of them is not 0 everywhere
ITEMS = "images and embeddings"
TEXT_COLUMNS = ("process", "state", "channel", "kind", "slowest", "store", "held by", "shared memory", ITEMS, "counter")


class History:
    """The last values of the curves."""

    def __init__(self) -> None:
        self.tokens: deque[float] = deque(maxlen=HISTORY)
        self.steps: deque[float] = deque(maxlen=HISTORY)

    def add(self, rates: Rates | None) -> None:
        if rates is not None:
            self.tokens.append(rates.total("sampled_tokens"))
            self.steps.append(max((times.step or 0.0 for times in rates.steps), default=0.0))


def drawn(view: View, history: History, console: Console, gone: str = "", keys: str = "") -> RenderableType:
    """Draws a view. `gone`: why the server is gone; then the view is its last one. `keys`: what keys do."""
    width, moment, rates = console.width, view.moment, view.rates
    above: list[RenderableType] = [head(moment, width, gone), Text(keys, style=DIM, no_wrap=True, overflow="ellipsis")]
    above += [requests(moment, rates), latency(rates), tokens(moment, rates)]
    above += curves(history, width) + steps(rates, width) + coming_back(moment)
    left = (console.height - 1 if console.is_terminal else 1000) - len(above)
    ways = ("channel", "kind", "messages/s", "bytes/s", "behind", "slowest", "sleeps/s", "sender waits")
    tables = [
        (("process", "pid", "state", "restarts", "CPU", "own memory"), processes(view)),
        ((*ways, *POOL_COLUMNS) if has_pool_counts(moment) else ways, channels(view)),
        (("store", "kept", "hits", "hits/s", "keys held", "evicted", "held by"), stores(view)),
        (("shared memory", "size"), memory(moment)),
        ((ITEMS, *moment.items), items(moment)),
        (("counter", "number", "per second"), counters(view)),
    ]
    shown: list[RenderableType] = []
    for columns, rows in tables:
        room = left - 3  # an empty line, the columns' names, a line below them
        if not rows or room < 2:
            continue
        some = rows if len(rows) <= room else rows[: room - 1]
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=True, header_style="bold"
        )
        for column in columns:
            is_text = column in TEXT_COLUMNS
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
        for row in some:
            table.add_row(*row)
        if len(some) < len(rows):
            table.add_row(Text(f"… {len(rows) - len(some)} more", style=DIM))
        shown += [Text(), table]
        left -= 3 + len(some) + (len(some) < len(rows))
    return Group(*above, *shown)


# ── above the tables ─────────────────────────────────────────────────────────────────────────────────────────────────
def head(moment: ServerSnapshot, width: int, gone: str) -> Text:
    server_info = moment.server_info
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {server_info.name} ", style="bold reverse")
    line.append(
        f"  {server_info.url}   pid {server_info.pid}   up {in_seconds((moment.time - server_info.started) * 1e9)}"
    )
    line.append(f"   penstock {server_info.version}", style=DIM)
    if gone:
        line.append(f"   GONE: {gone.splitlines()[0]}", style="bold red")
    elif moment.is_draining:
        line.append("   draining", style="yellow")
    line.append("   " + time.strftime("%H:%M:%S", time.localtime(moment.time)), style=DIM)
    return line


def requests(moment: ServerSnapshot, rates: Rates | None) -> Text:
    line = label("requests")
    running, waiting = moment.total("num_requests_running"), moment.total("num_requests_waiting")
    figure(line, str(moment.total("open_requests")), "open")
    figure(line, str(running), "running")
    figure(line, str(waiting), "waiting", "yellow" if waiting else "")
    to_resume = moment.total("requests_waiting_to_resume")
    if to_resume:
        figure(line, str(to_resume), "waiting to resume", "yellow")
    new = moment.total("new_requests_waiting")
    if new:
        figure(line, str(new), "new waiting", "yellow")
    if rates is not None:
        figure(line, f"{rates.total('requests'):.1f}", "answered/s")
        figure(line, f"{rates.refused:.1f}", "refused/s", "red" if rates.refused else "")
    deaths(line, moment)
    return line


def deaths(line: Text, moment: ServerSnapshot) -> None:
    many, gone = moment.restarts, moment.gone
    figure(line, str(many), "restart" if many == 1 else "restarts", "yellow" if many else "")
    if gone:
        figure(line, str(gone), "gone", "red")


def latency(rates: Rates | None) -> Text:
    """Draws mean latencies of the answers that began, and of the tokens that came, since the last snapshot."""
    line = label("latency")
    figure(line, seconds(None if rates is None else rates.first_piece), "to the first token")
    figure(line, seconds(None if rates is None else rates.gap), "from token to token")
    return line


def tokens(moment: ServerSnapshot, rates: Rates | None) -> Text:
    blocks = moment.total("blocks")
    used = blocks - moment.total("free_blocks")
    line = label("tokens")
    figure(line, UNKNOWN if rates is None else amount(rates.total("computed_tokens")), "prompt/s")
    figure(line, UNKNOWN if rates is None else amount(rates.total("sampled_tokens")), "generated/s")
    share = f" ({used / blocks:.0%})" if blocks else ""
    figure(line, f"{used} of {blocks}{share}", "KV blocks", "yellow" if blocks and used > 0.95 * blocks else "")
    hits = moment.prefix_hit_share
    figure(line, UNKNOWN if hits is None else f"{hits:.0%}", "prefix hits")
    preemptions = moment.total("num_preemptions")
    figure(line, str(preemptions), "preemption" if preemptions == 1 else "preemptions", "red" if preemptions else "")
    return line


def curves(history: History, width: int) -> list[RenderableType]:
    return [
        curve("tokens/s", history.tokens, [amount(value) for value in history.tokens], width),
        curve("step time", history.steps, [seconds(value or None) for value in history.steps], width),
    ]


def curve(name: str, values: Sequence[float], labels: Sequence[str], width: int) -> Text:
    line = label(name)
    line.append(sparkline(values, max(10, width - LABEL - FIGURES)), style=DEVICE)
    if values:
        line.append(f"  {labels[-1]}, most {labels[values.index(max(values))]}")
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws the last values, the newest to the right; the highest is a full block, and only 0 is a blank."""
    some = list(values)[-width:]
    highest = max(some, default=0.0) or 1.0
    levels = [0 if value <= 0 else 1 + min(int(value / highest * 8), 7) for value in some]
    return " " * (width - len(some)) + "".join(BARS[level] for level in levels)


def steps(rates: Rates | None, width: int) -> list[RenderableType]:
    """Draws a bar for each group: the device's share of a step and its idle time, with the core's own time beside."""
    lines: list[RenderableType] = []
    engines = [] if rates is None else list(zip(rates.steps, rates.engines, strict=True))
    for number, (times, counters) in enumerate(engines):
        line = label(f"step {number}" if len(engines) > 1 else "a step")
        if times.step is None or times.device is None or times.waiting is None or times.core is None:
            line.append("none", style=DIM)
            lines.append(line)
            continue
        room = max(10, min(40, width - LABEL - 70))
        part = round(room * times.waiting / times.step) if times.step else 0
        line.append("█" * (room - part), style=DEVICE).append("█" * part, style=WAITING)
        line.append(f"  {seconds(times.step)}: ").append(f"device {seconds(times.device)}", style=DEVICE)
        line.append(" + ").append(f"waiting {seconds(times.waiting)}", style=WAITING)
        line.append("; core ").append(seconds(times.core), style=CORE).append(f"; {counters['engine_steps']:.0f}/s")
        lines.append(line)
    return lines


def coming_back(moment: ServerSnapshot) -> list[RenderableType]:
    """Draws a line for each group that was lost and does not serve yet."""
    return [
        label(f"group {group}").append(f"is coming back, {counted(waiting, 'request')} to resume", style="yellow")
        for group, waiting in moment.coming_back.items()
    ]


def label(name: str) -> Text:
    return Text(f"{name:<{LABEL}}", style="", no_wrap=True, overflow="ellipsis")


def figure(line: Text, number: str, unit: str, style: str = "") -> None:
    line.append(number, style=f"bold {style}").append(f" {unit}   ", style=DIM)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def processes(view: View) -> list[tuple[Text, ...]]:
    """Returns the rows of processes. The first row is shared memory, so that it is shown even if not all rows fit."""
    cpu = view.rates.cpu if view.rates is not None else [None] * len(view.moment.processes)
    shared = (Text("shared", style=DIM), *(Text() for _ in range(4)), Text(in_units(view.moment.shared_nbytes)))
    rows = [
        (
            Text(process.title),
            Text(str(process.pid or UNKNOWN)),
            Text(process.state, style=STATES[process.state]),
            restarts(process),
            Text(UNKNOWN if share is None or not process.pid else f"{share:.0%}"),
            Text(UNKNOWN if process.private_nbytes is None else in_units(process.private_nbytes)),
        )
        for process, share in zip(view.moment.processes, cpu, strict=True)
    ]
    return [shared, *rows]


def restarts(process: ProcessView) -> Text:
    many = process.restarts
    return Text(str(many), style="yellow" if many else DIM)


def has_pool_counts(moment: ServerSnapshot) -> bool:
    return any(channel.spills or channel.exhaustions for channel in moment.channels)


def channels(view: View) -> list[tuple[Text, ...]]:
    rates = view.rates.channels if view.rates is not None else [None] * len(view.moment.channels)
    has_counts = has_pool_counts(view.moment)
    rows: list[tuple[Text, ...]] = []
    for channel, rate in zip(view.moment.channels, rates, strict=True):
        behind = f"{channel.behind} ({in_units(channel.behind_nbytes)})" if channel.behind else "0"
        waits = (
            f"{in_seconds(channel.blocked * 1e9)} now" if channel.blocked else in_seconds(channel.longest_blocked * 1e9)
        )
        rows.append(
            (
                Text(channel.name),
                Text(channel.kind, style=DIM),
                Text(UNKNOWN if rate is None else amount(rate.records)),
                Text(UNKNOWN if rate is None else in_units(int(rate.nbytes))),
                Text(behind),
                Text(channel.slowest),
                Text(UNKNOWN if rate is None else amount(rate.sleeps)),
                Text(
                    waits if channel.longest_blocked or channel.blocked else UNKNOWN,
                    style="red" if channel.blocked else "",
                ),
                *(pool_counts(channel) if has_counts else ()),
            )
        )
    return rows


def pool_counts(channel: ChannelView) -> tuple[Text, Text]:
    return Text(f"{channel.spills:,}"), Text(f"{channel.exhaustions:,}", style="red" if channel.exhaustions else "")


def memory(moment: ServerSnapshot) -> list[tuple[Text, ...]]:
    kinds = sorted(moment.memory.items(), key=lambda item: -item[1])
    return [(Text(kind), Text(in_units(nbytes))) for kind, nbytes in kinds]


def items(moment: ServerSnapshot) -> list[tuple[Text, ...]]:
    """Returns one row: how many of all servers' values travel in which way; none without a store."""
    counts = moment.items
    return [(Text("all servers", style=DIM), *(Text(f"{many:,}") for many in counts.values()))] if counts else []


def counters(view: View) -> list[tuple[Text, ...]]:
    """Returns a row for each declared counter that is not 0: of all engines, or of all servers."""
    moment, rates = view.moment, view.rates
    views = [view for views in (moment.engines, moment.served, moment.servers) for view in views[:1]]
    rows = [(key, key in part.counters) for part in views for key in (*part.gauges, *part.counters) if "." not in key]
    return [
        (
            Text(key),
            Text(f"{total:,}" if isinstance(total, int) else amount(total)),
            Text(UNKNOWN if rates is None else amount(rates.total(key))) if is_counted else Text(),
        )
        for key, is_counted in rows
        if (total := moment.total(key))
    ]


def stores(view: View) -> list[tuple[Text, ...]]:
    rates = view.rates.stores if view.rates is not None else [None] * len(view.moment.stores)
    rows: list[tuple[Text, ...]] = []
    for store, rate in zip(view.moment.stores, rates, strict=True):
        lookups = store.hits + store.misses
        holders = ", ".join(f"{each.name} {in_units(each.nbytes)}" for each in store.holders[:2])
        rows.append(
            (
                Text(store.name),
                Text(f"{in_units(store.kept_nbytes)} of {in_units(store.nbytes)}"),
                Text(f"{store.hits / lookups:.0%} of {lookups}" if lookups else UNKNOWN),
                Text(UNKNOWN if rate is None else amount(rate.hits)),
                Text(f"{store.held_keys} of {store.keys}"),
                Text(f"{store.evictions} ({in_units(store.evicted_nbytes)})"),
                Text(holders or "-"),
            )
        )
    return rows


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def seconds(number: float | None) -> str:
    return UNKNOWN if number is None else in_seconds(number * 1e9)


def amount(number: float | None) -> str:
    """Returns a number with at most one decimal, or UNKNOWN."""
    if number is None:
        return UNKNOWN
    return f"{number:.1f}" if 0 < number < 99.95 else f"{number:,.0f}"
