"""What a client does without an engine: which group gets a request, how a Delta is cut, what a stream gives."""

import asyncio
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from penstock.engine.client import groups
from penstock.engine.client.groups import SLACK, Router
from penstock.engine.client.stream import MAX_KEPT_NBYTES, EngineError, OutputChunk, OutputStream
from penstock.engine.client.submitted_request import BEGINNING, traces
from penstock.engine.protocol.messages import Began, Delta, Finished, FinishReason, Logprobs
from tests.support.columns import chunks_of, ints, slots
from tests.support.loops import in_a_loop


# ── the group of a request ───────────────────────────────────────────────────────────────────────────────────────────
def test_request_goes_to_the_least_loaded_group_at_random_among_equals() -> None:
    balance = Router(seed=1)
    assert balance.choose({0: 5, 1: 3, 2: 9}, []) == 1
    chosen = Counter(balance.choose({0: 3, 1: 3, 2: 9}, []) for _ in range(200))
    assert set(chosen) == {0, 1} and min(chosen.values()) > 60


def test_request_goes_to_the_group_of_its_prefix_unless_it_is_busier() -> None:
    balance = Router(seed=1)
    first = balance.choose({0: 0, 1: 1}, [b"a"])
    assert first == 0
    assert balance.choose({0: SLACK, 1: 0}, [b"a"]) == 0
    assert balance.choose({0: SLACK + 1, 1: 0}, [b"a"]) == 1
    assert balance.choose({0: 0, 1: 1}, [b"a"]) == 1  # it has moved
    assert balance.choose({0: 0}, [b"a"]) == 0  # the other one is dead


def test_router_needs_no_more_memory_for_more_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "REMEMBERED", 64)
    router = Router(seed=1)
    router.choose({0: 0, 1: 0}, [b"first"])
    tracemalloc.start()
    try:
        for number in range(1000):
            router.choose({0: 0, 1: 1}, [b"%d" % number * 64])
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 10_000
    assert router.choose({0: SLACK, 1: 0}, [b"%d" % number * 64]) == 0


def test_equal_beginnings_salts_and_images_leave_equal_traces() -> None:
    long = np.arange(BEGINNING + 10, dtype=np.int32)
    assert traces(long, b"s", [b"k"]) == traces(long[:-5], b"s", [b"k"])
    assert traces(long, b"s", [])[0] != traces(long, b"t", [])[0]
    assert traces(long, b"", [b"k"])[1] == traces(long[1:], b"", [b"k"])[1]


# ── a Delta ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_row_of_a_delta_gets_its_own() -> None:
    delta = Delta(
        3,
        ints(10, 11, 10, 2, 0, 3, 1, 2, 3, 4, 5),
        "é".encode() + b"abc",
        counts=slots(2, 0, 3),
        samples=slots(0, 0, 1),
        finished=Finished(slots(1, 2), np.array([2, 1], np.uint8), (None, "x"), ints(0, 7), ints(0, 2)),
        logprobs=Logprobs(
            ints(*range(10)), np.arange(10, dtype=np.float32), ints(1, 1, 1, 1, 1), counts=ints(2, 1, 3, 2, 2)
        ),
        began=Began(slots(2), ints(16)),
    )
    (first, start), (second, other), (third, last) = chunks_of(delta)
    assert (first, second, third) == (10, 11, 10)
    assert (start.text, start.ids, start.sample, start.reason) == ("é", [1, 2], 0, None)
    assert (other.text, other.ids, other.reason, other.stop) == ("", [], FinishReason.LENGTH, None)
    assert (last.text, last.ids, last.sample, last.reason) == ("abc", [3, 4, 5], 1, FinishReason.STOP)
    assert (last.stop, last.cached, last.reasoning, last.calls) == ("x", 16, 7, 2) and start.cached == other.cached == 0
    assert start.logprobs is not None and start.logprobs.ids.tolist() == [0, 1, 2]
    assert last.logprobs is not None and last.logprobs.ids.tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_delta_with_equal_counts_of_logprobs_is_split() -> None:
    values = np.arange(6, dtype=np.float32)
    chunks = chunks_of(Delta(2, ints(1, 2, 0, 0, 7, 8), b"", logprobs=Logprobs(ints(*range(6)), values, ints(4, 5))))
    cut = [chunk.logprobs for _, chunk in chunks]
    assert [part.ids.tolist() for part in cut if part] == [[0, 1, 2], [3, 4, 5]]
    assert [part.ranks.tolist() for part in cut if part] == [[4], [5]]


