"""Spans of requests, from messages that are made up: what a tracer reads of a server."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("penstock.engine._native")

from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import MessageCodec
from penstock.engine.protocol.messages import (
    DELTAS,
    INBOX,
    STEPS,
    Abort,
    Begin,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Joined,
    Progress,
    Resume,
    Resumed,
    SamplingParams,
    Step,
    Submit,
)
from penstock.tools.trace.request_spans import RequestReader, TracedRequest, rows_of

UNIONS = {"inbox": INBOX, "steps": STEPS, "deltas": DELTAS}
CODECS = {name: MessageCodec(Catalogue.of(union)) for name, union in UNIONS.items()}
ENDED_NS = 1000
PROMPT = np.arange(5, dtype=np.int32)


def numbers(*values: int, dtype: Any = np.int32) -> Any:
    return np.array(values, dtype)


def submit(
    request: int, request_id: str, *, arrived_ns: int = 7, n: int = 1, progress: Progress | None = None
) -> Submit:
    params = SamplingParams(n=n)
    return Submit(0, request, PROMPT, params, arrived_ns=arrived_ns, progress=progress, request_id=request_id)


def joined(slot: int, request: int) -> Step:
    slots, params = numbers(slot, dtype=np.uint16), (SamplingParams(),)
    return Step(1, 1, joined=Joined(slots, numbers(request), params, numbers(5), PROMPT, numbers(1), numbers(0)))


def delta(*requests: int, finished: tuple[int, ...] = ()) -> Delta:
    count = len(requests)
    rows = numbers(*(requests.index(request) for request in finished), dtype=np.uint16)
    reasons = numbers(*[FinishReason.STOP] * len(finished), dtype=np.uint8)
    columns = numbers(*requests, *[0] * count, *[9] * count)
    return Delta(count, columns, b"", finished=Finished(rows, reasons) if finished else None)


def read(*messages: tuple[int, str, Any], watched: str | None = None) -> list[TracedRequest]:
    """Reads messages channel by channel, as a tracer does: not in order of time."""
    reader = RequestReader(watched)
    for ns, channel, message in sorted(messages, key=lambda entry: entry[1]):
        codec = CODECS[channel.split()[0]]
        encoded = codec.encode(message)
        frame = encoded if isinstance(encoded, bytes) else b"".join(bytes(part) for part in encoded)
        assert reader.has_requests(codec.schema())
        reader.read(codec.schema(), channel, ns, frame)
    return reader.requests(ENDED_NS)


def spans(request: TracedRequest) -> list[tuple[str, int, int]]:
    return sorted((tuple(span) for span in request.spans), key=lambda span: (span[1], -span[2]))  # type: ignore[misc]


def test_request_has_queue_prefill_and_decode() -> None:
    (request,) = read(
        (10, "inbox 0", submit(3, "a")),
        (20, "steps 0", joined(0, 3)),
        (50, "deltas 0", delta(3)),
        (55, "deltas 0", delta(3)),
        (70, "deltas 0", delta(3, finished=(3,))),
    )
    assert spans(request) == [("queue", 10, 20), ("prefill", 20, 50), ("decode", 50, 70)]
    assert (request.id, request.prompt, request.tokens, request.longest_gap_ns, request.end_ns) == ("a", 5, 3, 15, 70)
    (row,) = rows_of([request])
    assert row["seconds"] == pytest.approx({"queue": 1e-8, "prefill": 3e-8, "decode": 2e-8}) and row["has_ended"]


def test_request_is_paused_while_it_is_preempted() -> None:
    slots = numbers(0, dtype=np.uint16)
    (request,) = read(
        (10, "inbox 0", submit(3, "a")),
        (20, "steps 0", joined(0, 3)),
        (30, "deltas 0", delta(3)),
        (40, "steps 0", Step(1, 2, preempted=slots)),
        (90, "steps 0", Step(1, 3, resumed=Resumed(slots, numbers(1), numbers(4)))),
        (95, "deltas 0", delta(3, finished=(3,))),
    )
    assert ("preempted", 40, 90) in spans(request) and ("decode", 30, 95) in spans(request)
    seconds = request.seconds_by_phase
    assert seconds == pytest.approx({"queue": 1e-8, "prefill": 1e-8, "decode": 1.5e-8, "preempted": 5e-8})
    assert sum(seconds.values()) == pytest.approx((request.end_ns - request.begin_ns) / 1e9), "each moment counts once"


def test_request_that_its_group_lost_is_the_same_request() -> None:
    """The pause lasts from the last token of the lost group to the next one. A later request has the old slot."""
    progress = Progress(numbers(1), numbers(9))
    first, second = read(
        (10, "inbox 0", submit(3, "a")),
        (20, "steps 0", joined(0, 3)),
        (30, "deltas 0", delta(3)),
        (60, "inbox 1", submit(4, "a", progress=progress)),
        (70, "steps 1", joined(0, 4)),
        (80, "deltas 0", delta(4)),
        (81, "steps 0", Begin(2, 0, 8, 8, 16)),
        (82, "inbox 0", submit(5, "b", arrived_ns=8)),
        (90, "deltas 0", delta(4, finished=(4,))),
    )
    assert spans(first) == [
        ("queue", 10, 20), ("prefill", 20, 30), ("migration", 30, 80), ("decode", 30, 30), ("decode", 80, 90)
    ]  # fmt: skip
    assert (first.tokens, first.longest_gap_ns) == (3, 10), "a migration is no gap"
    assert spans(second) == [("queue", 82, ENDED_NS)] and second.end_ns == 0


def test_requests_begun_before_the_trace_have_no_id() -> None:
    (request,) = read((10, "deltas 2", delta(3)), (40, "deltas 2", delta(3)))
    assert (request.title, spans(request)) == ("#3 of server 2", [("decode", 10, ENDED_NS)])


def test_request_that_is_aborted_ends() -> None:
    (request,) = read((10, "inbox 0", submit(3, "a")), (60, "inbox 0", Abort(0, numbers(3))))
    assert spans(request) == [("queue", 10, 60), ("aborted", 60, 60)] and request.end_ns == 60
    assert list(request.lines()) == ["request a of server 0: 0.05 µs, aborted, prompt of 5 tokens", "   0.05 µs  queue"]


def test_lines_of_a_request_name_its_samples() -> None:
    (request,) = read((10, "inbox 0", submit(3, "a", n=2)), (60, "deltas 0", delta(3, 3, finished=(3,))))
    assert next(request.lines()) == "request a of server 0: 0.99 µs, not ended, prompt of 5 tokens, 2 samples"


def ended_after(*messages: tuple[str, Any], watched: str = "chatcmpl-a") -> list[bool]:
    """Whether the watched request has ended, after each message. A message that is no message is passed over."""
    reader = RequestReader(watched)
    ended = []
    for ns, (channel, message) in enumerate(messages):
        codec = CODECS[channel.split()[0]]
        encoded = codec.encode(message)
        frame = encoded if isinstance(encoded, bytes) else b"".join(bytes(part) for part in encoded)
        reader.read(codec.schema(), channel, ns, frame)
        reader.read(codec.schema(), channel, ns, frame[: len(frame) // 2])
        ended.append(reader.has_ended)
    assert {request.id for request in reader.requests(ENDED_NS)} == {"a"}
    return ended


def test_watched_request_has_ended_with_all_of_its_prompts() -> None:
    """By the id of its answer, too."""
    messages = [
        ("inbox 0", submit(3, "a", n=2)),
        ("inbox 0", submit(4, "a", arrived_ns=8)),
        ("inbox 0", submit(5, "b", arrived_ns=9)),
        *(("deltas 0", delta(request, finished=(request,))) for request in (3, 5, 4, 3)),
    ]
    assert ended_after(*messages) == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("channel", "end"),
    [
        ("inbox 0", Abort(0, numbers(3))),
        ("deltas 0", Failed(3, 500, "no blocks")),
        ("deltas 0", Failed(3, 503, "no trial", Resume.TRIAL_REFUSED)),
    ],
)
def test_watched_request_has_ended_without_an_answer(channel: str, end: Any) -> None:
    lost = Failed(3, 503, "the group is restarted", Resume.OUTPUT_DIED)
    partial = Abort(0, numbers(3), numbers(0, dtype=np.uint16))
    begin = [("inbox 0", submit(3, "a", n=2)), ("inbox 0", partial), ("deltas 0", lost)]
    assert ended_after(*begin, (channel, end)) == [False, False, False, True]


def test_request_is_preempted_until_all_of_its_samples_go_on() -> None:
    slots = [numbers(slot, dtype=np.uint16) for slot in (0, 1)]
    (request,) = read(
        (10, "inbox 0", submit(3, "a", n=2)),
        (20, "steps 0", joined(0, 3)),
        (21, "steps 0", joined(1, 3)),
        (30, "deltas 0", delta(3)),
        (40, "steps 0", Step(1, 2, preempted=slots[0])),
        (50, "steps 0", Step(1, 3, preempted=slots[1])),
        (60, "steps 0", Step(1, 4, resumed=Resumed(slots[0], numbers(1), numbers(4)))),
        (90, "steps 0", Step(1, 5, resumed=Resumed(slots[1], numbers(1), numbers(4)))),
        (95, "deltas 0", delta(3, 3, finished=(3,))),
    )
    assert [span for span in spans(request) if span[0] == "preempted"] == [("preempted", 40, 90)]
