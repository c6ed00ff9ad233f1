"""The answers of a pooling engine: the core itself sends each server the handles of its vectors, in its own loop."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.engine.output.output_state import Outputs
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Began, Delta, Finished, FinishReason, Started, Tokens
from penstock.tensor import Handle

Row = tuple[Started, Handle | None, FinishReason]


class VectorOutput:
    """Knows the samples with slots. No text is made, and no vector is opened."""

    def __init__(self, config: EngineConfig) -> None:
        self._started: dict[int, Started] = {}  # by slot
        self._slots: list[int] = []  # of the last message with vectors

    def forget_server(self, server: int) -> None:
        """Does nothing: the core aborts the requests of the server, and each slot is told."""

    def process(self, tokens: Tokens) -> Outputs:
        for slot in tokens.aborted:
            self._started.pop(slot, None)
        self._started.update((started.slot, started) for started in tokens.started)
        if tokens.slots is not None:
            self._slots = tokens.slots.tolist()
        vectors = dict(zip(self._slots, tokens.vectors, strict=True)) if tokens.vectors else {}
        rows: defaultdict[int, list[Row]] = defaultdict(list)
        for end in tokens.ended:
            started, vector = self._started.pop(end.slot), vectors.get(end.slot)
            rows[started.server].append((started, vector, end.reason if vector is None else FinishReason.STOP))
        return Outputs([(server, build_delta(own)) for server, own in rows.items()], [])


def build_delta(rows: list[Row]) -> Delta:
    """Builds the message for one server. Samples without a vector have failed."""
    rows = sorted(rows, key=lambda row: row[1] is None)
    size = len(rows)
    requests = [started.request for started, _, _ in rows]
    cached = np.array([started.cached for started, _, _ in rows], np.int32)
    cached_rows = np.flatnonzero(cached)
    return Delta(
        size,
        np.array([*requests, *([0] * size)], np.int32),
        b"",
        counts=np.zeros(size, np.uint16),
        finished=Finished(np.arange(size, dtype=np.uint16), np.array([reason for _, _, reason in rows], np.uint8)),
        began=Began(cached_rows.astype(np.uint16), cached[cached_rows]) if cached_rows.size else None,
        vectors=tuple(vector for _, vector, _ in rows if vector is not None),
    )
