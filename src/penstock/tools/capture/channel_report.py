"""What was seen of channels, told: tables for people, rows for programs, a chart. Leaves to `stats` the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.tools import bar_chart
from penstock.tools.capture.channel_stats import ChannelStats, MessageStats
from penstock.tools.capture.frame_fields import PLAIN
from penstock.tools.format import short
from penstock.tools.tables import Row, Table, row


def rows_of(stats: ChannelStats) -> Iterator[Row]:
    channel = stats.source.name
    yield row(
        "measure",
        "channel",
        "penstock",
        channel=channel,
        kind=stats.source.kind,
        messages=stats.seen,
        missed=stats.missed,
        gone=stats.gone,
        undecodable=stats.undecodable,
        seconds=(stats.last_ns - stats.first_ns) / 1e9,
    )
    for name, one in sorted(stats.classes.items()):
        about: dict[str, Any] = {"channel": channel, "message": name}
        figures: dict[str, Any] = {
            "messages": one.nbytes.count,
            "mean_bytes": one.nbytes.mean,
            "median_bytes": one.nbytes.median,
            "least_bytes": one.nbytes.least,
            "most_bytes": one.nbytes.most,
        }
        if one.edits.count:
            figures |= {
                "compared": one.edits.count,
                "mean_distance_bytes": one.edits.mean,
                "median_distance_bytes": one.edits.median,
                "upper_bounds": one.upper_bounds,
                "repeated_share": one.repeated_share,
            }
        if one.decode_ns.count:
            figures |= {
                "timed": one.decode_ns.count,
                "decode_us": one.decode_ns.median / 1e3,
                "encode_us": one.encode_ns.median / 1e3,
            }
        yield row("measure", "message", "penstock", **about, **figures)
        for piece, found in one.fields.items() if name != PLAIN else ():
            yield row(
                "measure",
                "field",
                "penstock",
                **about,
                field=piece,
                mean_bytes=found.nbytes / one.nbytes.count,
                share=found.nbytes / max(one.nbytes.total, 1),
                present_share=found.messages / one.nbytes.count,
                unchanged_share=found.unchanged / found.compared if found.compared else 0.0,
            )


def tables_of(stats: ChannelStats) -> Iterator[Table]:
    source = stats.source
    classes = sorted(stats.classes.items(), key=lambda one: -one[1].nbytes.total)
    rows = [
        [
            name,
            f"{one.nbytes.count:,}",
            short(one.nbytes.mean),
            short(one.nbytes.median),
            f"{one.nbytes.least:,} – {one.nbytes.most:,}",
            *cells_of_distance(one),
            *([duration(one.decode_ns.median), duration(one.encode_ns.median)] if one.decode_ns.count else ["-", "-"]),
        ]
        for name, one in classes
    ]
    columns = ("message", "seen", "bytes, mean", "median", "range", "distance, mean", "median", "repeated", "decode",
               "encode")  # fmt: skip
    yield Table(f"{source.kind} '{source.name}'", columns, rows, list(notes_of(stats)))
    for name, one in classes:
        if name == PLAIN:
            continue
        fields = [
            [
                piece,
                short(found.nbytes / one.nbytes.count),
                percent(found.nbytes / max(one.nbytes.total, 1)),
                percent(found.unchanged / found.compared) if found.compared else "-",
            ]
            for piece, found in sorted(one.fields.items(), key=lambda each: -each[1].nbytes)
        ]
        yield Table(f"{name}, by field", ("field", "bytes per message", "share", "same as before"), fields)


def cells_of_distance(one: MessageStats) -> list[str]:
    if not one.edits.count:
        return ["-", "-", "-"]
    most = "≤ " if one.upper_bounds else ""
    least = "≥ " if one.upper_bounds else ""
    return [most + short(one.edits.mean), most + short(one.edits.median), least + percent(one.repeated_share)]


def notes_of(stats: ChannelStats) -> Iterator[str]:
    seen = stats.seen
    if not seen and not stats.missed:
        yield "no message while we looked"
    if seen > 1 and stats.last_ns > stats.first_ns:
        yield f"{seen:,} records in {(stats.last_ns - stats.first_ns) / 1e9:.3g} s"
    if stats.missed:
        share = stats.missed / (stats.missed + seen)
        yield f"{stats.missed:,} more ({percent(share)}) were overwritten before they were seen"
    if stats.gone:
        yield f"{stats.gone:,} long ones were gone before they could be copied; they are not in the table"
    if stats.undecodable:
        yield f"{stats.undecodable:,} are not what the channel's description of its messages says"
    counted = sum(one.nbytes.count for one in stats.classes.values())
    compared = sum(one.edits.count for one in stats.classes.values())
    if 0 < compared < counted - len(stats.classes):
        yield f"{compared:,} of them compared with the one before: those of which both were seen, as time allowed"
    bounds = sum(one.upper_bounds for one in stats.classes.values())
    if bounds:
        yield f"≤: of {bounds:,} long and very different pairs an upper bound of the distance was counted"
    if any(one.decode_ns.count for one in stats.classes.values()):
        yield "decode, encode: median of reading and writing the struct without its classes; parts stay where they are"


def draw(all_stats: Sequence[ChannelStats], path: Path) -> None:
    """Bytes per message and the distance to the one before, for each class of each channel."""
    groups = []
    for stats in all_stats:
        for name, one in sorted(stats.classes.items()):
            label = name if len(all_stats) == 1 else f"{stats.source.name}: {name}"
            values = [("penstock", one.nbytes.mean)]
            if one.edits.count:
                values.append(("edit distance", one.edits.mean))
            for piece, found in sorted(one.fields.items(), key=lambda each: -each[1].nbytes) if name != PLAIN else ():
                values.append((f".{piece}", found.nbytes / one.nbytes.count))
            groups.append((label, values))
    bar_chart.draw(path, "Bytes per message, by field, and what differs from the one before", "means", "B", groups)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def duration(ns: float) -> str:
    return f"{short(ns / 1e3)} µs"
