"""Numbers as people and programs read them: three digits that matter, and no digits that say nothing."""

from __future__ import annotations

from typing import Any


def short(value: float) -> str:
    """Three digits that matter; thousands as k and M."""
    if value == 0:
        return "0"
    for unit, factor in (("M", 1e6), ("k", 1e4)):
        if abs(value) >= factor:
            scaled = value / (1e6 if unit == "M" else 1e3)
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tidy(value: Any) -> Any:
    """No digits that say nothing."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 4)
    return value
