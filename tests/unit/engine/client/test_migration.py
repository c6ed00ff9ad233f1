"""A client without an engine: what it submits again when a group is lost, and what ends instead."""

import asyncio
import logging
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.engine.client.client import Client, ImageInput
from penstock.engine.client.groups import CoreSenders, GroupLost
from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream, Placement
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster import logs
from penstock.engine.cluster.migration_counters import MIGRATION_CAUSES, MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.verdict_board import Cause
from penstock.engine.protocol.messages import (
    TRIAL_TOKENS,
    Abort,
    ChunkFormat,
    Failed,
    FinishReason,
    Resume,
    SamplingParams,
    Style,
    Submit,
)
from tests.support.groups import PATIENCE, SILENCE, Group, engine
from tests.support.loops import in_a_loop, until

EventFields = Callable[[str], list[dict[str, object]]]


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> EventFields:
    """Returns the fields of each event of a name."""
    monkeypatch.setattr(logs.LOGGER, "propagate", True)
    caplog.set_level(logging.DEBUG, logs.LOGGER.name)
    return lambda name: [record.__dict__["fields"] for record in caplog.records if record.getMessage() == name]


async def restart(
    group: Group, client: Client, cause: Cause = Cause.OUTSIDE, *streams: OutputStream, waiting: int = 1, model: int = 0
) -> None:
    """Lose the group, with `streams` in flight, and serve again when so many requests wait."""
    group.lose(cause, *streams)
    await until(lambda: client.counters[0][MigrationCounters.WAITING] == waiting)
    group.serve(model)


async def read(stream: OutputStream) -> list[int]:
    return [token for chunk in [chunk async for chunk in stream] for token in chunk.ids]


async def error_of(stream: OutputStream) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(read(stream), PATIENCE)
    return caught.value


def progress_of(submit: Submit) -> list[list[int] | None]:
    assert submit.progress is not None
    return [None if ids is None else ids.tolist() for ids in submit.progress.generated()]


def migrations(client: Client, group: int = 0) -> dict[str, int]:
    """How many by each cause, without those that never happened."""
    counters = client.counters[group]
    numbers = {cause: counters[MigrationCounters.MIGRATIONS + at] for at, cause in enumerate(MIGRATION_CAUSES)}
    return {cause: number for cause, number in numbers.items() if number}


# ── an answer goes on ────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_answer_goes_on_after_its_ids_when_the_group_serves_again() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1, 2], SamplingParams(max_tokens=9))
        first = await group.submitted()
        assert first.progress is None and first.failures == 0
        group.answer(first.request, [65, 66])
        group.answer(first.request, [67])
        await until(lambda: stream.completion_tokens == 3)
        group.lose()
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 1)
        assert client.open_requests == 1
        await group.require_silence()
        group.serve()
        second = await group.submitted()
        assert progress_of(second) == [[65, 66, 67]]
        assert second.request != first.request
        group.answer(first.request, [90], FinishReason.STOP)  # late, of the group that was lost
        group.answer(second.request, [68], FinishReason.LENGTH)
        chunks = [chunk async for chunk in stream]
        assert b"".join(chunk.utf8 for chunk in chunks) == b"ABCD" and chunks[-1].reason == FinishReason.LENGTH
        assert stream.completion_tokens == 4 and client.open_requests == 0
        assert client.counters[0][MigrationCounters.WAITING] == 0


