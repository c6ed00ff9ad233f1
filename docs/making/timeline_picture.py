"""Draws a piece of a trace as SVG: python docs/making/timeline_picture.py TRACE.json BEGIN_MS END_MS OUT.svg

`penstock trace` writes the trace. Perfetto shows the same tracks; a picture of it would be a bitmap.
"""

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {"device": "#0b6e4f", "gap": "#d98e04", "wait": "#dfe4ec", "send": "#1b4f9c", "take": "#1b4f9c"}
NAMES = {"device": "device", "gap": "gap", "wait": "wait", "send": "send, take, and an arrow for each record"}
LEFT, WIDTH, ROW, TOP = 210, 730, 17, 66
LEAST = 1.6  # pixels of a slice
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"

Event = dict[str, Any]


class Picture:
    def __init__(self, events: list[Event], begin_us: float, end_us: float) -> None:
        self.begin, self.end = begin_us, end_us
        self.lines: list[str] = []
        self.rows: dict[tuple[int, int], float] = {}
        named = [event for event in events if event["ph"] == "M"]
        self.processes = {one["pid"]: one["args"]["name"] for one in named if one["name"] == "process_name"}
        self.tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in named if one["name"] == "thread_name"}
        self.orders = {
            (one["pid"], one["tid"]): one["args"]["sort_index"] for one in named if one["name"] == "thread_sort_index"
        }
        self.slices = [
            event
            for event in events
            if event["ph"] == "X" and event["ts"] < end_us and event["ts"] + event["dur"] > begin_us
        ]
        self.arrows = {
            half: {event["id"]: event for event in events if event["ph"] == half and begin_us <= event["ts"] < end_us}
            for half in "sf"
        }

    def across(self, us: float) -> float:
        return LEFT + WIDTH * (min(max(us, self.begin), self.end) - self.begin) / (self.end - self.begin)

    def draw(self, title: str) -> str:
        height = self.place_rows()
        self.axis(height)
        for category in ("wait", "gap", "device", "take", "send"):
            for event in self.slices:
                if event["cat"] == category:
                    self.slice(event)
        for id, begin in self.arrows["s"].items():
            if id in self.arrows["f"]:
                self.arrow(begin, self.arrows["f"][id])
        head = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {LEFT + WIDTH + 20} {height + 34}' {FONT}>",
            f"<rect width='{LEFT + WIDTH + 20}' height='{height + 34}' fill='#ffffff'/>",
            f"<text x='16' y='24' font-size='15' font-weight='600' fill='#1b1b1b'>{escape(title)}</text>",
        ]
        return "\n".join([*head, *self.legend(), *self.lines, "</svg>"]) + "\n"

    def legend(self) -> list[str]:
        lines, x = [], 16
        for category, name in NAMES.items():
            lines.append(f"<rect x='{x}' y='37' width='12' height='10' fill='{COLOURS[category]}'/>")
            lines.append(f"<text x='{x + 17}' y='46' font-size='11' fill='#333333'>{name}</text>")
            x += 40 + 6 * len(name)
        return lines

    def place_rows(self) -> float:
        """Gives each track that has something in this time a row, under the name of its process."""
        y = float(TOP)
        used = {(event["pid"], event["tid"]) for event in self.slices}
        for pid, process in sorted(self.processes.items()):
            tracks = sorted((track for track in used if track[0] == pid), key=lambda track: self.orders[track])
            if not tracks:
                continue
            self.lines.append(
                f"<text x='16' y='{y + 12}' font-size='12' font-weight='600' fill='#1b1b1b'>{escape(process)}</text>"
            )
            y += ROW
            for track in tracks:
                self.rows[track] = y
                name = escape(self.tracks[track])
                self.lines.append(
                    f"<text x='{LEFT - 8}' y='{y + 11}' font-size='11' fill='#5a5a5a' text-anchor='end'>{name}</text>"
                )
                y += ROW
            y += 6
        return y

    def axis(self, bottom: float) -> None:
        step = 1000.0 * max(1, round((self.end - self.begin) / 8000))
        at = self.begin
        while at <= self.end:
            x = self.across(at)
            self.lines.append(f"<line x1='{x:.1f}' y1='{TOP - 6}' x2='{x:.1f}' y2='{bottom}' stroke='#e6e6e6'/>")
            self.lines.append(
                f"<text x='{x:.1f}' y='{bottom + 16}' font-size='11' fill='#5a5a5a' text-anchor='middle'>"
                f"{(at - self.begin) / 1000:.0f} ms</text>"
            )
            at += step

    def slice(self, event: Event) -> None:
        begin, end = self.across(event["ts"]), self.across(event["ts"] + event["dur"])
        y = self.rows[event["pid"], event["tid"]]
        title = escape(f"{event['name']}: {event['dur'] / 1000:.3f} ms")
        self.lines.append(
            f"<rect x='{begin:.1f}' y='{y}' width='{max(end - begin, LEAST):.1f}' height='{ROW - 4}' "
            f"fill='{COLOURS[event['cat']]}'><title>{title}</title></rect>"
        )

    def arrow(self, begin: Event, end: Event) -> None:
        y1, y2 = (self.rows[one["pid"], one["tid"]] + ROW / 2 - 2 for one in (begin, end))
        self.lines.append(
            f"<line x1='{self.across(begin['ts']):.1f}' y1='{y1}' x2='{self.across(end['ts']):.1f}' y2='{y2}' "
            "stroke='#1b4f9c' stroke-width='0.7' stroke-opacity='0.55'/>"
        )


def main() -> None:
    trace, begin_ms, end_ms, out = sys.argv[1:]
    events = json.loads(Path(trace).read_text())["traceEvents"]
    picture = Picture(events, float(begin_ms) * 1000, float(end_ms) * 1000)
    title = f"{float(end_ms) - float(begin_ms):g} ms of a server under load, by penstock trace"
    Path(out).write_text(picture.draw(title))


if __name__ == "__main__":
    main()
