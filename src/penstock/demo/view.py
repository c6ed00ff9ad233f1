"""How the demonstration is shown: tables that are drawn anew, or a line per second.

Leaves to `sight` the numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from penstock.demo.keeper import Demo
from penstock.demo.sight import Sight
from penstock.tools.inspect import in_seconds, in_units


def summary(demo: Demo) -> str:
    sight = demo.look()
    counts = sight.counts
    wrong = f"{counts['wrong']} WRONG" if counts["wrong"] else "none wrong"
    text = (
        f"{sight.elapsed:.1f} s: {counts['steps']} steps, {counts['images']} images ({in_units(counts['written'])}) "
        f"checked {counts['right']} times without a copy ({in_units(counts['read'])}), {wrong}"
    )
    noticed = [one.noticed_ns - one.killed_ns for one in demo.casualties if one.killed_ns and one.noticed_ns]
    if noticed:
        text += f"; {len(noticed)} killed, each noticed within {in_seconds(max(noticed))}"
    return text


def show_plain(demo: Demo) -> Generator[None, None, None]:
    """A line per second."""
    next_line = 0.0
    while True:
        sight = demo.look()
        while demo.messages:
            print(f"{sight.elapsed:6.1f} s  ! {demo.messages.popleft()}", flush=True)
        if sight.at >= next_line:
            print(sight.line, flush=True)
            next_line = max(next_line, sight.at - 1) + 1
        else:
            demo.last_sight = sight.before  # the next line is about a whole second
        yield


def show_live(demo: Demo) -> Generator[None, None, None]:
    """Tables that are drawn anew four times a second, and describe the last second."""
    from rich.live import Live

    history: deque[Sight] = deque(maxlen=4)
    with Live(auto_refresh=False) as screen:
        while True:
            if len(history) == history.maxlen:
                demo.last_sight = history[0]
            sight = demo.look()
            history.append(sight)
            screen.update(drawn(sight, list(demo.messages)), refresh=True)
            yield


def drawn(sight: Sight, messages: list[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    channels = Table(box=box.SIMPLE)
    for column in ("channel", "records/s", "MB/s", "sleeps/s", "furthest behind", "longest wait: send", "receive"):
        channels.add_column(column, justify="left" if column == "channel" else "right")
    for name in ("submit", "steps", "answers"):
        channel = sight.channels[name]
        channels.add_row(
            f"{channel['kind']} '{name}'",
            f"{sight.rate(name + ' records'):.0f}",
            f"{sight.rate(name + ' nbytes') / 1e6:.2f}",
            f"{sight.rate(name + ' parks'):.0f}",
            in_units(max(end["furthest_behind_nbytes"] for end in channel["receivers"])),
            sight.longest_wait(name, "senders"),
            sight.longest_wait(name, "receivers"),
        )
    people = Table(box=box.SIMPLE)
    for column in ("process", "pid", "state", "epoch", "holds of the pool"):
        people.add_column(column, justify="left" if column in ("process", "state") else "right")
    epochs = {end["pid"]: end["epoch"] for end in sight.channels["steps"]["receivers"] if end["state"] == "live"}
    for name, pid in sorted(sight.pids.items()):
        epoch = str(epochs.get(pid, ""))
        people.add_row(name, str(pid), sight.state(pid), epoch, in_units(sight.holds(pid)))
    p50, p99 = sight.round_trips
    lines = [
        f"{sight.elapsed:.0f} s   {sight.rate('steps'):.0f} steps/s   {sight.rate('messages'):.0f} messages/s   "
        f"round trip p50 {in_seconds(p50)}, p99 {in_seconds(p99)}",
        f"{sight.rate('images'):.0f} images/s   {sight.rate('written') / 1e6:.0f} MB/s written, "
        f"{sight.rate('read') / 1e6:.0f} MB/s read where they lie   {sight.counts['right']} checksums right, "
        f"{sight.counts['wrong']} wrong",
        f"pool 'images': {sight.pool_text}",
    ]
    events = [Text(f"! {message}", style="yellow") for message in messages]
    return Group(*map(Text, lines), channels, people, *events)
