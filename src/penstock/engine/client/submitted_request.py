"""A request as its server keeps it while it is open: the server submits it again when its group is lost.

A `Delta` carries ids together with the text of these ids. The ids received of each sample are exactly the ids of the
text that the HTTP client has: another group continues the answer after them.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from penstock.engine.protocol.messages import (
    CONFINED_TOKENS,
    NAME_NBYTES,
    SUSPECT,
    TRIAL_TOKENS,
    Ints,
    Progress,
    Submit,
)

BEGINNING = 64  # tokens of a prompt's prefix: prompts that share them are routed to the same group


def traces(prompt: Ints, salt: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys of a request's affinity: one for the prefix of its prompt, one for each of its images."""
    return [salt + np.ascontiguousarray(prompt[:BEGINNING], np.int32).tobytes(), *keys]


def _no_ids() -> array[int]:
    return array("i")  # 4 bytes an id


class SubmittedRequest:
    """The first `Submit` of a request, and the ids that its samples have generated since."""

    __slots__ = (
        "_clear_at",
        "_is_dropped",
        "_max_tokens",
        "_over",
        "account",
        "clearings",
        "delivered",
        "failed_migrations",
        "failures",
        "failures_alone",
        "first",
        "generated",
        "may_be_tried",
        "migrations",
        "model",
        "request_id",
    )

    def __init__(self, first: Submit, request_id: str = "", max_tokens: int | None = None, account: str = "") -> None:
        """`request_id` is written into the log. `max_tokens`: of the prompt and all samples, up to which the request is
        kept; None: any number. `account`: of the client, which has a budget of trials."""
        self.first = first
        self.generated: defaultdict[int, array[int]] = defaultdict(_no_ids)  # of samples that are not over
        self._over: set[int] = set()  # samples
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self._is_dropped = False
        self.request_id = request_id
        self.model = 0  # `StatusBoard.MODEL` of its group: the answer is of this model, once it has begun
        self.migrations = 0  # losses of a group that count towards the limit
        self.failed_migrations = 0  # those of them after a failure that no request has been found to be the reason of
        self.account = account
        self.delivered = 0  # ids of all samples
        self.failures = 0  # of processes by themselves, while this request was in a step in flight
        self.failures_alone = 0  # those of them while no other request ran
        self.may_be_tried = True  # as the budget of the account says
        self.clearings = 0  # times that the request has generated TRIAL_TOKENS after a failure
        self._clear_at = 0  # ids, delivered

    @property
    def kept_tokens(self) -> int:
        """Returns the number of tokens that are kept: of the prompt, and of samples that are not over."""
        return self.first.prompt.size + sum(map(len, self.generated.values()))

    @property
    def is_too_long(self) -> bool:
        """Returns whether the request has had more tokens than are kept: it cannot be resumed any more."""
        return self._is_dropped or self.kept_tokens > self._max_tokens

    @property
    def has_begun(self) -> bool:
        """Returns whether a part of the answer has come."""
        return bool(self.generated or self._over)

    @property
    def order(self) -> tuple[int, int]:
        """Returns the key by which requests are submitted again: as the core orders them."""
        return self.first.priority, self.first.arrived_ns

    @property
    def is_confined(self) -> bool:
        """Returns whether the request may run in no group but the one for trials: it was in flight in several failures,
        or in one before it had generated much."""
        return self.failures >= SUSPECT or (self.failures > 0 and self.delivered < CONFINED_TOKENS)

    @property
    def suspicion(self) -> tuple[int, int]:
        """Returns a key that is larger for a request that is more suspected."""
        return self.failures, -max(map(len, self.generated.values()), default=0) if self.failures else 0

    @property
    def traces(self) -> list[bytes]:
        """Returns the keys of the request's affinity to a group."""
        inputs = self.first.inputs
        keys = [] if inputs is None else [item.key for item in inputs.items if item.key is not None]
        return traces(self.first.prompt, self.first.adapter + self.first.salt, keys)

    def add(self, sample: int, ids: list[int]) -> None:
        """Adds ids that a sample has generated."""
        self.generated[sample].fromlist(ids)
        self.delivered += len(ids)

    def count_failure(self, *, is_alone: bool) -> None:
        """Counts a failure of a process, with this request in a step in flight."""
        self.failures += 1
        self.failures_alone += is_alone
        self._clear_at = self.delivered + TRIAL_TOKENS * (self.first.params.n - len(self._over))

    def clear_if_advanced(self, limit: int) -> None:
        """Clears a suspect that has generated TRIAL_TOKENS with each sample since the last failure. Up to `limit` times
        the failures do not count as migrations: a request may make its group fail at random."""
        if self.failures and self.delivered >= self._clear_at:
            self.failures = self.failures_alone = 0
            self.clearings += 1
            if self.clearings <= limit:
                self.forgive()

    def finish(self, sample: int) -> None:
        """Drops the ids of a sample that is over, as it is not run again."""
        self._over.add(sample)
        self.generated.pop(sample, None)

    def forgive(self) -> None:
        """Takes failures that were not this request's doing off its migrations."""
        self.migrations -= self.failed_migrations
        self.failed_migrations = 0

    def trim(self) -> int:
        """Drops the ids of a request above the limit. Returns the number of kept tokens."""
        tokens = self.kept_tokens
        if tokens <= self._max_tokens:
            return tokens
        self._is_dropped = True
        self.generated.clear()
        return self.first.prompt.size

    def submit(self, request: int) -> Submit:
        """Returns the message that begins the request, or continues it, under this number."""
        if self.first.params.prompt_logprobs is not None and not self.has_begun:
            # Blocks that are found are not scored, and scores of the lost group may not have come: none is found.
            self.first = replace(self.first, name=os.urandom(NAME_NBYTES))
        return replace(
            self.first,
            request=request,
            progress=self._progress(),
            failures=self.failures,
            may_be_tried=self.may_be_tried,
        )

    def _progress(self) -> Progress | None:
        if not self.has_begun:
            return None
        counts: Ints = np.zeros(self.first.params.n, np.int32)
        counts[list(self._over)] = -1
        for sample, ids in self.generated.items():
            counts[sample] = len(ids)
        arrays = [np.frombuffer(ids, np.int32) for _, ids in sorted(self.generated.items())]
        return Progress(counts, np.concatenate(arrays) if arrays else np.empty(0, np.int32))
