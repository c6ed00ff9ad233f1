"""The whole engine on a simulated device: the tokens of its rule, whatever the engine looks like."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from tests import tiers
from tests.support.engine import Running, answered, prompt, running, simulated_device
from tests.support.loops import in_a_loop

END = 7
PROGRAM = """
import asyncio
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice


async def main():
    launcher = Launcher(EngineConfig(simulated=SimulatedDevice(), fork_server="{fork_server}"))
    try:
        launcher.start()
        await launcher.serving()
    finally:
        await launcher.stop()


asyncio.run(main())
"""


async def must_answer_by_the_rule(engine: Running, client: Client, length: int, tokens: int, samples: int = 1) -> None:
    ids = prompt(length)
    actual = await answered(client, ids, max_tokens=tokens, n=samples)
    for sample, (answer, reason) in enumerate(actual):
        assert answer == engine.rule.answer(ids, tokens, sample)
        assert reason == (FinishReason.STOP if answer[-1] == END else FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("overlap", "outputs"),
    [(True, 2), (False, 0), *tiers.only_in_all((True, 0), (False, 2))],
)
@in_a_loop
async def test_all_clients_get_exactly_the_tokens_of_the_rule(overlap: bool, outputs: int) -> None:
    simulated = simulated_device(end_id=END, end_one_in=40)
    options = {"tensor_parallel_size": 2, "api_server_count": 2, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    async with running(async_scheduling=overlap, output_processors=outputs, simulated=simulated, **options) as engine:
        async with Client(engine.launcher.cluster, 0) as first, Client(engine.launcher.cluster, 1) as other:
            answers = [
                must_answer_by_the_rule(engine, client, 1 + 7 * number, 1 + 5 * number, 1 + number % 3)
                for number in range(20)
                for client in (first, other)
            ]
            await asyncio.gather(*answers)
        await engine.must_be_empty()


@pytest.mark.parametrize(("outputs", "samples"), [pytest.param(0, 1, marks=tiers.needs_all), (2, 2)])
@in_a_loop
async def test_random_lengths_up_to_the_models_are_answered_by_the_rule(outputs: int, samples: int, seed: int) -> None:
    """With requests that join, go, are preempted, and find the blocks of others, in tables that grow."""
    chance, longest = random.Random(seed), tiers.choose(2048, 4096, 4096)
    simulated = simulated_device(step_seconds=0.0002, blocks=longest // 16 + 60)
    options = {
        "tensor_parallel_size": 2,
        "max_num_seqs": 12,
        "max_model_len": longest,
        "output_processors": outputs,
    }
    async with running(simulated=simulated, **options) as engine:
        beginning = prompt(longest)

        async def answered_with_priority(client: Client, length: int, priority: int) -> None:
            size = chance.randint(1, min(length - 1, 1500))
            ids = np.concatenate([beginning[: chance.randint(0, size - 1)], prompt(size)])[:size]
            params = SamplingParams(n=samples, max_tokens=length - size)
            actual: list[list[int]] = [[] for _ in range(samples)]
            async with await client.submit(ids, params, priority=priority) as stream:
                async for piece in stream:
                    actual[piece.sample] += piece.ids
            assert actual == [engine.rule.answer(ids, length - size, sample) for sample in range(samples)]

        lengths = [size + more for size in (256, 512, 1024, longest // 2) for more in (0, 1, chance.randint(2, 200))]
        lengths += [longest, longest, chance.randint(2, longest)]
        chance.shuffle(lengths)
        async with Client(engine.launcher.cluster, 0) as client:
            everybody = []
            for number, length in enumerate(lengths):
                everybody.append(asyncio.ensure_future(answered_with_priority(client, length, -(number % 3))))
                await asyncio.sleep(chance.uniform(0, 0.05))
            gone = asyncio.ensure_future(answered_with_priority(client, longest, 0))
            await asyncio.sleep(0.1)
            gone.cancel()
            await asyncio.gather(*everybody)
        assert engine.number(StatusBoard.PREEMPTIONS) > 0
        await engine.must_be_empty()


@in_a_loop
async def test_what_a_request_can_meet() -> None:
    """One engine for all of it: starting one takes longer than any of this."""
    async with running(max_model_len=256) as engine, Client(engine.launcher.cluster, 0) as client:
        await an_aborted_request_ends_and_gives_its_blocks_back(engine, client)
        await one_that_can_never_run_is_refused_with_the_reason(client)
        await one_that_takes_too_long_ends_with_a_time_out(engine, client)
        await what_nobody_has_taken_yet_comes_as_one_piece(client)
        await who_is_cancelled_aborts(engine, client)


async def an_aborted_request_ends_and_gives_its_blocks_back(engine: Running, client: Client) -> None:
    async with await client.submit(prompt(), SamplingParams(max_tokens=200)) as stream:
        async for _ in stream:
            break
    assert stream.is_over and client.open_requests == 0
    assert [piece async for piece in stream] == []
    await engine.must_be_empty()


async def one_that_can_never_run_is_refused_with_the_reason(client: Client) -> None:
    stream = await client.submit(prompt(256))
    with pytest.raises(EngineError, match="expected a prompt of 1 to 255 tokens, got 256") as caught:
        await anext(stream)
    assert caught.value.status == 400


async def one_that_takes_too_long_ends_with_a_time_out(engine: Running, client: Client) -> None:
    stream = await client.submit(prompt(), SamplingParams(max_tokens=200), timeout=0.05)
    with pytest.raises(EngineError, match=r"not complete within 0\.05 s") as caught:
        async for _ in stream:
            pass
    assert caught.value.status == 504
    await engine.must_be_empty()


async def what_nobody_has_taken_yet_comes_as_one_piece(client: Client) -> None:
    stream = await client.submit(prompt(), SamplingParams(max_tokens=100))
    while not stream.is_over:
        await asyncio.sleep(0.01)
    pieces = [piece async for piece in stream]
    assert len(pieces) == 1 and len(pieces[0].ids) == 100 and pieces[0].reason == FinishReason.LENGTH


async def who_is_cancelled_aborts(engine: Running, client: Client) -> None:
    task = asyncio.ensure_future(answered(client, prompt(), max_tokens=200))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.open_requests == 0
    await engine.must_be_empty()


@in_a_loop
async def test_requests_are_shared_among_the_groups_and_equal_beginnings_meet() -> None:
    async with (
        running(data_parallel_size=2, output_processors=1) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        ids = prompt(100)
        first = await client.submit(ids, SamplingParams(max_tokens=2))
        streams = [await client.submit(prompt(), SamplingParams(max_tokens=50)) for _ in range(20)]
        again = await client.submit(np.append(ids, 5), SamplingParams(max_tokens=2))
        for stream in (first, *streams, again):
            assert [piece async for piece in stream][-1].reason == FinishReason.LENGTH
        assert {stream.group for stream in streams} == {0, 1}
        assert again.group == first.group


@pytest.mark.parametrize("fork_server", ["auto", "off"])
def test_program_without_a_main_block_fails_with_one_sentence(fork_server: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(fork_server=fork_server))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert lines[-1].endswith("start the engine only in the block of `if __name__ == '__main__'`"), done.stderr


def test_program_from_standard_input_fails_with_one_sentence() -> None:
    program = PROGRAM.format(fork_server="auto")
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("and <stdin> is none: write the program to a file\n"), done.stderr
