"""Bar charts as SVG, written by hand: groups of horizontal bars on one logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from penstock.tools.format import short

OURS = ("#0b6e4f", "#39a078", "#7cc6a4", "#b5e2cf")
OTHERS = ("#6b7a99", "#93a0ba", "#b08968", "#c9a98b", "#8d6a9f", "#b39bc1", "#a8a8a8", "#cfcfcf", "#7f7f7f")
LABEL_WIDTH = 118
GROUP_WIDTH = 92
AXIS_WIDTH = 560
VALUE_WIDTH = 64
BAR_HEIGHT = 15
BAR_PITCH = 18
GROUP_GAP = 14
TOP = 74
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"

Group = tuple[str, Sequence[tuple[str, float]]]
"""A label, and (implementation, value) in the order of the bars; what was not measured is left out."""


def draw(path: Path, title: str, subtitle: str, unit: str, groups: Sequence[Group]) -> None:
    """Writes the chart. Nothing is written if there is no positive value to show."""
    values = [value for _, group in groups for _, value in group if value > 0]
    if not values:
        return
    low = 10.0 ** math.floor(math.log10(min(values) * 0.999))
    high = 10.0 ** math.ceil(math.log10(max(values) * 1.001))
    colours = _colours([name for _, group in groups for name, _ in group])
    height = TOP + sum(len(group) * BAR_PITCH + GROUP_GAP for _, group in groups) + 34
    width = GROUP_WIDTH + LABEL_WIDTH + AXIS_WIDTH + VALUE_WIDTH
    left = GROUP_WIDTH + LABEL_WIDTH

    def across(value: float) -> float:
        return left + AXIS_WIDTH * math.log10(value / low) / math.log10(high / low)

    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        f"<text x='16' y='28' font-size='17' font-weight='600' fill='#1b1b1b'>{escape(title)}</text>",
        f"<text x='16' y='48' font-size='12' fill='#5a5a5a'>{escape(subtitle)}</text>",
    ]
    bottom = height - 30
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x = across(10.0**power)
        lines.append(f"<line x1='{x:.1f}' y1='{TOP - 8}' x2='{x:.1f}' y2='{bottom}' stroke='#dcdcdc'/>")
        lines.append(
            f"<text x='{x:.1f}' y='{bottom + 16}' font-size='11' fill='#5a5a5a' text-anchor='middle'>"
            f"{_power(power)} {escape(unit)}</text>"
        )
    y = float(TOP)
    for label, group in groups:
        middle = y + len(group) * BAR_PITCH / 2 + 1
        lines.append(
            f"<text x='16' y='{middle:.1f}' font-size='12' font-weight='600' fill='#1b1b1b'>{escape(label)}</text>"
        )
        for name, value in group:
            end = across(max(value, low))
            weight = " font-weight='600'" if name.startswith("penstock") else ""
            lines.append(
                f"<text x='{left - 8}' y='{y + 11.5:.1f}' font-size='12' fill='#333333' text-anchor='end'{weight}>"
                f"{escape(name)}</text>"
            )
            lines.append(
                f"<rect x='{left}' y='{y:.1f}' width='{max(end - left, 1):.1f}' height='{BAR_HEIGHT}' rx='2' "
                f"fill='{colours[name]}'/>"
            )
            lines.append(
                f"<text x='{end + 5:.1f}' y='{y + 11.5:.1f}' font-size='11' fill='#333333'>{short(value)}</text>"
            )
            y += BAR_PITCH
        y += GROUP_GAP
    lines.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Ours in green, the others in quiet colours; the same name has the same colour in all groups."""
    ours, others = iter(OURS * 4), iter(OTHERS * 4)
    return {name: next(ours if name.startswith("penstock") else others) for name in dict.fromkeys(names)}


def _power(power: int) -> str:
    if 0 <= power < 4:
        return str(10**power)
    return (
        f"{10.0**power:g}"
        if -4 < power < 0
        else f"10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    )