# ── a group that serves has another model ────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_outcome_of_a_loss_is_reported_when_no_request_waits(events: EventFields) -> None:
    """Once for each loss, with the requests by id. A request that was aborted meanwhile has no outcome."""
    async with engine() as ([group], client):
        names = ["first", "second", "gone"]
        streams = [await client.submit([1, 2], SamplingParams(max_tokens=9), request_id=name) for name in names]
        for _ in streams:
            group.answer((await group.submitted()).request, [65])
        await until(lambda: all(stream.completion_tokens == 1 for stream in streams))
        group.lose()
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 3)
        streams[2].abort()
        group.serve()
        second = [await group.submitted() for _ in streams[:2]]
        group.answer(second[0].request, [66])
        await until(lambda: sum(stream.completion_tokens for stream in streams) == 4)
        assert events("requests go on") == [], "one of them waits"
        group.answer(second[1].request, [66])
        await until(lambda: events("requests go on"))
    (fields,) = events("requests go on")
    (group_number, incarnation), requests = (fields["group"], fields["incarnation"]), fields["requests"]
    assert (group_number, incarnation, requests, fields["given_up"], fields["ids"]) == (0, 1, 2, 0, "first, second")
    assert isinstance(fields["pause"], float) and 0 < fields["pause"] <= fields["longest"] < PATIENCE
    (resumed,) = events("requests are resumed")
    assert str(resumed["ids"]).startswith("first, second")


@in_a_loop
async def test_begun_answer_ends_with_503_when_only_another_model_serves() -> None:
    async with engine() as ([group], client):
        begun, other = await client.submit([1, 2]), await client.submit([3], SamplingParams(n=2))
        first, second = await group.submitted(), await group.submitted()
        group.answer(first.request, [65])
        group.answer(second.request, [66], FinishReason.STOP, sample=1)  # the other sample has not begun
        await until(lambda: begun.completion_tokens == other.completion_tokens == 1)
        await restart(group, client, waiting=2, model=7)
        for stream in (begun, other):
            error = await error_of(stream)
            assert error.status == 503 and "the model's files have been replaced since the answer began" in error.reason
        await group.require_silence()
        assert client.counters[0][MigrationCounters.GIVEN_UP] == 2 and client.open_requests == 0


@in_a_loop
async def test_request_that_has_not_begun_is_answered_by_the_other_model() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1, 2])
        await group.submitted()
        for model in (7, 8):
            await restart(group, client, model=model)
            again = await group.submitted()
            assert again.progress is None
        group.answer(again.request, [65])
        await until(lambda: stream.completion_tokens == 1)
        await restart(group, client, model=8)
        last = await group.submitted()
        assert progress_of(last) == [[65]]
        group.answer(last.request, [66], FinishReason.STOP)
        assert await read(stream) == [65, 66]


@in_a_loop
async def test_begun_answer_goes_on_in_the_group_of_its_model_alone() -> None:
    async with engine(groups=3) as (groups, client):
        stream = await client.submit([1, 2])
        lost = groups[stream.group]
        same, other = (group for group in groups if group is not lost)
        other.stop_serving()
        other.serve(model=7)
        first = await lost.submitted()
        lost.answer(first.request, [65])
        await until(lambda: stream.completion_tokens == 1)
        lost.lose()
        second = await same.submitted()
        assert progress_of(second) == [[65]]
        lost.serve(model=7)
        same.lose()
        assert "send the request again" in (await error_of(stream)).reason
        await other.require_silence()
        await lost.require_silence()


@in_a_loop
async def test_begun_answer_waits_while_no_group_serves_and_the_row_is_cleared() -> None:
    """A cleared row has no model: that says nothing about the model of the next incarnation."""
    async with engine() as ([group], client):
        group.stop_serving()
        group.serve(model=7)
        stream = await client.submit([1, 2])
        first = await group.submitted()
        group.answer(first.request, [65])
        await until(lambda: stream.completion_tokens == 1)
        group.lose()
        group._board.begin(0)
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 1)
        await group.require_silence()
        assert not stream.is_over
        group.serve(model=7)
        assert progress_of(await group.submitted()) == [[65]]


@in_a_loop
async def test_group_that_is_lost_while_its_model_is_read_is_left_out() -> None:
    async with engine() as ([group], client):
        serving = client.serving_groups
        group.stop_serving()
        assert client._models(serving) == {}
        group.serve(model=7)
        assert client._models(serving) == {} and client._models(client.serving_groups) == {0: 7}


