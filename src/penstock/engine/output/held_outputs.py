"""Outputs of samples that wait for the end of an interval, see `EngineConfig.stream_interval`."""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.text.answer_text import Piece


class HeldOutput(NamedTuple):
    ids: list[int]
    texts: list[str]
    pieces: list[Piece]


class HeldOutputs:
    """By slot."""

    def __init__(self) -> None:
        self._outputs: dict[int, HeldOutput] = {}

    def hold(self, slot: int, output: HeldOutput) -> None:
        """Adds an output to those that the slot has."""
        held = self._outputs.setdefault(slot, output)
        if held is not output:
            held.ids.extend(output.ids)
            held.texts.extend(output.texts)
            held.pieces.extend(output.pieces)

    def take(self, slot: int) -> HeldOutput:
        """Returns what the slot has, and forgets it."""
        return self._outputs.pop(slot, None) or HeldOutput([], [], [])
