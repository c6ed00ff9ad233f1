"""Images are encoded by one rank, and in `store` mode by one engine, and all ranks see the same, whatever happens.

Two ranks are threads (`tests/support/ranks.py`), or processes where one of them dies.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BLOCK_SIZE, VISION, Asked, BuildFamily, ask, device, longest, opener, stock_of

# isort: split
import torch
from safetensors.torch import load_file, save_file

from penstock import Missing, Store
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker import encoding_exchange
from penstock.engine.worker.encoding_exchange import EncoderOptions
from penstock.engine.worker.image_encoder import ImageEncoder
from penstock.engine.worker.model_loader import tp_plan
from penstock.engine.worker.model_runner import ModelRunner
from penstock.engine.worker.tensor_parallel import TPGroup, shard
from penstock.engine.worker.weight_slices import HeadSlices
from penstock.tensor import Handle
from tests.conftest import eventually, spawn
from tests.support.ranks import answers_of_threads, results_of_threads

SEEING = ("llava", "qwen2_vl", "idefics3")


def encodings_store() -> Store:
    return Store(1 << 20, name="encodings")


class Encoder:
    """Counts what is encoded, by key; and waits, or fails, before it."""

    def __init__(self, before: Callable[[Handle], object] = lambda item: None) -> None:
        self.keys: list[bytes | None] = []
        self._before = before
        self._encode = ImageEncoder.encode

    def __call__(self, encoder: ImageEncoder, item: Handle, length: int, part: Any = None) -> Any:
        self.keys.append(item.key)
        self._before(item)
        return self._encode(encoder, item, length, part)


def counted(monkeypatch: pytest.MonkeyPatch, before: Callable[[Handle], object] = lambda item: None) -> Encoder:
    encoder = Encoder(before)
    monkeypatch.setattr(ImageEncoder, "encode", lambda *arguments: encoder(*arguments))
    return encoder


def keys_of(requests: list[Asked]) -> set[bytes | None]:
    return {key for request in requests for key, _, _ in request.inputs}


def options(mode: str, store: Store, **more: Any) -> EncoderOptions:
    return EncoderOptions(mode, store if mode == "store" else None, **more)


def must_be_written_by_nobody(store: Store) -> None:
    assert not [item for item in store.stats().items if item.is_being_written]


# ── the ranks of one engine ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("mode", "times"), [("weights", 2), ("data", 1), ("store", 1)])
@pytest.mark.parametrize("name", SEEING)
def test_two_ranks_answer_as_transformers_does(
    name: str, mode: str, times: int, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that cut images, with two images in a request, and images that several requests have."""
    store = encodings_store()
    of, encoder = family(name), counted(monkeypatch)
    assert answers_of_threads(2, of, of.requests, encoder=options(mode, store)) == [of.answers] * 2
    assert sorted(encoder.keys) == sorted([*keys_of(of.requests)] * times)
    must_be_written_by_nobody(store)