@in_a_loop
async def test_request_avoids_a_group_without_an_output_processor() -> None:
    async with engine(groups=2) as (groups, client):
        stream = await client.submit([1, 2])
        lacking, other = groups[stream.group], groups[1 - stream.group]
        await lacking.submitted()
        lacking._board.row(stream.group)[StatusBoard.ABSENT_OUTPUTS] = 1
        lacking.core.send(Failed(stream.request, 503, "an output died", Resume.OUTPUT_DIED), PATIENCE)
        await other.submitted()
        other.stop_serving()
        other.judge(Cause.OUTSIDE)
        await lacking.submitted()  # which holds the request until it has another output processor


@in_a_loop
async def test_request_is_the_same_but_for_number_progress_and_failures() -> None:
    async with engine() as ([group], client):
        params = SamplingParams(n=2, temperature=0.5, stop=("x",), seed=-1)
        chunk_format = ChunkFormat(Style.CHAT, b'{"id":"1"', 2)
        prompt = np.arange(50, dtype=np.int32)
        before = time.monotonic_ns()
        await client.submit(prompt, params, priority=3, client="c", salt=b"s", chunk_format=chunk_format)
        first = await group.submitted()
        prompt[:] = 0  # the caller's own
        assert before < first.arrived_ns < time.monotonic_ns() and first.seed == (1 << 64) - 1
        group.lose(Cause.ITSELF)
        await asyncio.sleep(SILENCE)
        group.serve()
        again = await group.submitted()
        assert (again.prompt.tolist(), again.params, again.priority) == (list(range(50)), params, 3)
        assert (again.client, again.salt, again.chunk_format) == ("c", b"s", chunk_format)
        assert (again.seed, again.arrived_ns, again.server) == (first.seed, first.arrived_ns, 0)


@in_a_loop
async def test_drawn_seed_stays_the_request_s_and_stands_in_the_log(events: EventFields) -> None:
    async with engine() as ([group], client):
        await client.submit([1], request_id="req-1")
        await client.submit([1])
        first, other = await group.submitted(), await group.submitted()
        assert 0 <= first.seed < 1 << 63 and first.seed != other.seed
        await restart(group, client, waiting=2)
        assert (await group.submitted()).seed == first.seed
    logged = {"request_id": "req-1", "request": first.request, "group": 0, "seed": first.seed}
    assert events("request submitted")[0] == logged


@in_a_loop
async def test_samples_that_are_over_are_not_run_again() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1], SamplingParams(n=3))
        first = await group.submitted()
        group.answer(first.request, [65], sample=2)
        group.answer(first.request, [66, 67], FinishReason.STOP, sample=0)
        await until(lambda: stream.completion_tokens == 3)
        await restart(group, client)
        again = await group.submitted()
        assert progress_of(again) == [None, [], [65]]
        for sample in (1, 2):
            group.answer(again.request, [70 + sample], FinishReason.STOP, sample=sample)
        answers: list[list[int]] = [[], [], []]
        async for chunk in stream:
            answers[chunk.sample] += chunk.ids
        assert answers == [[66, 67], [71], [65, 72]]


@in_a_loop
async def test_requests_go_by_priority_and_arrival_when_a_group_serves() -> None:
    async with engine() as ([group], client):
        for number, priority in enumerate((1, 0, 1, 0)):
            await client.submit([number], priority=priority)
            await group.submitted()
        await restart(group, client, waiting=4)
        assert [int((await group.submitted()).prompt[0]) for _ in range(4)] == [1, 3, 0, 2]


@in_a_loop
async def test_request_is_submitted_again_each_time_its_group_is_lost() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1])
        ids: list[int] = []
        for loss in range(3):
            submit = await group.submitted()
            assert ids == (progress_of(submit)[0] if ids else [])
            if loss != 1:  # then it is lost before a chunk has come
                ids.append(65 + loss)
                group.answer(submit.request, ids[-1:])
                await until(lambda: stream.completion_tokens == len(ids))
            await restart(group, client)
        submit = await group.submitted()
        group.answer(submit.request, [70], FinishReason.STOP)
        assert await read(stream) == [65, 67, 70]
        assert migrations(client) == {"died": 3} and sum(MigrationCounters.PAUSE.counts(client.counters[0].words)) == 2


