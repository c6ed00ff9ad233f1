"""Videos on the real device: alone, beside images, in chunks that cut them, on one rank and on two."""

import functools
import itertools
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Asked, BuildFamily, Shown, ask, device, made_with_videos, opener

# isort: split
import torch

from penstock import Store
from penstock.engine.model_dir import VIDEO
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker import encoding_exchange, vision_encoder
from penstock.engine.worker.encoding_exchange import EncoderOptions
from penstock.engine.worker.image_encoder import ImageEncoder
from tests import tiers
from tests.support.ranks import answers_of_threads


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> BuildFamily:
    return functools.cache(lambda name: made_with_videos(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", VIDEO)
def test_greedy_answers_are_those_of_transformers(name: str, family: BuildFamily) -> None:
    """In chunks, in batches that others join and leave, after preemption, and from blocks that others have filled."""
    of = family(name)
    assert len({tuple(answer) for answer in of.answers}) == len(of.answers), "these prompts show nothing"
    result = ask(device(of), of.requests)
    assert result.answers == of.answers
    assert result.preemptions > 0
    assert result.cached_tokens > 0


PUSHED = (("smolvlm", "weights"), ("qwen2_5_vl", "data"), ("qwen3_vl", "store"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [pair for pair in itertools.product(VIDEO, ("weights", "data", "store")) if tiers.TIER != "push" or pair in PUSHED],
)
def test_two_ranks_answer_as_transformers_does(
    name: str, mode: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, keys, encode = family(name), list[bytes | None](), ImageEncoder.encode

    def counted(encoder: ImageEncoder, item: Any, length: int, part: Any) -> Any:
        keys.append(item.key)  # of both ranks
        return encode(encoder, item, length, part)

    monkeypatch.setattr(ImageEncoder, "encode", counted)
    with Store(1 << 22, name="encodings") as store:
        encoder = EncoderOptions(mode, store if mode == "store" else None)
        assert answers_of_threads(2, of, of.requests, encoder=encoder) == [of.answers] * 2
        assert sorted(keys) == sorted([*of.images] * (2 if mode == "weights" else 1))


@pytest.mark.parametrize("name", VIDEO)
def test_a_long_video_is_encoded_in_parts_as_its_tokens_are_computed(
    name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part once, by one of two ranks; no step encodes the whole video."""
    of, calls, encode = family(name), list[tuple[bytes | None, Any]](), ImageEncoder.encode
    number = 3  # two videos, and an image between them
    run = encoding_exchange.EncodingExchange.run

    def counted(encoder: ImageEncoder, item: Any, length: int, part: Any) -> Any:
        calls.append((item.key, part))
        return encode(encoder, item, length, part)

    monkeypatch.setattr(vision_encoder, "MAX_TOKENS", 4)
    monkeypatch.setattr(ImageEncoder, "encode", counted)
    runs: list[int] = []
    monkeypatch.setattr(
        encoding_exchange.EncodingExchange, "run", lambda own, images: runs.append(len(images)) or run(own, images)
    )
    request, expected = of.requests[number], of.answers[number]
    assert ask(device(of, blocks=64), [request], budget=6, slots=1).answers == [expected]
    parts = [(key, part) for key, part in calls if part is not None]
    assert len(parts) == len(set(parts)) >= 4 and max(runs) <= 3
    for key in {key for key, _ in parts}:
        own = [part for other, part in parts if other == key]
        assert own[0].begin == 0 and all(part.end == after.begin for part, after in itertools.pairwise(own))
    calls.clear()
    with Store(1 << 22, name="encodings") as store:
        options = EncoderOptions("store", store)
        assert answers_of_threads(2, of, of.requests, encoder=options) == [of.answers] * 2
    assert len(calls) == len(set(calls)) > len(of.images)


def test_parts_of_a_video_without_a_key_are_kept_for_its_request_alone(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_encoder, "MAX_TOKENS", 4)
    of = family("qwen2_5_vl")
    prompt, ((key, *place),), _ = of.requests[0]
    ours = device(of, blocks=64, open_handle=lambda item: Shown(of.images[key]))
    result = ask(ours, [Asked(prompt, [(None, *place)])], slots=1)
    assert result.answers == [of.answers[0]] and ours._images is not None
    assert len(ours._images._encoded) > 1 and len(ours._images._grids) == 1
    ours._images.leave(0)
    assert not ours._images._encoded and not ours._images._nbytes and not ours._images._grids


@pytest.mark.parametrize("name", VIDEO)
def test_a_video_is_seen_and_found_by_its_key(name: str, family: BuildFamily) -> None:
    of = family(name)
    request, expected = of.requests[0], of.answers[0]
    result = ask(device(of, blocks=64), [request, request], slots=1)
    assert result.answers == [expected] * 2 and result.cached_tokens > request.inputs[0][1]
    (key, position, length), tensor = request.inputs[0], "pixel_values" if name == "smolvlm" else "pixel_values_videos"
    changed = {key: {**of.images[key], tensor: -of.images[key][tensor]}}
    assert ask(device(of, blocks=64, open_handle=opener(changed)), [request]).answers != [expected]
    other = Asked(request.prompt, [(bytes(32), position, length)])  # the same ids, and another video
    shared = device(of, blocks=64, open_handle=opener({**of.images, bytes(32): changed[key]}))
    result = ask(shared, [request, other], slots=1)
    assert result.answers[0] == expected != result.answers[1]
    assert result.cached_tokens <= position


def test_a_video_that_does_not_fit_the_model_fails_alone(family: BuildFamily) -> None:
    of = family("qwen2_5_vl")
    key = of.requests[0].inputs[0][0]
    right = of.images[key]
    for wrong in (
        {**right, "video_grid_thw": right["video_grid_thw"] + 2},
        {**right, "second_per_grid_ts": "1"},
        {**right, "pixel_values_videos": right["pixel_values_videos"][:, :-1]},
        {"pixel_values": right["pixel_values_videos"], "image_grid_thw": right["video_grid_thw"]},
        {name: value for name, value in right.items() if name != "video_grid_thw"},
    ):
        result = ask(device(of, open_handle=opener({**of.images, key: wrong})), [of.requests[0], of.requests[4]])
        assert result.reasons == {0: FinishReason.MISFIT}, wrong
        assert result.answers[1] == of.answers[4]


def test_an_encoding_of_qwen3_vl_has_vectors_for_its_first_layers(family: BuildFamily) -> None:
    of = family("qwen3_vl")
    ours = device(of)
    assert ours._images is not None
    key, position, length = of.requests[0].inputs[0]
    tokens = sum(token_id == 129 for token_id in of.requests[0].prompt[position : position + length])
    encoded = ours._images._encoder.encode(_Item(key), tokens)
    with torch.inference_mode():
        value = of.images[key]
        stock = ours._model.stock
        outcome = stock.get_video_features(value["pixel_values_videos"], value["video_grid_thw"])
    layers = [outcome.pooler_output, *outcome.deepstack_features]
    assert len(layers) == 3
    torch.testing.assert_close(encoded, torch.cat([torch.cat(layer) for layer in layers], dim=-1))


class _Item:
    def __init__(self, key: bytes | None) -> None:
        self.key = key
