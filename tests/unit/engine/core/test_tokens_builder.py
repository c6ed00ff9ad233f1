"""What a core tells its output processors. What is true of all traces: tests/property/test_outputs.py."""

import numpy as np

from penstock.engine.core.request import Request
from penstock.engine.core.step_builder import TokensBuilder
from penstock.engine.protocol.messages import (
    ChunkFormat,
    Ended,
    FinishReason,
    Logprobs,
    SamplingParams,
    Started,
    Style,
    Submit,
    Tokens,
)
from tests.support.columns import ints

FORMAT = ChunkFormat(Style.CHAT, b'{"id":"x"')


def request(number: int, *prompt: int, server: int = 0, n: int = 1, chunk_format: ChunkFormat | None = None) -> Request:
    params = SamplingParams(n=n)
    return Request(Submit(server, number, ints(*prompt), params, chunk_format=chunk_format), 4, arrival=(0, 1))


def only(messages: list[tuple[int, Tokens]]) -> Tokens:
    ((output, tokens),) = messages
    assert output == 0
    return tokens


def test_started_sample_has_its_context() -> None:
    builder = TokensBuilder(8, 1)
    long = request(7, *range(100, 120), server=3, n=2, chunk_format=FORMAT)
    long.cached = 16
    builder.start(long.samples[1], 5)
    builder.start(request(8, 9).samples[0], 2)
    tokens = only(builder.build_started())
    assert tokens.slots is None and not tokens.ids.size and not builder.build_started()
    assert tokens.started == (
        Started(5, 7, SamplingParams(n=2), tuple(range(112, 120)), FORMAT, server=3, sample=1, cached=16),
        Started(2, 8, SamplingParams(), (9,)),
    )


def test_slots_are_sent_only_where_they_differ_from_those_before() -> None:
    builder = TokensBuilder(8, 1)
    slots = np.array([1, 4])
    first, second = (
        only(builder.build(slots, ints(5, 6), None, None, [])),
        only(builder.build(slots, ints(7, 8), None, None, [])),
    )
    assert first.slots is not None and first.slots.tolist() == [1, 4]
    assert (second.slots, second.logprobs) == (None, None) and not (second.started or second.aborted or second.ended)
    alike = only(builder.build(np.array([1, 3, 4]), ints(7, 0, 8), np.array([0, 2]), None, []))
    assert alike.slots is None and alike.ids.tolist() == [7, 8]
    other = only(builder.build(np.array([4]), ints(7), None, None, []))
    assert other.slots is not None and other.slots.tolist() == [4]


def test_no_tokens_message_is_built_without_news() -> None:
    builder = TokensBuilder(8, 1)
    none = np.zeros(0, np.intp)
    assert builder.build(none, ints(), None, None, []) == builder.build_started() == []


def test_abort_is_sent_before_its_slot_is_reused_and_slots_stay_implied() -> None:
    builder = TokensBuilder(8, 1)
    slots = np.array([2, 3])
    only(builder.build(slots, ints(5, 6), None, None, []))
    builder.abort(3)
    builder.start(request(2, 9).samples[0], 3)
    tokens = only(builder.build_started())
    assert tokens.aborted == (3,) and [started.slot for started in tokens.started] == [3]
    after = only(builder.build(slots, ints(5, 6), None, None, []))
    assert after.slots is None and not after.aborted and not after.started
    builder.abort(2)
    alone = only(builder.build(np.zeros(0, np.intp), ints(), None, None, []))
    assert alone.aborted == (2,) and not alone.ids.size


def test_logprobs_are_sent_unchanged_for_the_rows_that_are_sent() -> None:
    builder = TokensBuilder(8, 1)
    logprobs = Logprobs(ints(1, 2, 3, 4), np.zeros(4, np.float32), ints(1, 1))
    assert only(builder.build(np.array([0, 1]), ints(1, 3), None, logprobs, [])).logprobs is logprobs
    columns = only(builder.build(np.array([0, 1]), ints(1, 3), np.array([1]), logprobs, [])).logprobs
    assert (
        columns is not None
        and columns.ids.tolist() == [3, 4]
        and columns.counts is not None
        and columns.counts.tolist() == [2]
    )


def test_each_output_processor_is_told_of_its_own_requests() -> None:
    builder = TokensBuilder(8, 2)
    for slot in range(4):
        builder.start(request(slot, 9).samples[0], slot)
    ended = [Ended(1, FinishReason.LENGTH), Ended(2, FinishReason.STOP, 7)]
    messages = dict(builder.build(np.arange(4), ints(5, 6, 7, 8), None, None, ended))
    assert [messages[output].ids.tolist() for output in (0, 1)] == [[5, 7], [6, 8]]
    assert (messages[0].ended, messages[1].ended) == ((ended[1],), (ended[0],))
    builder.abort(3)
    ((_, tokens),) = builder.build(np.zeros(0, np.intp), ints(), None, None, [])
    assert tokens.aborted == (3,)
