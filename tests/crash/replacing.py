"""A few actors: one after the other is killed and replaced by another of its kind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tests.crash.zygote import Child, Zygote


class Replacing:
    """`role` makes what the actor of a part is told; its function is `parts[part]`."""

    def __init__(self, zygote: Zygote, parts: dict[str, Callable[..., None]], role: Callable[[int, int], Any]) -> None:
        self.zygote = zygote
        self.parts = parts
        self.role = role
        self.cast: dict[str, tuple[int, Child]] = {}
        self.dead: list[Child] = []
        self._actors = 0
        for part in parts:
            self.add(part)

    def add(self, part: str) -> None:
        child = self.zygote.child(self.parts[part], self.role(int(part[-1]), self._actors))
        child.hear("ready")
        self.cast[part] = (self._actors, child)
        self._actors += 1

    def replace_one(self, chance: random.Random, pause: float) -> None:
        time.sleep(chance.random() ** 2 * pause)
        part = chance.choice(list(self.parts))
        child = self.cast.pop(part)[1]
        assert child.is_alive(), f"{part} ended; it said {child.heard()}"
        child.kill()
        child.gone_at()
        self.dead.append(child)
        self.add(part)

    def must_live(self) -> None:
        for part, (_, child) in self.cast.items():
            child.heard()
            assert child.is_alive(), f"{part} ended; it said {child.messages}"

    def close(self) -> None:
        for child in [*self.dead, *(child for _, child in self.cast.values())]:
            child.close()
