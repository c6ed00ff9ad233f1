"""Computes the figures of a load from the outcomes of its requests. This text defines each time.

TTFT     from when a request was due until the first event that brought text: connecting, and being late, are in it.
latency  from when it was due until its answer was whole.
gap      between an event that brought text and the one before it. Events of one read came at the same time.
ITL      of a token: the gap before its event, divided by the tokens which that event brought. So an event of k tokens
         counts k times, and the sum over a request is its time of decoding, however they are cut into events.
         Tokens of the first event have none: they are TTFT's.
TPOT     of a request: the mean of its ITL.

How many tokens an event brought stands in its usage, where a server counts as it goes. Otherwise the request's tokens
are spread evenly over its events, but for one that ends the answer without a text: with one token in each event, as is
usual, that is exact. A server that tells no usage at all is taken to bring one token with each event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.tools.load.chat_request import Outcome
from penstock.tools.load.http_client import Failure

Floats = npt.NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SLACK = 1 - 1e-12  # of sums of weights, which are not exact


class Spread(msgspec.Struct, frozen=True):
    """A distribution of milliseconds. Quantiles are nearest ranks: values that occurred."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Floats, weights: Floats | None = None) -> Spread | None:
        """Returns None for no values. A value of weight 3 counts as three values."""
        if not seconds.size:
            return None
        weights = np.ones(seconds.size) if weights is None else weights
        order = np.argsort(seconds)
        ranks = np.cumsum(weights[order])
        at = np.searchsorted(ranks, np.array([*QUANTILES.values()]) * ranks[-1] * SLACK)
        quantiles = seconds[order][np.minimum(at, seconds.size - 1)]
        return cls(
            float(np.average(seconds, weights=weights)) * 1e3, *(float(quantile) * 1e3 for quantile in quantiles)
        )


class Paces(NamedTuple):
    """The ITL of one request: a value for each event after the first, and the number of tokens with that value."""

    seconds: Floats
    tokens: Floats

    @classmethod
    def of(cls, outcome: Outcome) -> Paces:
        events = len(outcome.stamps)
        if len(outcome.counts) == events:
            brought = np.diff(np.array(outcome.counts, float))
        else:
            num_tokens = max(tokens_of(outcome) - (outcome.completion_tokens is not None and outcome.has_silent_end), 1)
            brought = np.full(max(events - 1, 0), num_tokens / max(events, 1))
        gaps = np.diff(np.array(outcome.stamps))
        has_some = brought > 0  # a text may come in two events, and its token is counted with the first
        if not has_some.all():
            gaps = _added_to_the_next(gaps, has_some)
            brought = brought[has_some]
        return cls(gaps / brought, brought)


def _added_to_the_next(gaps: Floats, has_some: npt.NDArray[np.bool_]) -> Floats:
    """Adds the gaps of events without a token to the gap of the next event with one."""
    ends = np.flatnonzero(has_some)
    return np.diff(np.cumsum(gaps)[ends], prepend=0.0)


def tokens_of(outcome: Outcome) -> int:
    count = outcome.completion_tokens
    return len(outcome.stamps) if count is None else count


class Error(msgspec.Struct, frozen=True):
    kind: str
    requests: int
    example: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Times are milliseconds unless the name says otherwise. A Spread is None if there were no values."""

    requests: int  # with a complete answer; all figures below are of these
    failed: int
    unfinished: int  # when it was interrupted
    seconds: float  # from when the first request was due until the last was answered, or it was interrupted
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int | None  # None: the server did not report them for each request
    output_tokens: int
    counted_by_events: int  # requests without a token count from the server
    tokens_per_event: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None
    late: Spread | None  # how long after it was due a request was sent
    cpu_cores: float  # of the load generator: near 1, it is itself what is measured
    most_open: int  # requests at a time
    errors: list[Error]


def figures_of(outcomes: Sequence[Outcome], until: float, cpu_seconds: float) -> Figures:
    """Computes the figures of all requests that were sent. An outcome without `done` was interrupted, at `until`."""
    ended = [outcome for outcome in outcomes if outcome.done]
    whole = [outcome for outcome in ended if outcome.failure is None]
    seconds = max(until - min((outcome.due for outcome in outcomes), default=until), 1e-3)
    output = sum(map(tokens_of, whole))
    prompts = [outcome.prompt_tokens for outcome in whole]
    paces = [Paces.of(outcome) for outcome in whole]
    events = sum(len(outcome.stamps) for outcome in whole)
    timed = [(each.seconds @ each.tokens) / each.tokens.sum() for each in paces if each.tokens.size]
    itl, weights = (np.concatenate(each) if paces else np.zeros(0) for each in (list(zip(*paces)) or [(), ()]))
    first = [outcome.stamps[0] - outcome.due for outcome in whole if outcome.stamps]
    return Figures(
        requests=len(whole),
        failed=len(ended) - len(whole),
        unfinished=len(outcomes) - len(ended),
        seconds=seconds,
        requests_per_s=len(whole) / seconds,
        output_tokens_per_s=output / seconds,
        prompt_tokens=None if None in prompts else sum(tokens or 0 for tokens in prompts),
        output_tokens=output,
        counted_by_events=sum(outcome.completion_tokens is None for outcome in whole),
        tokens_per_event=output / max(events, 1),
        ttft=Spread.of(np.array(first)),
        tpot=Spread.of(np.array(timed)),
        itl=Spread.of(itl, weights),
        latency=Spread.of(np.array([outcome.done - outcome.due for outcome in whole])),
        late=Spread.of(np.array([outcome.sent - outcome.due for outcome in outcomes if outcome.sent])),
        cpu_cores=cpu_seconds / seconds,
        most_open=_most_open(outcomes),
        errors=_errors([outcome.failure for outcome in ended if outcome.failure is not None]),
    )


def _most_open(outcomes: Sequence[Outcome]) -> int:
    changes = [(outcome.sent, 1) for outcome in outcomes if outcome.sent]
    changes += [(outcome.done, -1) for outcome in outcomes if outcome.done]
    is_open = highest = 0
    for _, change in sorted(changes):  # an end is counted before a beginning at the same time
        is_open += change
        highest = max(highest, is_open)
    return highest


def _errors(failures: Sequence[Failure]) -> list[Error]:
    """The most frequent kind first, each with the first example."""
    examples: dict[str, str] = {}
    for failure in failures:
        examples.setdefault(failure.kind, str(failure))
    counts = Counter(failure.kind for failure in failures)
    return [Error(kind, many, examples[kind]) for kind, many in counts.most_common()]
