"""Requests in front of the scheduler: for an absent output processor, and while suspects are on trial."""

import numpy as np

from penstock.engine.core.admission_gate import SUSPECT, TRIAL_TOKENS, AdmissionGate
from penstock.engine.protocol.messages import Progress, SamplingParams, Submit


def submit(request: int, server: int = 0, *, failures: int = 0, generated: int = 0, n: int = 1) -> Submit:
    counts = np.array([generated] * n, np.int32)
    progress = Progress(counts, np.zeros(n * generated, np.int32)) if generated else None
    prompt = np.zeros(3, np.int32)
    return Submit(server, request, prompt, SamplingParams(n=n), progress=progress, failures=failures)


def taken(gate: AdmissionGate, is_empty: bool = True) -> list[tuple[int, int]]:
    return [(one.server, one.request) for one, _ in gate.take(is_empty)]


def test_requests_pass_in_the_order_of_their_arrival() -> None:
    gate = AdmissionGate(2)
    for request in (3, 1, 2):
        assert gate.put(submit(request), 10 + request)
    assert [(one.request, queued_ns) for one, queued_ns in gate.take(False)] == [(3, 13), (1, 11), (2, 12)]
    assert taken(gate) == [] and gate.open_requests == 0


def test_requests_of_an_absent_output_processor_wait_and_the_others_pass() -> None:
    gate = AdmissionGate(2)
    gate.hold({1})
    for request in range(4):
        gate.put(submit(request, n=2), 0)
    assert taken(gate, False) == [(0, 0), (0, 2)]
    assert (gate.open_requests, gate.open_samples) == (2, 4)
    gate.abort(0, 1)
    gate.abort(0, 77)
    gate.put(submit(5, server=1), 0)
    assert not gate.put(submit(3), 0), "a request of this number waits"
    gate.hold(set())
    assert taken(gate, False) == [(0, 3), (1, 5)]


def test_requests_of_a_server_that_died_are_dropped() -> None:
    gate = AdmissionGate(1)
    gate.hold({0})
    gate.put(submit(1, server=1), 0)
    gate.put(submit(1, server=2), 0)
    gate.put(submit(2, server=1, failures=SUSPECT), 0)
    assert sorted(gate.forget_server(1)) == [1, 2]
    gate.hold(set())
    assert taken(gate) == [(2, 1)]


# ── trials ──
def test_suspects_run_alone_and_those_with_the_fewest_tokens_first() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1), 0)
    gate.put(submit(2, failures=SUSPECT, generated=9), 0)
    gate.put(submit(3, failures=SUSPECT, generated=4), 0)
    gate.put(submit(4, failures=SUSPECT - 1), 0)
    assert gate.needs_quiet
    assert taken(gate, False) == [], "another request is in the scheduler"
    assert taken(gate) == [(0, 3)] and gate.trial == (0, 3) and not gate.needs_quiet
    assert taken(gate, False) == [], "the suspect runs"
    gate.put(submit(5, failures=SUSPECT), 0)
    assert taken(gate) == [(0, 5)]
    assert taken(gate) == [(0, 2)]
    assert gate.trial == (0, 2)
    assert taken(gate) == [(0, 1), (0, 4)] and gate.trial is None


def test_suspect_is_cleared_once_by_its_tokens_and_waits_for_the_other_trials() -> None:
    gate = AdmissionGate(1)
    assert not gate.count_result(1), "no suspect runs"
    gate.put(submit(1, failures=SUSPECT), 0)
    gate.put(submit(2, failures=SUSPECT), 0)
    assert taken(gate) == [(0, 1)]
    results = [gate.count_result(ids) for ids in (0, *[1] * (TRIAL_TOKENS - 1), 0, 1, 1)]
    assert results == [False] * (TRIAL_TOKENS + 1) + [True, False]
    gate.put(submit(9), 0)  # again, under another number, and cleared
    assert taken(gate) == [(0, 2)]
    assert taken(gate, False) == []
    assert taken(gate) == [(0, 9)]


def test_suspect_of_an_absent_output_processor_waits_and_another_is_tried() -> None:
    gate = AdmissionGate(2)
    gate.hold({0})
    gate.put(submit(2, failures=SUSPECT), 0)
    assert taken(gate) == []
    gate.put(submit(3, failures=SUSPECT, generated=5), 0)
    assert taken(gate) == [(0, 3)]
    assert taken(gate) == [] and gate.trial is None
    gate.hold(set())
    assert taken(gate) == [(0, 2)]


def test_suspect_that_is_aborted_while_it_waits_is_not_tried() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1), 0)
    gate.put(submit(2, failures=SUSPECT), 0)
    gate.abort(0, 2)
    assert not gate.needs_quiet and taken(gate, False) == [(0, 1)]
