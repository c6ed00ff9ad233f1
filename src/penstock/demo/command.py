"""`penstock demo`: from the start to the exit status."""

from __future__ import annotations

import contextlib
import signal
import sys

from penstock.demo.keeper import Demo, Ended, Options
from penstock.demo.plumbing import Figures
from penstock.demo.view import show_live, show_plain, summary


def run(options: Options) -> int:
    """Runs until Ctrl-C, or for so many seconds. 0: all went well."""
    show = show_plain if options.is_plain or not sys.stdout.isatty() else show_live
    if show is show_live:
        try:
            import rich.live  # noqa: F401
        except ImportError:
            show = show_plain
    status = 0
    reason = ""
    demo = Demo(options)
    try:
        demo.start()
        with contextlib.closing(show(demo)) as shown:
            while options.seconds is None or demo.elapsed < options.seconds:
                demo.turn(0.25)
                next(shown)
    except KeyboardInterrupt:
        pass
    except Ended as error:
        status, reason = 1, str(error)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the tidying up
        late = demo.stop()
        signal.signal(signal.SIGINT, before)
    if late and not status:
        status, reason = 1, f"{', '.join(late)} did not end within 3 s and had to be killed"
    if demo.figures[Figures.WRONG] > 0:
        status, reason = 1, reason or "some images were not what was sent"
    print(summary(demo))
    if reason:
        print(f"penstock demo: {reason}", file=sys.stderr)
    return status
