"""Prompts of embeddings, without a server: what they hold, what is refused, and how they travel."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from penstock import Store
from penstock.engine.protocol.columns import EMBEDS
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.server.chat.media_prompts import Prompt
from penstock.server.embeds import embeds_prompts
from penstock.server.embeds.embeds_prompts import EmbedsPrompts
from penstock.server.errors import ApiError, Limit
from penstock.tensor import ScopeStats
from tests.unit.engine.test_images_of_requests import must_be_held_by_nobody
from tests.unit.server.embeds.test_embeds_file import npy_of

HIDDEN, PLACEHOLDER = 8, 97
LIMIT = Limit(20, "prompt_embeds", 4)
ROWS = np.arange(5 * HIDDEN, dtype=np.float32).reshape(5, HIDDEN)


def value(rows: Any = ROWS) -> str:
    return base64.b64encode(npy_of(rows)).decode()


class Scene:
    def __init__(self, model: Path, store: Store | None, **config: Any) -> None:
        (model / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
        nbytes = 0 if store is None else store.nbytes
        self.counted: list[ScopeStats] = []
        engine_config = EngineConfig(model=str(model), max_model_len=21, store_nbytes=nbytes, **config)
        self.prompts = EmbedsPrompts(engine_config, store, PLACEHOLDER, self.counted.append)

    async def prompt(self, text: str = value(), where: str = "prompt_embeds") -> Prompt:
        return await self.prompts.prompt(text, where, LIMIT)

    def refusal(self, text: str, where: str = "prompt_embeds") -> ApiError:
        with pytest.raises(ApiError) as caught:
            asyncio.run(self.prompt(text, where))
        return caught.value


@contextlib.contextmanager
def scene(model: Path, nbytes: int | None = 1 << 20, **config: Any) -> Iterator[tuple[Scene, Any]]:
    with contextlib.ExitStack() as stack:
        store = None if nbytes is None else stack.enter_context(Store(nbytes))
        result = Scene(model, store, **config)
        yield result, store
        result.prompts.close()
        if store is not None:
            must_be_held_by_nobody(store)


def test_embeds_prompt_has_a_placeholder_per_row_held_until_release(tmp_path: Path) -> None:
    with scene(tmp_path) as (of, store):
        prompt = asyncio.run(of.prompt())
        ((item, position, length),) = prompt.items
        assert prompt.ids == [PLACEHOLDER] * 5 and (position, length) == (0, 5)
        with item.open(store) as lease:
            np.testing.assert_array_equal(lease.value()[EMBEDS], ROWS)
        del lease
        again = asyncio.run(of.prompt())
        assert again.items[0][0].key == item.key and store.stats().puts == 1
        assert [(stats.puts, stats.hits) for stats in of.counted] == [(1, 0), (0, 1)]
        prompt.release()
        assert any(entry.holders for entry in store.stats().items)
        again.release()


def test_a_prompt_travels_inline_without_a_store_and_where_it_is_full(tmp_path: Path) -> None:
    for nbytes, how in ((None, "inline_without_store"), (1 << 12, "inline_too_large")):
        with scene(tmp_path, nbytes) as (of, _), pytest.warns() if nbytes else contextlib.nullcontext():
            rows = np.zeros((20, HIDDEN), np.float32) if nbytes is None else np.zeros((20, HIDDEN * 64), np.float32)
            of.prompts._hidden_size = None
            prompt = asyncio.run(of.prompt(value(rows)))
            assert prompt.items[0][0].is_inline and getattr(of.counted[0], how) == 1
            np.testing.assert_array_equal(prompt.items[0][0].open().value()[EMBEDS], rows)


def test_a_prompt_that_must_be_stored_is_refused_where_there_is_no_room(tmp_path: Path) -> None:
    with scene(tmp_path, 1 << 16, tensor_transport="store") as (of, store):
        with store.put(bytes(store.nbytes - (1 << 12))):
            of.prompts._hidden_size = None
            error = of.refusal(value(np.zeros((20, 512), np.float32)))
            assert (error.status, error.param) == (503, "prompt_embeds") and "no room for" in error.message
        with pytest.warns(RuntimeWarning, match="does not fit the store"):
            error = of.refusal(value(np.zeros((20, 2048), np.float32)))
        assert error.status == 413 and "the store has" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (value(ROWS[:, :-1]), "the model's hidden size 8, got [5, 7] at $.prompt_embeds[1]"),
        (value(np.full_like(ROWS, np.inf)), "a number is NaN or infinite at $.prompt_embeds[1]"),
        ("x", "base64 of safetensors or npy: "),
        ("AA==AAAA", "base64 of safetensors or npy: "),
        ("", "its first bytes b'' are of neither format"),
    ],
)
def test_wrong_prompt_embeds_are_refused_and_hold_nothing(text: str, words: str, tmp_path: Path) -> None:
    with scene(tmp_path) as (of, _):
        error = of.refusal(text, "prompt_embeds[1]")
        assert error.status == 400 and words in error.message, error.message


def test_too_many_rows_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(tmp_path) as (of, store):
        error = of.refusal(value(np.zeros((21, HIDDEN), np.float32)))
        assert error.code == "context_length_exceeded" and "(21 in the prompt_embeds, 4 in" in error.message
        monkeypatch.setattr(embeds_prompts, "decode_base64", None)
        error = of.refusal(value(np.zeros((200, HIDDEN), np.float32)))
        assert error.code == "context_length_exceeded" and "at least 7" in error.message, error.message
        assert store.stats().puts == 0


def test_a_simulated_device_takes_any_hidden_size(tmp_path: Path) -> None:
    with scene(tmp_path, simulated=SimulatedDevice()) as (of, _):
        prompt = asyncio.run(of.prompt(value(np.zeros((2, 3), np.float16))))
        assert len(prompt.ids) == 2
        prompt.release()


def test_a_client_that_goes_leaves_nothing_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(of: Scene) -> None:
        task = asyncio.ensure_future(of.prompt())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with scene(tmp_path) as (of, _):
        for _ in range(20):
            asyncio.run(leave(of))
