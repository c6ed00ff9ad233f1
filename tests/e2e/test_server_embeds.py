"""Prompt embeddings over the API: answered like their ids, and refused with a reason."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from safetensors.torch import save  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests import tiers  # noqa: E402
from tests.crash.test_engine_images import held  # noqa: E402
from tests.e2e.test_server import Served, refused, run_server  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import ENGINE_SIZES, Family, build_family, families  # noqa: E402
from tests.unit.server.embeds.test_embeds_file import npy_of  # noqa: E402

COUNT = 10
HIDDEN = 64


def save_tokenizer(path: Path) -> None:
    """A token for each character, as Llama 2's: the space before a word is its own token's, and a text's first space
    is left out."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3}
    for character in map(chr, range(0x21, 0x7F)):
        ids[character] = len(ids)
    for character in "abcdefghijklmnopqrstuvwxyzABCDEFG":
        ids[f"▁{character}"] = len(ids)
    merges = [("▁", token[1]) for token in ids if len(token) == 2 and token[0] == "▁"]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class Embedding:
    """A served model, and the embeddings of ids."""

    def __init__(self, served: Served, family: Family) -> None:
        self.served = served
        self._layer = AutoModelForCausalLM.from_pretrained(family.path, dtype=torch.float32).get_input_embeddings()
        self._name = family.path.name

    def rows(self, ids: list[int]) -> Any:
        with torch.inference_mode():
            return self._layer(torch.tensor(ids)).clone()

    def value(self, ids: list[int], dtype: Any = torch.float32) -> str:
        return base64.b64encode(save({"x": self.rows(ids).to(dtype)})).decode()

    async def complete(self, prompt: Any = None, embeds: Any = None, **options: Any) -> Any:
        more = {"prompt_embeds": embeds} if embeds is not None else {}
        usual = {"model": self._name, "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
        extra = {"ignore_eos": True, "skip_special_tokens": False, **more, **options.pop("extra_body", {})}
        return await self.served.client.completions.create(**usual, extra_body=extra, **options)

    async def texts(self, *arguments: Any, **options: Any) -> list[str]:
        return [choice.text for choice in (await self.complete(*arguments, **options)).choices]


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def embeds_are_answered_as_their_ids_are(of: Embedding, family: Family) -> None:
    begins = []
    for request in family.requests:
        whole = await of.complete(request.prompt, logprobs=2)
        for value in (of.value(request.prompt), base64.b64encode(npy_of(of.rows(request.prompt).numpy())).decode()):
            ours = await of.complete(None, value, logprobs=2)
            (choice,), (expected,) = ours.choices, whole.choices
            assert (choice.text, choice.logprobs.tokens) == (expected.text, expected.logprobs.tokens)
            assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs.token_logprobs, abs=1e-4)
            assert ours.usage.prompt_tokens == whole.usage.prompt_tokens == len(request.prompt)
            stream = await of.complete(None, value, stream=True, stream_options={"include_usage": True})
            *events, last = [event async for event in stream]
            assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
            assert last.usage.prompt_tokens == len(request.prompt)
        begins.append(whole.choices[0].text[:1])
    assert " " in begins, "no answer begins with a space, which the tokenizer may leave out"


async def choices_are_first_for_embeds_and_then_for_texts(of: Embedding, family: Family) -> None:
    first_ids, two = family.requests[3].prompt, family.requests[4].prompt
    (first,), (second,) = [await of.texts(ids) for ids in (first_ids, two)]
    assert first != second
    assert await of.texts(two, of.value(first_ids)) == [first, second]
    assert await of.texts([first_ids, first_ids], [of.value(two), of.value(first_ids)]) == [second, first, first, first]
    for nothing in (None, "", []):
        assert await of.texts(nothing, [of.value(first_ids)]) == [first]
    assert await of.texts(None, of.value(two), n=2) == [second, second]