@in_a_loop
async def test_images_stay_as_they_were_until_the_request_is_over() -> None:
    async with engine(store_nbytes=8 << 20) as ([group], client):
        large, small = np.arange(50_000, dtype=np.float32), np.arange(20, dtype=np.float32)
        images = [ImageInput({"pixel_values": large}, 2, 4, bytes(32)), ImageInput({"pixel_values": small}, 8, 2)]
        stream = await client.submit(range(20), values=images)
        first = await group.submitted()
        await restart(group, client)
        again = await group.submitted()
        assert again.inputs is not None and first.inputs is not None
        assert [item.is_inline for item in again.inputs.items] == [False, True]
        assert again.inputs.items[0] == first.inputs.items[0]
        inline = again.inputs.items[1].open().value()
        assert (inline["pixel_values"] == small).all()
        group.answer(again.request, [65], FinishReason.STOP)
        assert await read(stream) == [65]


# ── a request ends while it waits ────────────────────────────────────────────────────────────────────────────────────
async def waiting(group: Group, client: Client, **options: Any) -> OutputStream:
    """A request with a chunk, after the loss of its group."""
    stream = await client.submit([1], **options)
    group.answer((await group.submitted()).request, [65])
    group.lose()
    await until(lambda: client.counters[0][MigrationCounters.WAITING] == 1)
    return stream


@in_a_loop
async def test_aborted_request_is_forgotten_while_it_waits() -> None:
    async with engine(store_nbytes=8 << 20) as ([group], client):
        image = ImageInput({"pixel_values": np.zeros(50_000, np.float32)}, 0, 1, bytes(32))
        async with await waiting(group, client, values=[image]) as stream:
            pass
        assert await read(stream) == [65]
        assert client.open_requests == client.counters[0][MigrationCounters.WAITING] == 0
        group.serve()
        await group.require_silence()


@in_a_loop
async def test_time_of_a_request_goes_on_while_it_waits() -> None:
    async with engine() as ([group], client):
        error = await error_of(await waiting(group, client, timeout=0.3))
        assert error.status == 504 and client.open_requests == 0
        group.serve()
        await group.require_silence()


@in_a_loop
async def test_request_goes_to_a_group_that_still_serves_during_a_shutdown() -> None:
    """The launcher judges no group then."""
    async with engine(groups=2) as (groups, client):
        stream = await client.submit([1])
        lost, other = groups[stream.group], groups[1 - stream.group]
        lost._board.drain()
        lost.stop_serving()
        other.answer((await other.submitted()).request, [65], FinishReason.STOP)
        assert await read(stream) == [65]


@in_a_loop
async def test_request_that_no_group_takes_ends_with_503_in_time() -> None:
    async with engine(migration_timeout=0.2) as ([group], client):
        error = await error_of(await waiting(group, client))
        assert error.status == 503 and "no group has taken the request within 0.2 s" in error.reason
        assert client.counters[0][MigrationCounters.GIVEN_UP] == 1


# ── a new request while no group serves ──────────────────────────────────────────────────────────────────────────────
def submitting(client: Client, **options: Any) -> asyncio.Task[OutputStream]:
    return asyncio.ensure_future(client.submit([1], **options))


@in_a_loop
async def test_new_requests_wait_for_a_group_that_is_started_again() -> None:
    async with engine() as ([group], client):
        group.lose()
        await until(lambda: not client.can_submit)
        newcomers = [submitting(client) for _ in range(3)]
        await group.require_silence()
        assert not any(newcomer.done() for newcomer in newcomers)
        assert client.queue_counters[QueueCounters.WAITING] == 3
        newcomers[0].cancel()
        await until(lambda: client.queue_counters[QueueCounters.WAITING] == 2)
        group.serve()
        for newcomer in newcomers[1:]:
            submit = await group.submitted()
            group.answer(submit.request, [65], FinishReason.STOP)
            assert await read(await newcomer) == [65]
        await group.require_silence()
        assert list(map(client.queue_counters.__getitem__, range(QueueCounters.WORDS))) == [0, 0]


