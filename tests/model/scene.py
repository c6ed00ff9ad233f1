"""A scene: processes, their words, and what must have come of them; that it holds, and that it can fail.

A test builds it whole, or with one part of the native code left out (a mutation, a sentence), and says either

    scene().holds(1_000, "weak")                             no interleaving breaks it, and there were as many states
    scene("no fence").fails("no process will wake it", "tso")    some interleaving breaks it, and this is how

The walking is done by explorer.py; what the words mean is left to the tests.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import pytest

from tests.model.explorer import Explored, Process, View, Violation, Without, explore

Words = dict[Hashable, Hashable]


@dataclass(frozen=True)
class Scene:
    memory: Words
    processes: list[Process]
    at_end: Callable[[View], None] | None = None
    invariant: Callable[[View], None] | None = None
    must_end: bool = False  # from every state there is a way to an end: see Walk
    faults: int = 1
    limit: int = 400_000
    left_out: Without = None

    def without(self, order: str, half: str) -> "Scene":
        """The same, and everything that acquires, or releases, by that name (orders.py) is relaxed."""
        return replace(self, left_out=(order, half))

    def holds(self, more_than: int, model: str = "sc") -> None:
        """No interleaving breaks it. A scene that ends after fewer states did not go where it was meant to."""
        explored = self._explored(model)
        print(explored)
        assert explored.states > more_than, f"{explored}: more than {more_than} states were expected"

    def fails(self, how: str, model: str = "sc") -> None:
        """Some interleaving breaks it, in the way that `how`, a regular expression, says."""
        with pytest.raises(Violation, match=how) as fault:
            self._explored(model)
        print(fault.value)

    def _explored(self, model: str) -> Explored:
        return explore(
            self.memory,
            self.processes,
            model=model,
            faults=self.faults,
            invariant=self.invariant,
            at_end=self.at_end,
            must_end=self.must_end,
            limit=self.limit,
            without=self.left_out,
        )


# How a scene fails when no step was wrong by itself.
ASLEEP = "sleeps and no process will wake it"
WAITS = "waits for ever"
BUSY = "busy for ever"