async def equal_embeds_share_blocks_and_a_place_in_the_store(of: Embedding, family: Family) -> None:
    ids = [7, *family.requests[3].prompt]
    store = of.served.launcher.cluster.store
    answers = [await of.complete(None, of.value(ids)) for _ in range(2)]
    assert answers[0].choices[0].text == answers[1].choices[0].text == (await of.texts(ids))[0]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached == [0, (len(ids) - 1) // 4 * 4]
    if store is None:
        assert await of.served.total("penstock_items_total", 'how="inline_without_store"') > 0
    else:
        assert await of.served.total("penstock_items_total", 'how="hit"') > 0
        assert await of.served.total("penstock_items_total", 'how="put"') == store.stats().puts > 0
        await of.served.until(lambda: not held(store))


SCENES = (
    embeds_are_answered_as_their_ids_are,
    choices_are_first_for_embeds_and_then_for_texts,
    equal_embeds_share_blocks_and_a_place_in_the_store,
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"store_nbytes": 1 << 24}) for name in families("gemma2", "gemma3_text")),
        pytest.param("llama", {"tensor_parallel_size": 2}, marks=tiers.needs_all),
        pytest.param("llama", {"store_nbytes": 1 << 24, "tensor_parallel_size": 2}, marks=tiers.needs_all),
    ],
    ids=str,
)
@in_a_loop
async def test_prompt_embeds_are_prompts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    family = build_family(name, tmp_path)
    save_tokenizer(tmp_path)
    sizes = {**ENGINE_SIZES, "block_size": 4, "api_server_count": 1, "enable_prompt_embeds": True, **options}
    async with run_server(simulated=None, model=str(tmp_path), **sizes) as served:
        of = Embedding(served, family)
        for scene in SCENES:
            await asyncio.wait_for(scene(of, family), 60)


# ── on a simulated device ────────────────────────────────────────────────────────────────────────────────────────────
def zeros(tokens: int, hidden: int = HIDDEN) -> str:
    return base64.b64encode(save({"x": torch.zeros(tokens, hidden)})).decode()


@in_a_loop
async def test_prompt_embeds_are_refused_in_words(tmp_path: Path) -> None:
    limits = {"max_body_nbytes": 1 << 20}
    async with run_server(limits, max_model_len=400, enable_prompt_embeds=True, store_nbytes=1 << 22) as served:

        async def refusal(**body: Any) -> Any:
            with refused("BadRequestError") as caught:
                await served.client.completions.create(model="simulated", prompt=None, max_tokens=4, extra_body=body)
            return caught.value

        zipped, value = base64.b64encode(b"PK\3\4" + bytes(100_000)).decode(), zeros(3)
        for body, param, words in (
            ({}, "prompt", "object missing required field prompt"),
            ({"prompt_embeds": "?"}, "prompt_embeds", "expected prompt embeddings as base64 of safetensors or npy"),
            ({"prompt_embeds": zipped}, "prompt_embeds", "a zip archive, as torch.save and numpy.savez write it"),
            ({"prompt_embeds": [value, "AAAA"]}, "prompt_embeds[1]", "are of neither format at $.prompt_embeds[1]"),
            ({"prompt_embeds": zeros(400)}, "prompt_embeds", "you requested 404 tokens (400 in the prompt_embeds"),
            ({"prompt_embeds": [value] * 129}, "prompt_embeds", "expected array of length <= 128"),
            ({"prompt_embeds": [value] * 100, "prompt": ["a"] * 29}, "prompt", "at most 128 prompts, got 129"),
            ({"prompt_embeds": 7}, "prompt_embeds", "expected str | array | null, got int"),
            ({"prompt_embeds": value, "echo": True}, "echo", "echo is not supported"),
            ({"prompt_embeds": value, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "of text alone"),
        ):
            error = await refusal(**body)
            assert error.param == param and words in error.message, error
        done = await served.client.completions.create(
            model="simulated", prompt="", max_tokens=4, extra_body={"prompt_embeds": value}
        )
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 4)
        store = served.launcher.cluster.store
        assert store is not None
        await served.until(lambda: not held(store))


@tiers.needs_all
def test_prompt_embeds_need_their_option_and_may_be_long() -> None:
    large = zeros(2000, 2048)  # 16 MB, of which the decoder of JSON sees nothing

    async def ask(limits: dict[str, Any], **options: Any) -> Any:
        async with run_server(limits, max_model_len=4096, **options) as served:
            return await served.client.completions.create(
                model="simulated", prompt=None, max_tokens=4, extra_body={"prompt_embeds": large}
            )

    with refused("BadRequestError") as caught:
        asyncio.run(ask({"max_body_nbytes": 64 << 20}))
    assert "prompt_embeds is not enabled on this server: --enable-prompt-embeds" in caught.value.message
    with refused("APIStatusError") as caught:
        asyncio.run(ask({}, enable_prompt_embeds=True))
    assert caught.value.status_code == 413
    for store_nbytes in (0, 1 << 20, 1 << 26):  # inline, too, and where the store has no room for it
        done = asyncio.run(ask({"max_body_nbytes": 64 << 20}, enable_prompt_embeds=True, store_nbytes=store_nbytes))
        assert done.usage.prompt_tokens == 2000
