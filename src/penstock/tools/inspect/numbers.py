"""Numbers and names as a person reads them on a terminal."""

from __future__ import annotations


def in_units(nbytes: int) -> str:
    amount = float(nbytes % 2**64)  # the core hands unsigned numbers out as signed ones
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.0f} PiB"


def counted(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"


def in_seconds(ns: float) -> str:
    for limit, factor, unit in ((1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (60e9, 1e9, "s"), (3600e9, 60e9, "min")):
        if ns < limit:
            amount = ns / factor
            return f"{amount:.0f} {unit}" if amount >= 99.5 else f"{amount:.3g} {unit}"
    return f"{ns / 3600e9:.1f} h"


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
