"""Requests in front of the scheduler: for an absent output processor, and while suspects are on trial."""

import numpy as np

from penstock.engine.core.admission_gate import BATCH_SHARE, SERVED_RESULTS, AdmissionGate, Number
from penstock.engine.protocol.messages import SUSPECT, TRIAL_TOKENS, Progress, SamplingParams, Submit


def submit(
    request: int, server: int = 0, *, failures: int = 0, generated: int = 0, n: int = 1, may_be_tried: bool = True
) -> Submit:
    counts = np.array([generated] * n, np.int32)
    progress = Progress(counts, np.zeros(n * generated, np.int32)) if generated else None
    prompt = np.zeros(3, np.int32)
    params = SamplingParams(n=n)
    return Submit(server, request, prompt, params, progress=progress, failures=failures, may_be_tried=may_be_tried)


def taken(gate: AdmissionGate, is_quiet: bool = True, *running: Number) -> list[Number]:
    """Returns the requests that the gate admits. `running`: suspects that have not generated enough to be cleared."""

    def generated(number: Number) -> int | None:
        return TRIAL_TOKENS - 1 if number in running else TRIAL_TOKENS if number[1] % 2 else None

    return [(message.server, message.request) for message, _ in gate.take(is_quiet, True, generated)]


def serve(gate: AdmissionGate, results: int = SERVED_RESULTS) -> None:
    for _ in range(results):
        gate.count_result(1)


def test_requests_pass_in_the_order_of_their_arrival() -> None:
    gate = AdmissionGate(2)
    for request in (3, 1, 2):
        assert gate.put(submit(request), 10 + request)
    assert [(request.request, queued_ns) for request, queued_ns in gate.take(False, True, lambda _: None)] == [
        (3, 13),
        (1, 11),
        (2, 12),
    ]
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
    gate.put(submit(2, server=1, failures=1), 0)
    assert sorted(gate.forget_server(1)) == [1, 2]
    gate.hold(set())
    assert taken(gate) == [(2, 1)]


# ── suspects ──
def test_suspects_are_admitted_in_batches_and_the_least_suspected_first() -> None:
    gate = AdmissionGate(1)
    for request in range(2 * BATCH_SHARE):
        gate.put(submit(request, failures=1, generated=10 * request, n=1 + request % 2), 0)
    gate.put(submit(70, failures=SUSPECT, generated=900), 0)
    gate.put(submit(80), 0)
    first = [(0, request) for request in reversed(range(2 * BATCH_SHARE - 3, 2 * BATCH_SHARE))]
    assert taken(gate, False) == first and gate.suspects == 2 * BATCH_SHARE + 1
    assert taken(gate, False, *first) == [(0, 80)], "a request that is no suspect runs beside the batch"
    assert taken(gate, False, first[1]) == [], "one of the batch is not cleared"
    for requests in ((4, 3), (2,), (1,), (0,)):
        assert taken(gate, False) == [(0, request) for request in requests] and gate.trial is None
    assert taken(gate, False) == [], "the last one has failed twice, and waits to run alone"


def test_request_that_waits_is_served_before_the_trial_of_a_suspect() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=SUSPECT), 0)
    gate.put(submit(2), 0)
    assert taken(gate) == [(0, 2)] and gate.trial is None


def test_last_suspect_runs_alone_where_no_other_request_is_open() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=1), 0)
    assert not gate.needs_quiet
    assert taken(gate) == [(0, 1)] and gate.trial == (0, 1)
    gate.put(submit(2), 0)
    gate.put(submit(3, failures=1), 0)
    assert taken(gate, False, (0, 1)) == [], "no request runs beside a trial"
    assert taken(gate, False) == [(0, 3)] and gate.trial is None, "a cleared suspect runs on beside others"
    assert taken(gate, False, (0, 3)) == [(0, 2)]


def test_most_suspected_request_is_tried_first_when_no_other_is_open() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=1, generated=4), 0)
    gate.put(submit(2, failures=1, generated=9), 0)
    gate.put(submit(3, failures=SUSPECT, generated=9), 0)
    for request in (3, 1, 2):
        assert taken(gate) == [(0, request)] and gate.trial == (0, request)


def test_trial_ends_when_output_processors_have_delivered_its_tokens() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=1), 0)
    assert taken(gate) == [(0, 1)]
    gate.put(submit(2), 0)
    assert gate.take(False, False, lambda _: None) == [] and gate.trial == (0, 1)
    assert taken(gate, False) == [(0, 2)] and gate.trial is None


def test_suspect_of_one_failure_runs_beside_other_requests() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=1), 0)
    serve(gate)
    assert not gate.needs_quiet and taken(gate, False) == [(0, 1)] and gate.trial is None


def test_suspect_that_may_not_be_tried_runs_beside_others_or_is_refused() -> None:
    gate = AdmissionGate(1)
    for request, failures in ((1, SUSPECT), (2, SUSPECT), (3, 1)):
        gate.put(submit(request, failures=failures, generated=request, may_be_tried=False), 0)
    assert taken(gate) == [(0, 3)] and gate.trial is None
    assert taken(gate) == [(0, 2)] and gate.trial is None and gate.take_refused() == []
    assert taken(gate) == [] and gate.take_refused() == [(0, 1)] and gate.suspects == 0


def test_suspect_of_several_failures_waits_while_other_requests_are_served() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1, failures=SUSPECT), 0)
    gate.put(submit(2), 0)
    assert taken(gate, False) == [(0, 2)]
    serve(gate, SERVED_RESULTS - 1)
    assert not gate.needs_quiet
    serve(gate, 1)
    gate.put(submit(3), 0)
    assert gate.needs_quiet and taken(gate, False) == [], "all requests make room for the trial"
    assert taken(gate) == [(0, 1)] and gate.trial == (0, 1) and not gate.needs_quiet
    gate.put(submit(4, failures=SUSPECT), 0)
    assert taken(gate, False) == [(0, 3)], "other requests are served before the next trial"
    assert not gate.needs_quiet
    serve(gate)
    assert gate.needs_quiet


def test_suspect_of_an_absent_output_processor_waits_and_another_is_tried() -> None:
    gate = AdmissionGate(2)
    gate.hold({0})
    gate.put(submit(2, failures=SUSPECT), 0)
    assert taken(gate) == []
    gate.put(submit(3, failures=SUSPECT, generated=5), 0)
    assert taken(gate) == [(0, 3)] and gate.trial == (0, 3)
    assert taken(gate) == [] and gate.trial is None
    gate.hold(set())
    assert taken(gate) == [(0, 2)]


def test_suspect_that_is_aborted_while_it_waits_is_not_tried() -> None:
    gate = AdmissionGate(1)
    gate.put(submit(1), 0)
    gate.put(submit(2, failures=SUSPECT), 0)
    serve(gate)
    gate.abort(0, 2)
    assert not gate.needs_quiet and taken(gate, False) == [(0, 1)]
