"""Reports of captured channels: tables for people, rows for programs, a chart."""

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
        messages=stats.records,
        missed=stats.missed,
        gone=stats.gone,
        undecodable=stats.undecodable,
        seconds=(stats.last_ns - stats.first_ns) / 1e9,
    )
    for name, message in sorted(stats.classes.items()):
        about: dict[str, Any] = {"channel": channel, "message": name}
        figures: dict[str, Any] = {
            "messages": message.nbytes.count,
            "mean_bytes": message.nbytes.mean,
            "median_bytes": message.nbytes.median,
            "least_bytes": message.nbytes.least,
            "most_bytes": message.nbytes.most,
        }
        if message.edits.count:
            figures |= {
                "compared": message.edits.count,
                "mean_distance_bytes": message.edits.mean,
                "median_distance_bytes": message.edits.median,
                "upper_bounds": message.upper_bounds,
                "repeated_share": message.repeated_share,
            }
        if message.decode_ns.count:
            figures |= {
                "timed": message.decode_ns.count,
                "decode_us": message.decode_ns.median / 1e3,
                "encode_us": message.encode_ns.median / 1e3,
            }
        yield row("measure", "message", "penstock", **about, **figures)
        for piece, field_stats in message.fields.items() if name != PLAIN else ():
            yield row(
                "measure",
                "field",
                "penstock",
                **about,
                field=piece,
                mean_bytes=field_stats.nbytes / message.nbytes.count,
                share=field_stats.nbytes / max(message.nbytes.total, 1),
                present_share=field_stats.messages / message.nbytes.count,
                unchanged_share=field_stats.unchanged / field_stats.compared if field_stats.compared else 0.0,
            )


def tables_of(stats: ChannelStats) -> Iterator[Table]:
    source = stats.source
    classes = sorted(stats.classes.items(), key=lambda entry: -entry[1].nbytes.total)
    rows = [
        [
            name,
            f"{message.nbytes.count:,}",
            short(message.nbytes.mean),
            short(message.nbytes.median),
            f"{message.nbytes.least:,} – {message.nbytes.most:,}",
            *cells_of_distance(message),
            *(
                [duration(message.decode_ns.median), duration(message.encode_ns.median)]
                if message.decode_ns.count
                else ["-", "-"]
            ),
        ]
        for name, message in classes
    ]
    columns = ("message", "seen", "bytes, mean", "median", "range", "distance, mean", "median", "repeated", "decode",
               "encode")  # fmt: skip
    yield Table(f"{source.kind} '{source.name}'", columns, rows, list(notes_of(stats)))
    for name, message in classes:
        if name == PLAIN:
            continue
        fields = [
            [
                piece,
                short(field_stats.nbytes / message.nbytes.count),
                percent(field_stats.nbytes / max(message.nbytes.total, 1)),
                percent(field_stats.unchanged / field_stats.compared) if field_stats.compared else "-",
            ]
            for piece, field_stats in sorted(message.fields.items(), key=lambda each: -each[1].nbytes)
        ]
        yield Table(f"{name}, by field", ("field", "bytes per message", "share", "same as before"), fields)


def cells_of_distance(message: MessageStats) -> list[str]:
    if not message.edits.count:
        return ["-", "-", "-"]
    bound = "≤ " if message.upper_bounds else ""
    least = "≥ " if message.upper_bounds else ""
    return [
        bound + short(message.edits.mean),
        bound + short(message.edits.median),
        least + percent(message.repeated_share),
    ]


def notes_of(stats: ChannelStats) -> Iterator[str]:
    num_seen = stats.records
    if not num_seen and not stats.missed:
        yield "no message was sent meanwhile"
    if num_seen > 1 and stats.last_ns > stats.first_ns:
        yield f"{num_seen:,} records in {(stats.last_ns - stats.first_ns) / 1e9:.3g} s"
    if stats.missed:
        share = stats.missed / (stats.missed + num_seen)
        yield f"{stats.missed:,} more ({percent(share)}) were overwritten before they were seen"
    if stats.gone:
        yield f"{stats.gone:,} long ones were gone before they could be copied; they are not in the table"
    if stats.undecodable:
        yield f"{stats.undecodable:,} are not what the channel's description of its messages says"
    counted = sum(message.nbytes.count for message in stats.classes.values())
    compared = sum(message.edits.count for message in stats.classes.values())
    if 0 < compared < counted - len(stats.classes):
        yield f"{compared:,} of them compared with the one before: those of which both were seen, as time allowed"
    bounds = sum(message.upper_bounds for message in stats.classes.values())
    if bounds:
        yield f"≤: of {bounds:,} long and very different pairs an upper bound of the distance was counted"
    if any(message.decode_ns.count for message in stats.classes.values()):
        yield "decode, encode: median of reading and writing the struct without its classes; parts stay where they are"


def draw(all_stats: Sequence[ChannelStats], path: Path) -> None:
    """Draws bytes per message and the edit distance to the message before, for each class of each channel."""
    groups = []
    for stats in all_stats:
        for name, message in sorted(stats.classes.items()):
            label = name if len(all_stats) == 1 else f"{stats.source.name}: {name}"
            values = [("penstock", message.nbytes.mean)]
            if message.edits.count:
                values.append(("edit distance", message.edits.mean))
            for piece, field_stats in (
                sorted(message.fields.items(), key=lambda each: -each[1].nbytes) if name != PLAIN else ()
            ):
                values.append((f".{piece}", field_stats.nbytes / message.nbytes.count))
            groups.append((label, values))
    bar_chart.draw(path, "Bytes per message, by field, and what differs from the one before", "means", "B", groups)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def duration(ns: float) -> str:
    return f"{short(ns / 1e3)} µs"