@in_a_loop
async def test_new_request_waits_when_the_client_sees_a_death_before_launcher() -> None:
    async with engine() as ([group], client):
        client._cores.mark_dead(0, group.incarnation)
        newcomer = submitting(client)
        await group.require_silence()
        group.serve()
        await group.submitted()
        (await newcomer).abort()


@in_a_loop
async def test_new_request_waits_when_its_group_is_lost_while_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as ([group], client):
        models = client._models

        def lose_group(serving: dict[int, int]) -> dict[int, int]:
            monkeypatch.setattr(client, "_models", models)
            group.lose()
            return models(serving)

        monkeypatch.setattr(client, "_models", lose_group)
        newcomer = submitting(client)
        await until(lambda: newcomer.done() or client.queue_counters[QueueCounters.WAITING] == 1)
        group.serve()
        (await newcomer).abort()
        await group.submitted()


@in_a_loop
async def test_new_request_waits_for_the_queue_timeout_at_most() -> None:
    async with engine(queue_timeout=0.2) as ([group], client):
        group.lose()
        for options, status in (({}, 503), ({"timeout": 0.1}, 504)):
            with pytest.raises(EngineError) as caught:
                await client.submit([1], **options)
            assert caught.value.status == status
        assert client.queue_counters[QueueCounters.TIMEOUTS] == 1, "the other request had no time left"
        group.serve()
        await group.require_silence()


@in_a_loop
async def test_new_request_is_refused_at_once_when_the_queue_timeout_is_0() -> None:
    async with engine(queue_timeout=0) as ([group], client):
        group.lose()
        with pytest.raises(EngineError, match=r"none has within 0 s \(--queue-timeout\)") as caught:
            await asyncio.wait_for(client.submit([1]), PATIENCE)
        assert caught.value.status == 503
        group.serve()
        stream = await client.submit([1])
        await group.submitted()
        stream.abort()


@in_a_loop
async def test_open_request_outlives_the_queue_timeout() -> None:
    async with engine(queue_timeout=0.05) as ([group], client):
        stream = await waiting(group, client)
        await group.require_silence()
        group.serve()
        group.answer((await group.submitted()).request, [65], FinishReason.STOP)
        assert await read(stream) == [65, 65]


@in_a_loop
async def test_lost_request_is_given_up_while_a_new_one_waits() -> None:
    async with engine(migration_timeout=0.1) as ([group], client):
        lost = await waiting(group, client)
        newcomer = submitting(client)
        assert (await error_of(lost)).status == 503
        assert not newcomer.done()
        group.serve()
        await group.submitted()
        (await newcomer).abort()


