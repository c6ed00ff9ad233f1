"""Aborts in every state of a request, by the thousand: nothing is left of them in the core, the output, the client."""

import asyncio
import random
import time

import pytest

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.protocol.messages import ChunkFormat, SamplingParams, Style
from tests import tiers
from tests.support.engine import PATIENCE, answered, prompt, running, simulated_device
from tests.support.loops import in_a_loop

AT_ONCE = 200


@pytest.mark.parametrize("outputs", [0, 1])
@in_a_loop
async def test_thousands_of_aborts_in_random_states_leave_nothing(outputs: int, seed: int) -> None:
    chance = random.Random(seed)

    async def stream(client: Client) -> None:
        params = SamplingParams(max_tokens=chance.randrange(1, 60), n=chance.choice([1, 1, 1, 3]))
        chunk_format = ChunkFormat(Style.CHAT, b'{"id":"1"') if chance.random() < 0.5 else None
        length = 300 if chance.random() < 0.05 else chance.randrange(1, 60)  # some are refused
        timeout = chance.choice([None, None, 0.01])
        asking = asyncio.ensure_future(
            client.submit(prompt(length), params, chunk_format=chunk_format, timeout=timeout)
        )
        if chance.random() < 0.1:
            await asyncio.sleep(0)
            asking.cancel()
        try:
            stream = await asking
        except asyncio.CancelledError:
            return
        patience = chance.choice([0.0, 0.0, 0.001, 0.01, 0.05, 0.2])
        if patience:
            await asyncio.sleep(patience)
        try:
            async with stream:
                if chance.random() < 0.5:
                    await anext(stream, None)
        except EngineError as error:
            assert error.status in (400, 504), error

    shape = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 256, "output_processors": outputs}
    async with running(simulated=simulated_device(blocks=200), **shape) as engine:
        async with Client(engine.launcher.cluster, 0) as client:
            began, turns = time.monotonic(), asyncio.Semaphore(AT_ONCE)

            async def in_turn() -> None:
                async with turns:
                    await asyncio.wait_for(stream(client), PATIENCE)

            await asyncio.gather(*(in_turn() for _ in range(tiers.ABORTS)))
            print(f"{tiers.ABORTS} requests, most of them aborted, in {time.monotonic() - began:.1f} s")
            assert client.open_requests == 0 and not client._streams
            await engine.must_be_empty()
            ids = prompt()
            assert (await answered(client, ids, max_tokens=20))[0][0] == engine.rule.answer(ids, 20)
            await engine.must_be_empty()


@in_a_loop
async def test_a_thousand_streams_of_one_client_of_which_some_are_read_late(seed: int) -> None:
    chance = random.Random(seed)
    async with running(
        simulated=simulated_device(step_seconds=0.02), max_num_seqs=1024, max_num_batched_tokens=4096
    ) as engine:
        async with Client(engine.launcher.cluster, 0) as client:

            async def request() -> None:
                ids, tokens = prompt(5), chance.randrange(1, 30)
                stream = await client.submit(ids, SamplingParams(max_tokens=tokens), timeout=2 * PATIENCE)
                actual: list[int] = []
                async for piece in stream:
                    actual += piece.ids
                    await asyncio.sleep(chance.choice([0.0, 0.0, 0.0, 0.3]))
                assert actual == engine.rule.answer(ids, tokens)
                assert stream.completion_tokens == len(actual)

            await asyncio.gather(*(request() for _ in range(1000)))
            assert client.open_requests == 0
        await engine.must_be_empty()