def test_row_beside_one_with_log_probabilities_has_none() -> None:
    """One asked for none, the other ended without a token."""
    values = np.arange(2, dtype=np.float32)
    numbers = ints(1, 2, 3, 0, 0, 0, 7, 8)
    logprobs = Logprobs(ints(8, 9), values, ints(0, 1), ints(0, 2))
    chunks = [chunk for _, chunk in chunks_of(Delta(3, numbers, b"", slots(1, 1, 0), logprobs=logprobs))]
    assert [chunk.logprobs is None for chunk in chunks] == [True, False, True]
    assert chunks[1].logprobs is not None and chunks[1].logprobs.ids.tolist() == [8, 9]


# ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def stream_of(samples: int = 1) -> tuple[OutputStream, list[OutputStream]]:
    aborted: list[OutputStream] = []
    stream = OutputStream(1, 0, 1, 5, samples)
    stream.begin(aborted.append, None)
    return stream, aborted


@in_a_loop
async def test_unread_chunks_of_a_sample_are_merged() -> None:
    stream, _ = stream_of(2)
    for sample, text, end in ((0, b"a", None), (0, b"b", None), (1, b"c", FinishReason.STOP), (1, b"no", None)):
        stream.add(OutputChunk(sample, text, [len(text)], end))
    stream.add(OutputChunk(0, b"d", [9], FinishReason.LENGTH, None, 3, reasoning=2))
    assert [(chunk.text, chunk.ids, chunk.reason) for chunk in [await anext(stream)]] == [("ab", [1, 1], None)]
    rest = [chunk async for chunk in stream]
    assert rest[-1].reason == FinishReason.LENGTH and stream.cached_tokens == 3
    assert stream.is_over and (stream.completion_tokens, stream.reasoning_tokens) == (5, 2)


@in_a_loop
async def test_error_of_a_stream_follows_the_chunks_before_it() -> None:
    stream, _ = stream_of()
    stream.add(OutputChunk(0, b"a", [1]))
    stream.fail(EngineError(503, "it died"))
    stream.add(OutputChunk(0, b"late", [2]))
    assert (await anext(stream)).text == "a"
    for _ in range(2):
        with pytest.raises(EngineError, match="it died"):
            await anext(stream)


@in_a_loop
async def test_reader_of_a_stream_wakes_for_a_chunk_an_error_and_an_abort() -> None:
    for wake in (
        lambda stream: stream.add(OutputChunk(0, b"a", [1], FinishReason.STOP)),
        lambda stream: stream.fail(EngineError(503, "it died")),
        lambda stream: stream.abort(),
    ):
        stream, _ = stream_of()
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        assert not waiting.done()
        wake(stream)
        await asyncio.wait_for(asyncio.wait([waiting]), 1)
        waiting.exception()


@in_a_loop
async def test_leaving_the_with_block_aborts_an_open_stream_once() -> None:
    stream, aborted = stream_of()
    async with stream:
        stream.add(OutputChunk(0, b"a", [1]))
    stream.abort()
    assert aborted == [stream]
    stream, aborted = stream_of()
    async with stream:
        stream.add(OutputChunk(0, b"a", [1], FinishReason.STOP))
    assert aborted == []


@in_a_loop
async def test_stream_without_a_reader_is_given_up() -> None:
    stream, aborted = stream_of()
    for _ in range(5):
        stream.add(OutputChunk(0, bytes(MAX_KEPT_NBYTES // 4), []))
    assert aborted == [stream]
    with pytest.raises(EngineError, match="the client has not read"):
        await anext(stream)


@in_a_loop
async def test_an_answer_that_does_not_come_in_time_is_given_up() -> None:
    aborted: list[OutputStream] = []
    stream = OutputStream(1, 0, 1, 5, 1)
    stream.begin(aborted.append, 0.01)
    with pytest.raises(EngineError, match=r"within 0\.01 s") as caught:
        await anext(stream)
    assert caught.value.status == 504 and aborted == [stream]
