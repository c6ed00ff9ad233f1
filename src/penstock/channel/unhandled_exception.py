"""Tells the other side of each open end which exception ends this process."""

from __future__ import annotations

import atexit
import sys

from penstock import _native


def _fail_open_ends() -> None:
    """The interpreter notes an unhandled exception before it ends. In an interactive session, any exception."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):
        _native.fail_open_ends(error)


atexit.register(_fail_open_ends)
