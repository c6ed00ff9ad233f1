"""Numbers and names as people read them: bytes and times in units, three digits that matter."""

from __future__ import annotations

from typing import Any


def in_units(nbytes: int) -> str:
    amount = float(nbytes % 2**64)  # the core hands unsigned numbers out as signed ones
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.0f} PiB"


def in_seconds(ns: float) -> str:
    for limit, factor, unit in ((1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (60e9, 1e9, "s"), (3600e9, 60e9, "min")):
        if ns < limit:
            amount = ns / factor
            return f"{amount:.0f} {unit}" if amount >= 99.5 else f"{amount:.3g} {unit}"
    return f"{ns / 3600e9:.1f} h"


def short(value: float) -> str:
    """Returns three digits that matter; thousands as k, from 10,000 on, and millions as M."""
    if value == 0:
        return "0"
    for unit, factor in (("M", 1e6), ("k", 1e4)):
        if abs(value) >= factor:
            scaled = value / (1e6 if unit == "M" else 1e3)
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tidy(value: Any) -> Any:
    """Returns a float with at most four decimals, for a line of JSON, and anything else as it is."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 4)
    return value


def counted(many: int, noun: str) -> str:
    return f"{many} {noun}{'' if many == 1 else 's'}"


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
