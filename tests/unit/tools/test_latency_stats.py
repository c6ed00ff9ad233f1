"""The arithmetic of `penstock bench serve`: what TTFT, ITL, TPOT and quantiles are, of times that are made up."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("httptools")

from penstock.tools.load.chat_request import Outcome
from penstock.tools.load.http_client import Failure
from penstock.tools.load.latency_stats import Figures, Paces, Spread, figures_of


def answered(*stamps: float, due: float = 10.0, tokens: int | None = None, counts: tuple[int, ...] = ()) -> Outcome:
    """An answer with events so many seconds after it was due, and whole 0.5 s after the last."""
    done = due + max(stamps, default=0.0) + 0.5
    outcome = Outcome(due, due, [due + stamp for stamp in stamps], list(counts), done, 3)
    outcome.completion_tokens = tokens
    return outcome


def figures(*outcomes: Outcome, until: float = 20.0) -> Figures:
    return figures_of(outcomes, until, 1.0)


def itl(outcome: Outcome) -> list[tuple[float, float]]:
    return [(round(float(each), 6), round(float(many), 6)) for each, many in zip(*Paces.of(outcome), strict=True)]


def test_itl_is_the_gap_between_events_of_one_token() -> None:
    outcome = answered(0.2, 0.3, 0.6, tokens=3)
    assert itl(outcome) == [(0.1, 1), (0.3, 1)]
    result = figures(outcome)
    assert result.ttft is not None and result.tpot is not None and result.latency is not None
    assert result.ttft.mean == pytest.approx(200) and result.tpot.mean == pytest.approx(200)
    assert result.latency.mean == pytest.approx(1100)
    assert (result.requests, result.output_tokens, result.prompt_tokens) == (1, 3, 3)
    assert result.requests_per_s == pytest.approx(0.1) and result.output_tokens_per_s == pytest.approx(0.3)
    assert result.cpu_cores == pytest.approx(0.1)


def test_tokens_of_an_event_share_its_gap() -> None:
    """By the server's own running count: 2, then 4 more, then 1."""
    outcome = answered(0.2, 0.6, 0.7, tokens=7, counts=(2, 6, 7))
    assert itl(outcome) == [(0.1, 4), (0.1, 1)]
    assert figures(outcome).itl == Spread(*[pytest.approx(100)] * 4)
    assert figures(outcome).tpot == Spread(*[pytest.approx(100)] * 4)  # (0.7 - 0.2) / 5: the first two are TTFT's


def test_each_token_counts_in_itl_and_not_each_event() -> None:
    outcome = answered(0.1, 0.5, 0.8, tokens=6, counts=(1, 5, 6))
    assert figures(outcome).itl == Spread(*map(pytest.approx, (140, 100, 300, 300)))


def test_tokens_without_a_running_count_are_spread_over_the_events() -> None:
    outcome = answered(0.2, 0.6, 0.7, tokens=6)
    assert itl(outcome) == [(0.2, 2), (0.05, 2)]
    tpot = figures(outcome).tpot
    assert tpot is not None and tpot.mean == pytest.approx(1e3 * 0.5 / 4)


def test_the_token_that_ends_an_answer_without_a_text_is_in_no_event() -> None:
    outcome = answered(0.1, 0.2, 0.3, tokens=4)
    outcome.has_silent_end = True
    assert itl(outcome) == [(0.1, 1), (0.1, 1)]


def test_an_event_that_brought_no_token_lends_its_gap_to_the_next() -> None:
    outcome = answered(0.1, 0.2, 0.4, 0.5, tokens=3, counts=(1, 1, 2, 3))
    assert itl(outcome) == [(0.3, 1), (0.1, 1)]


def test_events_without_usage_count_as_tokens_with_a_note() -> None:
    result = figures(answered(0.1, 0.2), answered(0.1, tokens=9))
    assert (result.output_tokens, result.counted_by_events) == (11, 1)


def test_answer_of_one_event_has_a_ttft_and_no_itl() -> None:
    result = figures(answered(0.1, tokens=4))
    assert result.itl is None and result.tpot is None
    assert result.ttft == Spread(*[pytest.approx(100)] * 4)
    silent = figures(answered(tokens=4))
    assert silent.ttft is None and silent.latency is not None and silent.output_tokens == 4


def test_quantiles_are_nearest_ranks_and_a_weight_of_three_is_three_values() -> None:
    hundred = Spread.of(np.arange(1, 101) / 1e3)
    assert hundred == Spread(*map(pytest.approx, (50.5, 50, 90, 99)))
    weighted = Spread.of(np.array([0.3, 0.1, 0.2]), np.array([3.0, 1.0, 6.0]))
    plain = Spread.of(np.repeat([0.3, 0.1, 0.2], [3, 1, 6]))
    assert weighted == plain == Spread(*map(pytest.approx, (220, 200, 300, 300)))
    assert Spread.of(np.zeros(0)) is None


def test_failed_requests_are_counted_and_in_no_figure() -> None:
    failed = [answered(0.1, tokens=5), answered(0.1, tokens=5)]
    failed[0].failure, failed[1].failure = Failure("closed", "first"), Failure("closed", "second")
    failed.append(answered(0.1))
    failed[2].failure = Failure("silent", "third")
    is_open = Outcome(10.0, 10.0, [10.1])
    result = figures(answered(0.2, tokens=2), *failed, is_open)
    assert (result.requests, result.failed, result.unfinished, result.output_tokens) == (1, 3, 1, 2)
    told_of = [(error.kind, error.requests, error.example) for error in result.errors]
    assert told_of == [("closed", 2, "first"), ("silent", 1, "third")]
    assert result.most_open == 5
    nothing = figures()
    assert (nothing.requests, nothing.ttft, nothing.errors) == (0, None, [])


def test_late_request_is_timed_from_its_due_time() -> None:
    outcome = answered(0.3, tokens=1)
    outcome.sent = outcome.due + 0.2
    result = figures(outcome)
    assert result.ttft is not None and result.ttft.mean == pytest.approx(300)
    assert result.late is not None and result.late.p99 == pytest.approx(200)