@in_a_loop
async def test_request_that_meets_a_dead_core_is_still_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is dead before the request is sent, and the client learns of the death by the request."""
    async with engine(queue_timeout=0.2) as ([group], client):

        async def send(place: Placement, *_: Any) -> None:
            client._cores.mark_dead(place.group, place.incarnation)
            raise GroupLost(503, "core 0 has died")

        monkeypatch.setattr(client._cores, "send", send)
        with pytest.raises(EngineError, match="queue-timeout"):
            await asyncio.wait_for(client.submit([1]), PATIENCE)
        assert client.queue_counters[QueueCounters.TIMEOUTS] == 1
        assert client.open_requests == client.counters[0][MigrationCounters.WAITING] == 0
        group.lose()


@in_a_loop
async def test_request_that_meets_a_dead_core_goes_to_a_group_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(groups=2, queue_timeout=0) as (groups, client):
        send, met = client._cores.send, list[int]()

        async def send_once(place: Placement, *arguments: Any) -> None:
            met.append(place.group)
            if len(met) > 1:
                return await send(place, *arguments)
            client._cores.mark_dead(place.group, place.incarnation)
            raise GroupLost(503, "the core has died")

        monkeypatch.setattr(client._cores, "send", send_once)
        stream = await client.submit([1])
        assert met == [1 - stream.group, stream.group]
        await groups[stream.group].submitted()
        assert sum(client._open) == 1
        stream.abort()


@in_a_loop
async def test_expired_unsent_request_is_not_counted_as_waiting_for_a_group() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1], timeout=0.0)
        await group.submitted()
        with pytest.raises(EngineError, match=r"within 0 s"):
            await anext(stream)


@pytest.mark.parametrize(("is_shutdown", "reason"), [(True, "shutting down"), (False, "has been closed")])
@in_a_loop
async def test_shutdown_or_close_ends_lost_and_new_requests_that_wait(is_shutdown: bool, reason: str) -> None:
    async with engine() as ([group], client):
        lost = await waiting(group, client)
        newcomer = submitting(client)
        await group.require_silence()

        async def errors() -> list[EngineError]:
            with pytest.raises(EngineError) as refused:
                await newcomer
            return [await error_of(lost), refused.value]

        if is_shutdown:
            group._board.drain()
            ended = await errors()
    if not is_shutdown:
        ended = await errors()
    assert all(error.status == 503 and reason in error.reason for error in ended)


@pytest.mark.parametrize(("limit", "has_served"), [(0, True), (3, False)])
@in_a_loop
async def test_new_request_is_refused_at_once_while_the_first_group_loads(limit: int, has_served: bool) -> None:
    async with engine(migration_limit=limit) as ([group], client):
        group.stop_serving()
        group._board.cluster[StatusBoard.SERVED] = int(has_served)
        with pytest.raises(EngineError, match="no group of the engine serves now"):
            await asyncio.wait_for(client.submit([1]), PATIENCE)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_request_ends_with_503_at_once_where_the_limit_is_0() -> None:
    async with engine(groups=2, migration_limit=0) as (groups, client):
        stream = await client.submit([1])
        assert stream.submitted is None
        groups[stream.group].stop_serving()  # the launcher has not judged it
        error = await error_of(stream)
        assert error.status == 503 and "has died: it does not serve any more" in error.reason
        stream = await client.submit([1])
        groups[stream.group].core.send(Failed(stream.request, 503, "an output died", Resume.OUTPUT_DIED), PATIENCE)
        assert (await error_of(stream)).reason == "an output died"


@in_a_loop
async def test_request_ends_with_503_after_as_many_losses_as_the_limit_says() -> None:
    """Neither a planned restart nor a trial that it has passed counts."""
    async with engine(migration_limit=2) as ([group], client):
        stream = await client.submit([1])
        for cause in (Cause.PLANNED, Cause.OUTSIDE, Cause.PLANNED):
            await group.submitted()
            await restart(group, client, cause)
        for resume in (Resume.SUSPECT_RUNS, Resume.SUSPECT_RUNS, Resume.OUTPUT_DIED, Resume.OUTPUT_DIED):
            request = (await group.submitted()).request
            group.core.send(Failed(request, 503, "an output died", resume), PATIENCE)
        error = await error_of(stream)
        assert error.status == 503 and "an output died; the request has been resumed 2 times" in error.reason
        assert migrations(client) == {"planned": 2, "died": 1, "output": 1}
        assert client.open_requests == 0


@in_a_loop
async def test_request_with_more_tokens_than_are_kept_ends_with_503() -> None:
    async with engine(migration_max_seq_len=10) as ([group], client):
        short, long = await client.submit([1, 2, 3]), await client.submit([1, 2, 3])
        for submit, tokens in ((await group.submitted(), 7), (await group.submitted(), 8)):
            group.answer(submit.request, range(tokens))
        await until(lambda: long.submitted is not None and long.submitted.kept_tokens == 3)  # its ids are dropped
        group.lose()
        error = await error_of(long)
        assert error.status == 503 and "more than migration_max_seq_len (10) tokens" in error.reason
        group.serve()
        assert progress_of(await group.submitted()) == [list(range(7))]
        short.abort()


# ── blame ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_request_waits_for_the_verdict_though_another_group_serves() -> None:
    async with engine(groups=2) as (groups, client):
        stream = await client.submit([1])
        lost, other = groups[stream.group], groups[1 - stream.group]
        lost.stop_serving()
        await other.require_silence()
        lost.judge(Cause.OUTSIDE)
        await other.submitted()


@pytest.mark.parametrize(("cause", "failures"), [(Cause.ITSELF, 1), (Cause.OUTSIDE, 0), (Cause.PLANNED, 0)])
@in_a_loop
async def test_failures_count_requests_in_steps_of_a_group_failed_by_itself(cause: Cause, failures: int) -> None:
    async with engine() as ([group], client):
        running, queued = await client.submit([1]), await client.submit([2])
        await group.submitted(), await group.submitted()
        await restart(group, client, cause, running, waiting=2)
        assert sorted([(await group.submitted()).failures for _ in range(2)]) == [0, failures]
        queued.abort()


@in_a_loop
async def test_request_that_fails_twice_alone_is_convicted_and_no_other_is(events: EventFields) -> None:
    async with engine() as ([group], client):
        streams = [await client.submit([number], request_id=f"req-{number}") for number in range(4)]
        failures = [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 2, 0], [0, 3, 0, 0]]
        for loss, counts in enumerate(failures):
            submits = [await group.submitted() for _ in streams]
            assert [submit.failures for submit in submits] == sorted(counts), "the most suspected one comes last"
            in_flight = streams[:3] if loss < 2 else streams[1:2]
            group.lose(Cause.ITSELF, *in_flight, is_trial=loss >= 2)
            await until(lambda: client.counters[0][MigrationCounters.WAITING] >= 3)
            group.serve()
        error = await error_of(streams[1])
        assert error.status == 500 and "a process has failed 4 times" in error.reason
        assert [(await group.submitted()).failures for _ in range(3)] == [0, 0, 0]
        assert migrations(client) == {"failed": 15} and client.counters[0][MigrationCounters.GIVEN_UP] == 1
        assert client.counters[0][MigrationCounters.CONVICTIONS] == 1
        # The failures that another request is the reason of do not count towards migration_limit.
        submitted = [stream.submitted for stream in (streams[0], streams[2], streams[3])]
        assert [request and request.migrations for request in submitted] == [0, 0, 0]
    (logged,) = events("request has made its group fail")
    assert logged["request_id"] == "req-1" and logged["failures"] == 4


@in_a_loop
async def test_request_of_another_server_on_trial_clears_this_server_s() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1])
        await group.submitted()
        await restart(group, client, Cause.ITSELF, stream)
        again = await group.submitted()
        assert again.failures == 1
        group.judge(Cause.ITSELF, [(7, again.request)], is_trial=True)
        group.stop_serving()
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 1)
        group.serve()
        assert (await group.submitted()).failures == 0


@in_a_loop
async def test_failure_without_a_suspect_of_one_failure_clears_the_suspect() -> None:
    async with engine() as ([group], client):
        stream, other = await client.submit([1]), await client.submit([2])
        for failures in ([0, 0], [1, 1], [0, 2]):
            assert [(await group.submitted()).failures for _ in range(2)] == failures
            await restart(
                group, client, Cause.ITSELF, *((stream, other) if failures == [0, 0] else (other,)), waiting=2
            )
        stream.abort(), other.abort()


async def fail_twice(group: Group, client: Client, *streams: OutputStream) -> None:
    """The group fails by itself two times, with these requests in flight."""
    for _ in range(2):
        for _ in streams:
            await group.submitted()
        group.lose(Cause.ITSELF, *streams)
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == len(streams))
        group.serve()


@in_a_loop
async def test_request_that_was_cleared_survives_as_many_failures_again() -> None:
    """Those of another request that makes processes fail, in the end as often as the limit says."""
    async with engine(migration_limit=2) as ([group], client):
        stream = await client.submit([1], SamplingParams(max_tokens=1000))
        for clearings in range(3):
            await fail_twice(group, client, stream)
            suspect = await group.submitted()
            assert suspect.failures == 2
            group.answer(suspect.request, range(TRIAL_TOKENS))
            await until(lambda count=clearings + 1: stream.completion_tokens == count * TRIAL_TOKENS)
            if clearings < 2:
                await restart(group, client, Cause.PLANNED)
        for _ in range(2):  # a failure counts half
            await restart(group, client, Cause.ITSELF, stream)
            await group.submitted()
        group.lose(Cause.ITSELF, stream)
        error = await error_of(stream)
        assert error.status == 503 and "has been resumed 4 times (migration_limit)" in error.reason


@in_a_loop
async def test_request_that_makes_room_for_a_suspect_stays_as_suspect_as_it_was() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1])
        await group.submitted()
        await restart(group, client, Cause.ITSELF, stream)
        again = await group.submitted()
        group.core.send(Failed(again.request, 503, "a suspect runs", Resume.SUSPECT_RUNS), PATIENCE)
        assert (await group.submitted()).failures == again.failures == 1
        assert migrations(client) == {"failed": 1}


@in_a_loop
async def test_verdict_that_was_written_over_blames_no_request() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1])
        await group.submitted()
        group.incarnation += 2
        group.judge(Cause.ITSELF, [(0, stream.request)])
        group.serve()
        assert (await group.submitted()).failures == 0 and migrations(client) == {"unknown": 1}


# ── what meets on the way ────────────────────────────────────────────────────────────────────────────────────────────
class SlowSenders:
    """Holds messages to cores back until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = asyncio.Event(), asyncio.Event()
        send = CoreSenders.send

        async def slow(senders: CoreSenders, *args: Any) -> None:
            if isinstance(args[1], Submit):
                self.began.set()
                await self.go.wait()
            await send(senders, *args)

        monkeypatch.setattr(CoreSenders, "send", slow)


