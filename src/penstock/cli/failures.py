"""Errors of a command: a line on standard error, and the exit status."""

import errno
import sys
from collections.abc import Callable

from penstock.installing import how_to_install


def status_of(run: Callable[[], int], command: str, extra: str) -> int:
    """Returns the status of `run()`, or of its error: 1 where memory is short, 2 where options or files are wrong."""
    try:
        return run()
    except ImportError as error:
        print(f"{command}: {error}: {how_to_install(extra)}", file=sys.stderr)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        print(f"{command}: {str(error) or 'out of memory'}", file=sys.stderr)
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return 1
    return 2
