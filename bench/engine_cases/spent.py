"""Where the core's time goes: the parts of a step, each timed in the core of any tree, and told when it ends.

Leaves to the board what the core spends in all; two looks at a clock more for each part are in that.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.core import Core
from penstock.engine.tree import Member, Tree

FILE = "spent.json"
LAST = 400  # calls of each part, those of the end: all decode
# By name, where the method stands; a tree of another kind has not got all of them.
PARTS = {
    "take in": "_take_in",
    "plan": "_scheduler.plan",
    "finish": "_plan.finish",
    "whole state": "_whole_state",
    "apply": "_leader.sent",
    "send": "_steps.send",
    "note sent": "_scheduler.sent",
    "note done": "_scheduler.done",
    "outputs": "_answers.done",
    "board": "_publish",
}


def run_core(folder: str, tree: Tree, me: Member) -> None:
    run(Core(tree, me), folder)


def run(core: Core, folder: str) -> None:
    core.start()
    taken = {part: found for part, place in PARTS.items() if (found := _time(core, place)) is not None}
    core.run()
    core.close()
    told = {part: statistics.median(each) / 1e3 for part, each in taken.items() if each}
    Path(folder, FILE).write_text(json.dumps(told))


def _time(core: Core, place: str) -> deque[int] | None:
    """Nanoseconds of the last calls, to be filled. None: this core has no such part."""
    *path, name = place.split(".")
    owner: Any = core
    for each in path:
        owner = getattr(owner, each, None)
    method = getattr(owner, name, None)
    if method is None:
        return None
    taken: deque[int] = deque(maxlen=LAST)
    setattr(owner, name, partial(_timed, method, taken))
    return taken


def _timed(method: Callable[..., Any], taken: deque[int], *arguments: Any) -> Any:
    begin = time.perf_counter_ns()
    answer = method(*arguments)
    if answer is not False:  # nothing was to be planned
        taken.append(time.perf_counter_ns() - begin)
    return answer


def read(folder: Path) -> dict[str, float]:
    """Microseconds, by part; none, where the core did not come to its end."""
    path = folder / FILE
    told: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return told
