"""A request as its server keeps it while it is open, so that it can be submitted again when its group is lost.

A `Delta` carries ids together with the text that they have made visible. So the ids received of each sample say exactly
what the client of the server has got: a group that gets them continues the answer after them.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
from msgspec.structs import replace

from penstock.engine.client.router import traces
from penstock.engine.protocol.messages import Ints, Progress, Submit


class SubmittedRequest:
    """The first `Submit` of a request, and the ids that its samples have generated since."""

    __slots__ = (
        "_generated",
        "_max_tokens",
        "failed_migrations",
        "failures",
        "first",
        "kept_tokens",
        "migrations",
        "request_id",
    )

    def __init__(self, first: Submit, request_id: str = "", max_tokens: int | None = None) -> None:
        """`request_id` is written into the log. `max_tokens`: of the prompt and all samples, up to which the request is
        kept; None: any number."""
        self.first = first
        self._generated: dict[int, array[int] | None] = {}  # by sample; None: the sample is over
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self.request_id = request_id
        self.kept_tokens = first.prompt.size  # of the prompt, and of samples that are not over
        self.migrations = 0  # losses of a group that count towards the limit
        self.failed_migrations = 0  # those of them after a failure that no request has been found to be the reason of
        self.failures = 0  # of processes by themselves, while this request was in a step in flight

    @property
    def is_too_long(self) -> bool:
        """Returns whether the request has had more tokens than are kept: it cannot be resumed any more."""
        return self.kept_tokens > self._max_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Returns the key by which requests are submitted again: as the core orders them."""
        return self.first.priority, self.first.arrived_ns

    @property
    def traces(self) -> list[bytes]:
        """Returns the keys of the request's affinity to a group."""
        inputs = self.first.inputs
        keys = [] if inputs is None else [item.key for item in inputs.items if item.key is not None]
        return traces(self.first.prompt, self.first.salt, keys)

    def add(self, sample: int, ids: list[int], is_over: bool) -> None:
        """Keeps generated ids of a sample; those of a sample that is over are dropped, as it is not resumed."""
        if self.kept_tokens > self._max_tokens:
            return
        kept = self._generated.get(sample)
        if kept is None:
            kept = self._generated[sample] = array("i")
        kept.extend(ids)
        self.kept_tokens += len(ids)
        if is_over:
            self.kept_tokens -= len(kept)
            self._generated[sample] = None
        elif self.kept_tokens > self._max_tokens:
            self._generated.clear()

    def submit(self, request: int) -> Submit:
        """Returns the message that begins the request, or continues it, under this number."""
        return replace(self.first, request=request, progress=self._progress(), failures=self.failures)

    def _progress(self) -> Progress | None:
        if not self._generated:
            return None
        samples = [self._generated.get(sample, _NO_IDS) for sample in range(self.first.params.n)]
        counts: Ints = np.array([-1 if ids is None else len(ids) for ids in samples], np.int32)
        return Progress(counts, np.concatenate([np.frombuffer(ids, np.int32) for ids in samples if ids is not None]))


_NO_IDS: array[int] = array("i")
