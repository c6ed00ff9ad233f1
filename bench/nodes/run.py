"""One run of `scripts/bench nodes`: what its cases are given, and where they put what they have found."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.output import Output
from bench.harness.quiet import Patience


@dataclass
class Run:
    options: argparse.Namespace
    output: Output
    patience: Patience
    scratch: Path
    rounds: int
    found: dict[str, Any] = field(default_factory=dict)  # by case; the targets are computed from it

    @property
    def is_quick(self) -> bool:
        quick: bool = self.options.quick
        return quick
