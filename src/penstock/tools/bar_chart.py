"""Bar charts as SVG, written by hand: groups of horizontal bars on one logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from penstock.tools.format import short

OURS = ("#0b6e4f", "#39a078", "#7cc6a4", "#b5e2cf")
OTHERS = ("#6b7a99", "#93a0ba", "#b08968", "#c9a98b", "#8d6a9f", "#b39bc1", "#a8a8a8", "#cfcfcf", "#7f7f7f")
GROUP_WIDTH, LABEL_WIDTH, AXIS_WIDTH, VALUE_WIDTH = 92, 118, 560, 64
LEFT = GROUP_WIDTH + LABEL_WIDTH
BAR_HEIGHT, BAR_PITCH, GROUP_GAP, TOP = 15, 18, 14, 74
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
DARK, PALE, INK = "#1b1b1b", "#5a5a5a", "#333333"

Group = tuple[str, Sequence[tuple[str, float]]]
"""A label, and (implementation, value) in the order of the bars; what was not measured is left out."""


def draw(path: Path, title: str, subtitle: str, unit: str, groups: Sequence[Group]) -> None:
    """Writes the chart. Nothing is written if there is no positive value to show."""
    values = [value for _, group in groups for _, value in group if value > 0]
    if not values:
        return
    low = 10.0 ** math.floor(math.log10(min(values) * 0.999))
    high = 10.0 ** math.ceil(math.log10(max(values) * 1.001))
    height = TOP + sum(len(group) * BAR_PITCH + GROUP_GAP for _, group in groups) + 34
    width = LEFT + AXIS_WIDTH + VALUE_WIDTH
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(title, "16", "28", 17, DARK, " font-weight='600'"),
        _text(subtitle, "16", "48", 12, PALE),
        *_axis(low, high, unit, height - 30),
        *_bars(groups, low, high),
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _text(text: str, x: str, y: str, size: int, fill: str, weight: str = "", anchor: str = "") -> str:
    return f"<text x='{x}' y='{y}' font-size='{size}'{weight} fill='{fill}'{anchor}>{escape(text)}</text>"


def _across(value: float, low: float, high: float) -> float:
    return LEFT + AXIS_WIDTH * math.log10(value / low) / math.log10(high / low)


def _axis(low: float, high: float, unit: str, bottom: int) -> Iterator[str]:
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x = f"{_across(10.0**power, low, high):.1f}"
        yield f"<line x1='{x}' y1='{TOP - 8}' x2='{x}' y2='{bottom}' stroke='#dcdcdc'/>"
        yield _text(f"{_power(power)} {unit}", x, str(bottom + 16), 11, PALE, anchor=" text-anchor='middle'")


def _bars(groups: Sequence[Group], low: float, high: float) -> Iterator[str]:
    colours = _colours([name for _, group in groups for name, _ in group])
    y = float(TOP)
    for label, group in groups:
        yield _text(label, "16", f"{y + len(group) * BAR_PITCH / 2 + 1:.1f}", 12, DARK, " font-weight='600'")
        for name, value in group:
            end, ours = _across(max(value, low), low, high), " font-weight='600'" if name.startswith("penstock") else ""
            yield _text(name, str(LEFT - 8), f"{y + 11.5:.1f}", 12, INK, anchor=f" text-anchor='end'{ours}")
            bar = f"<rect x='{LEFT}' y='{y:.1f}' width='{max(end - LEFT, 1):.1f}' height='{BAR_HEIGHT}' rx='2' "
            yield f"{bar}fill='{colours[name]}'/>"
            yield _text(short(value), f"{end + 5:.1f}", f"{y + 11.5:.1f}", 11, INK)
            y += BAR_PITCH
        y += GROUP_GAP


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Ours in green, the others in quiet colours; the same name has the same colour in all groups."""
    ours, others = iter(OURS * 4), iter(OTHERS * 4)
    return {name: next(ours if name.startswith("penstock") else others) for name in dict.fromkeys(names)}


def _power(power: int) -> str:
    if 0 <= power < 4:
        return str(10**power)
    superscript = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{10.0**power:g}" if -4 < power < 0 else f"10{superscript}"