def test_images_of_a_step_are_divided_among_ranks(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both encode at the same time: each waits, in its first image, until the other has begun."""
    store = encodings_store()
    of, both = family("llava"), threading.Barrier(2, timeout=30)
    counted(monkeypatch, lambda item: both.wait())
    for mode in ("data", "store"):
        requests = [of.requests[2]]
        assert answers_of_threads(2, of, requests, budget=64, encoder=options(mode, store)) == [[of.answers[2]]] * 2


@pytest.mark.parametrize("mode", ["weights", "data", "store"])
def test_an_image_that_one_rank_cannot_encode_fails_on_all(
    mode: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of = family("llava")
    bad = of.requests[1].inputs[0][0]

    def fail(item: Handle) -> None:
        if item.key == bad:
            raise encoding_exchange.Unusable(FinishReason.MISFIT)

    counted(monkeypatch, fail)
    result = answers_of_threads(2, of, of.requests[:4], encoder=options(mode, store))
    assert result[0] == result[1]
    assert [result[0][number] for number in (0, 2, 3)] == [of.answers[number] for number in (0, 2, 3)]
    must_be_written_by_nobody(store)


def test_rank_without_memory_for_a_sent_encoding_fails_it_on_all(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, empty, failing = family("llava"), ImageEncoder.empty, [True]

    def allocate(encoder: ImageEncoder, length: int) -> torch.Tensor:
        if encoder._model.ranks.rank == 1 and failing and failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(encoder, length)

    monkeypatch.setattr(ImageEncoder, "empty", allocate)
    results = results_of_threads(2, of, of.requests[:4], encoder=EncoderOptions("data"))
    assert results[0].failed == results[1].failed and len(results[0].failed) == 1 and not failing
    answered = set(range(4)) - results[0].failed
    assert [results[0].answers[at] for at in answered] == [of.answers[at] for at in answered]


def test_an_encoding_is_held_while_a_chunk_of_its_image_is_left(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, evicted = family("llava"), []
    chunks = []
    original = encoding_exchange.EncodingExchange.run

    def run(*arguments: Any) -> Any:
        result = original(*arguments)
        chunks.append(store.stats().items)
        evicted.extend(store.evict(item.key) for item in store.stats().items)
        return result

    monkeypatch.setattr(encoding_exchange.EncodingExchange, "run", run)
    encoder = counted(monkeypatch)
    ours = device(of, blocks=64, encoder=options("store", store))
    assert ask(ours, [of.requests[1]], budget=2, slots=1).answers == [of.answers[1]]
    assert encoder.keys == [of.requests[1].inputs[0][0]] and evicted == [False]
    assert store.evict(chunks[0][0].key), "the steps after the last chunk hold nothing"


def test_text_after_the_last_image_holds_no_encoding(family: BuildFamily) -> None:
    store = encodings_store()
    of = family("llava")
    ours = device(of, blocks=64, encoder=options("store", store))
    image, text = of.requests[1]._replace(tokens=1), Asked([3, 4, 5], [])
    ask(ours, [image, text], budget=len(image.prompt), slots=1)
    items = store.stats().items
    assert items and all(store.evict(item.key) for item in items)


@pytest.mark.parametrize("name", VISION)
def test_no_plan_slices_a_vision_encoder(name: str) -> None:
    """A rank that encodes alone would wait for the others in an all-reduce."""
    stock = stock_of(name)
    ranks = TPGroup()
    ranks.size = 2
    text = stock.config.get_text_config()
    heads = HeadSlices(text.num_attention_heads, text.num_key_value_heads)
    slices = shard(stock, tp_plan(stock), ranks, heads)
    decoder = next(name for name, module in stock.named_modules() if module is stock.get_decoder())
    assert {"lm_head.weight", f"{decoder}.layers.0.mlp.up_proj.weight"} <= set(slices)
    assert all(parameter.startswith((f"{decoder}.", "lm_head.")) for parameter in slices)


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", SEEING)
def test_an_engine_encodes_nothing_that_another_has_encoded(
    name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, encoder = family(name), counted(monkeypatch)
    engines = [device(of, blocks=64, encoder=options("store", store)) for _ in range(2)]
    for engine in engines:
        assert ask(engine, of.requests).answers == of.answers
    assert sorted(encoder.keys) == sorted(keys_of(of.requests))
    first, second = (engine.encodings for engine in engines)
    assert (first.encoded, first.unshared) == (len(encoder.keys), 0)
    assert (second.encoded, second.unshared) == (0, 0) and second.hits >= len(encoder.keys)


def test_engines_that_need_the_same_images_at_once_encode_each_once(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both meet in their first images, which are not the same: the later one has gone on to the next."""
    store = encodings_store()
    of, both = family("llava"), threading.Barrier(2, timeout=30)
    encoder = counted(monkeypatch, lambda item: both.wait())
    engines = [device(of, blocks=64, encoder=options("store", store, timeout=30.0)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda engine: ask(engine, [of.requests[2]], budget=64).answers, engines))
    assert answers == [[of.answers[2]]] * 2
    assert sorted(encoder.keys) == sorted(keys_of([of.requests[2]]))
    assert [engine.encodings.encoded for engine in engines] == [1, 1]
    assert [engine.encodings.hits for engine in engines] == [1, 1]


def test_an_image_that_another_engine_cannot_encode_is_tried_again(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, has_begun = family("llava"), threading.Event()
    calls: list[Handle] = []

    def fail_first(item: Handle) -> None:
        calls.append(item)
        if len(calls) == 1:
            has_begun.set()
            eventually(lambda: store.stats().fills_awaited)
            raise encoding_exchange.Unusable(FinishReason.MISSING)

    counted(monkeypatch, fail_first)
    engines = [device(of, blocks=64, encoder=options("store", store, timeout=30.0)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(ask, engines[0], [of.requests[1]])
        assert has_begun.wait(30)
        assert ask(engines[1], [of.requests[1]]).answers == [of.answers[1]]
        assert failing.result().reasons == {0: FinishReason.MISSING}


def test_an_image_is_encoded_once_more_when_its_writer_takes_too_long(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    ours = device(of, blocks=64, encoder=options("store", store, timeout=0.1))
    assert ours._images is not None
    ask(ours, [of.requests[1]])
    key = store.stats().items[0].key
    store.clear()
    with store.loan(key, b""):
        began = time.monotonic()
        again = device(of, blocks=64, encoder=options("store", store, timeout=0.1))
        assert ask(again, [of.requests[1]]).answers == [of.answers[1]]
        assert time.monotonic() - began >= 0.1
    assert len(encoder.keys) == 2 and again.encodings.unshared == 1


@pytest.mark.parametrize("size", [1, 2])
def test_encodings_without_room_in_the_store_stay_with_their_engine(
    size: int, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    with store.pool.take(store.nbytes):
        assert answers_of_threads(size, of, of.requests, encoder=options("store", store)) == [of.answers] * size
    assert sorted(encoder.keys) == sorted(keys_of(of.requests)) and not store.stats().items


def test_an_encoding_of_another_model_has_another_key(
    family: BuildFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another fine-tune of the shape, or another dtype. A copy of the model has the same keys."""
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    shutil.copytree(of.path, tmp_path / "copy")
    shutil.copytree(of.path, tmp_path / "fine-tune")
    weights = tmp_path / "fine-tune" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: 2 * values for name, values in tensors.items()}, weights, {"format": "pt"})
    for name, dtype, number in (
        ("copy", "float32", 1),
        ("copy", "float32", 1),
        ("fine-tune", "float32", 2),
        ("copy", "bfloat16", 3),
    ):
        other = of._replace(path=tmp_path / name)
        ask(device(other, blocks=64, dtype=dtype, encoder=options("store", store)), [of.requests[1]])
        assert len(encoder.keys) == len(store.stats().items) == number
    assert (store.stats().misses, store.stats().hits) == (3, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_an_encoding_counts_once_as_a_hit_or_a_miss(
    size: int, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks view it. The second engine finds all; the cache of prefixes needs some images never again."""
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    needed = sum(len(request.inputs) for request in of.requests * 2)
    new, hits = len(keys_of(of.requests)), 0
    for least, most in ((0, needed - new), (new, needed)):
        answers_of_threads(size, of, of.requests * 2, encoder=options("store", store))
        stats = store.stats()
        assert stats.misses == len(encoder.keys) == new
        assert least <= stats.hits - hits <= most
        hits = stats.hits


def test_an_image_without_a_key_is_broadcast(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    prompt, inputs, tokens = of.requests[1]
    keyless = Asked(prompt, [(None, *place) for _, *place in inputs], tokens)
    shown = opener({None: of.images[inputs[0][0]]})  # type: ignore[dict-item]
    result = answers_of_threads(2, of, [keyless], open_handle=shown, encoder=options("store", store))
    assert result == [[of.answers[1]]] * 2
    assert encoder.keys == [None] and not store.stats().items


def test_an_encoding_in_the_store_needs_no_image(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    store = encodings_store()
    of = family("llava")
    ask(device(of, blocks=64, encoder=options("store", store)), [of.requests[1]])

    def open_handle(item: Handle) -> Any:
        raise Missing("it went")

    ours = device(of, blocks=64, open_handle=open_handle, encoder=options("store", store))
    assert ask(ours, [of.requests[1]]).answers == [of.answers[1]]


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _die_while_encoding(path: str, images: str, ticket: str, prompt: list[int], inputs: Any) -> None:
    torch.set_num_threads(1)
    store = Store.attach(ticket)

    def die(*_: object) -> None:
        eventually(lambda: store.stats().fills_awaited, within=30.0)
        os.kill(os.getpid(), signal.SIGKILL)

    ImageEncoder.encode = die  # type: ignore[method-assign, assignment]
    requests = [Asked(prompt, inputs)]
    ours = ModelRunner(
        path,
        slots=4,
        block_size=BLOCK_SIZE,
        blocks=-(-longest(requests) // BLOCK_SIZE),
        open_handle=opener(torch.load(Path(images))),
        threads=1,
        encoder=EncoderOptions("store", store),
    )
    ask(ours, requests)


def test_an_engine_that_waits_for_a_dead_one_encodes_by_itself(
    family: BuildFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = encodings_store()
    of, encoder = family("llava"), counted(monkeypatch)
    prompt, inputs, _ = of.requests[1]
    torch.save(of.images, tmp_path / "images.pt")
    ours = device(of, blocks=64, encoder=options("store", store, timeout=60.0))
    arguments = (str(of.path), str(tmp_path / "images.pt"), str(store.ticket), prompt, inputs)
    with spawn(_die_while_encoding, *arguments, within=60.0) as dying:
        eventually(lambda: any(item.is_being_written for item in store.stats().items), within=60.0)
        assert ask(ours, [of.requests[1]]).answers == [of.answers[1]]
        dying.join()
        assert dying.exitcode == -signal.SIGKILL
    assert ours.encodings.encoded == 1 and ours.encodings.unshared == 0 and len(encoder.keys) == 1