@in_a_loop
async def test_submit_that_arrives_after_its_group_was_lost_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waiting for room: the core of the next incarnation would run a request that no stream has."""
    async with engine() as ([group], client):
        slow = SlowSenders(monkeypatch)
        submitting = asyncio.ensure_future(client.submit([1]))
        await slow.began.wait()
        await restart(group, client)
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 0)
        slow.go.set()
        stream = await submitting
        messages = [await group.receive() for _ in range(3)]
        submits = {message.request for message in messages if isinstance(message, Submit)}
        (abort,) = [message for message in messages if isinstance(message, Abort)]
        assert submits - set(abort.requests.tolist()) == {stream.request}


@in_a_loop
async def test_cancelled_submit_leaves_no_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as ([group], client):
        slow = SlowSenders(monkeypatch)
        submitting = asyncio.ensure_future(client.submit([1]))
        await slow.began.wait()
        group.lose()
        await until(lambda: client.counters[0][MigrationCounters.WAITING] == 1)
        submitting.cancel()
        await asyncio.wait([submitting])
        assert client.open_requests == client.counters[0][MigrationCounters.WAITING] == 0


def test_kept_request_of_4000_tokens_takes_less_than_40_kilobytes() -> None:
    def stream_of(submitted: SubmittedRequest | None) -> OutputStream:
        stream = OutputStream(1, 0, 1, 2000, 1, None, submitted)
        for token in range(2000):
            stream.add(OutputChunk(0, b"", [1000 + token]))
            stream._chunks.clear()  # as its reader does
        return stream

    nbytes = []
    for is_kept in (False, True):
        tracemalloc.start()
        submit = Submit(0, 1, np.arange(2000, dtype=np.int32), SamplingParams()) if is_kept else None
        stream = stream_of(submit and SubmittedRequest(submit))
        nbytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert stream.completion_tokens == 2000
    assert 16_000 < nbytes[1] - nbytes[0] < 40_000


@in_a_loop
async def test_kept_tokens_are_counted_while_requests_are_open() -> None:
    async with engine() as ([group], client):
        stream = await client.submit([1, 2, 3], SamplingParams(n=2))
        submit = await group.submitted()
        group.answer(submit.request, range(10), sample=0)
        group.answer(submit.request, range(4), sample=1)
        await until(lambda: client.counters[0][MigrationCounters.KEPT_TOKENS] == 17)
        group.answer(submit.request, [9], FinishReason.STOP, sample=0)
        await until(lambda: client.counters[0][MigrationCounters.KEPT_TOKENS] == 7)
        stream.abort()
        await until(lambda: client.counters[0][MigrationCounters.KEPT_TOKENS] == 0)
