"""Every way through the engine leads to the same answers, ends and counts: a tiny real model, token for token."""

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
tokenizers = pytest.importorskip("tokenizers")

from penstock.engine.client.client import Client  # noqa: E402
from penstock.engine.client.stream import EngineError  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.messages import FinishReason, SamplingParams  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.engine import START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import VOCABULARY, build_family  # noqa: E402

WAYS = [  # overlap, output processors, ranks, prefix cache
    (overlap, outputs, ranks, caching)
    for ranks in (1, 2)
    for outputs in (0, 1, 2)
    for overlap in (True, False)
    for caching in (True, False)
]
FEW = [(False, 0, 1, False), (True, 2, 2, True)]  # each value of each


def write_tokenizer(directory: Path) -> None:
    """Every id is a blank and its number."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"Ġ{number}": number for number in range(VOCABULARY)}, "Ġ0")
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    words.save(str(directory / "tokenizer.json"))


class Expected:
    """What of a greedy answer a request gets."""

    def __init__(self, client: Client, prompt: list[int], greedy: list[int]) -> None:
        self.client, self.prompt, self.greedy = client, prompt, greedy
        self.text = "".join(f" {token}" for token in greedy)

    async def ask(self, **params: object) -> list[tuple[list[int], str, FinishReason, object]]:
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": len(self.greedy), "ignore_eos": True, **params})
        ids: list[list[int]] = [[] for _ in range(sampling.n)]
        texts, ends = [""] * sampling.n, [None] * sampling.n
        async with await self.client.submit(self.prompt, sampling, timeout=START) as stream:
            async for piece in stream:
                assert ends[piece.sample] is None, "more came after the end"
                ids[piece.sample] += piece.ids
                texts[piece.sample] += piece.text
                if piece.reason is not None:
                    ends[piece.sample] = piece.reason, piece.stop
        assert (stream.prompt_tokens, stream.completion_tokens) == (len(self.prompt), sum(map(len, ids)))
        return [(token, text, *end) for token, text, end in zip(ids, texts, ends, strict=True)]

    async def must_end_by_its_length(self) -> None:
        for length in (1, len(self.greedy)):
            text = "".join(f" {token}" for token in self.greedy[:length])
            want = (self.greedy[:length], text, FinishReason.LENGTH, None)
            assert await self.ask(max_tokens=length, n=2) == [want, want]

    async def must_end_by_a_stop_string_across_two_tokens(self) -> None:
        at = next(at for at in range(1, len(self.greedy)) if self.is_first(self.stop(at), at))
        expected = (
            self.greedy[: at + 1],
            self.text[: self.text.index(self.stop(at))],
            FinishReason.STOP,
            self.stop(at),
        )
        assert await self.ask(stop=(self.stop(at), "no such text")) == [expected]

    def stop(self, at: int) -> str:
        return f"{str(self.greedy[at - 1])[-1]} {self.greedy[at]}"

    def is_first(self, stop: str, at: int) -> bool:
        """No other one comes before it: one number may begin with another."""
        before = "".join(f" {token}" for token in self.greedy[:at])
        return self.text.index(stop) == len(before) - 1

    async def must_end_by_an_id(self) -> None:
        for stop in (self.greedy[3], self.greedy[-1]):
            at = self.greedy.index(stop)
            text = "".join(f" {token}" for token in self.greedy[:at])
            want = (self.greedy[: at + 1], text, FinishReason.STOP, stop)
            assert await self.ask(stop_token_ids=(stop,)) == [want]

    async def must_not_end_before_its_least_tokens(self, end_id: int) -> None:
        ((ids, _, _, _),) = await self.ask(ignore_eos=False, min_tokens=9)
        assert len(ids) >= 9 and end_id not in ids[:9]

    async def must_draw_the_same_again(self) -> None:
        first, other = [await self.ask(temperature=1.5, seed=7, n=3) for _ in range(2)]
        assert first == other and len({tuple(ids) for ids, *_ in first}) > 1


@pytest.mark.timeout(6 * START)
@pytest.mark.parametrize(("overlap", "outputs", "ranks", "caching"), FEW if tiers.TIER == "push" else WAYS)
@in_a_loop
async def test_every_way_leads_to_the_same_answers_ends_and_counts(
    overlap: bool, outputs: int, ranks: int, caching: bool, tmp_path: Path
) -> None:
    family = build_family("llama", tmp_path)
    write_tokenizer(tmp_path)
    end_id = family.answers[0][2]
    sizes = {
        "num_gpu_blocks_override": 100,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    way = {
        "async_scheduling": overlap,
        "output_processors": outputs,
        "tensor_parallel_size": ranks,
        "enable_prefix_caching": caching,
    }
    config = EngineConfig(model=str(tmp_path), dtype="float32", end_ids=(end_id,), **sizes, **way)
    async with launched(config, within=2 * START) as engine, Client(engine.launcher.cluster, 0) as client:
        pairs = list(zip(family.requests, family.answers, strict=True))[:3]
        all_asked = [Expected(client, list(request.prompt), list(answer)) for request, answer in pairs]
        for _ in range(2):  # the second time the cache has them
            await asyncio.gather(
                *(expected.must_end_by_its_length() for expected in all_asked),
                *(expected.must_end_by_a_stop_string_across_two_tokens() for expected in all_asked),
                *(expected.must_end_by_an_id() for expected in all_asked),
            )
        await all_asked[0].must_not_end_before_its_least_tokens(end_id)
        await all_asked[0].must_draw_the_same_again()
        with pytest.raises(EngineError, match=f"expected ids from 0 to {VOCABULARY - 1}"):
            await asyncio.wait_for(anext(await client.submit([1, VOCABULARY])), START)
        row = engine.launcher.board.row(0)
        for _ in range(1000):
            if (row[StatusBoard.OPEN], row[StatusBoard.FREE_BLOCKS]) == (0, sizes["num_gpu_blocks_override"]):
                break
            await asyncio.sleep(0.01)
        assert (row[StatusBoard.OPEN], row[StatusBoard.FREE_BLOCKS]) == (0, sizes["num_gpu_blocks_override"])
        assert row[StatusBoard.SERVING] == 1, "the group has died"
