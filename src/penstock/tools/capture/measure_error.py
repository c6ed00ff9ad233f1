"""Errors of `penstock measure`; each text is one line for the terminal."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import PenstockError
from penstock.installing import how_to_install


class MeasureError(PenstockError):
    """The target cannot be measured."""


class NotACaptureFile(MeasureError):
    """A file that is not a recording, or not of this version."""


def required(module: str, feature: str) -> Any:
    """Imports a module that only `penstock measure` needs. Raises MeasureError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        text = f"{feature} needs {package}, which is not installed: {how_to_install('measure')}"
        raise MeasureError(text) from None
