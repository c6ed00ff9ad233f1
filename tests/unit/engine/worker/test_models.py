"""The real device: what it answers is what transformers answers, token for token, however the work is cut.

`make test` has four families, which run all that is ours; the others run the same code with layers of their own, which
are those of transformers. `make test-all` has all of them.

| family | what it runs | as do |
|---|---|---|
| llama | rope, grouped heads, untied heads | qwen2, qwen3 (norms of heads), mistral (a window in every layer) |
| gemma2 | windows in some layers, capped scores and logits, scaled embeddings, tied heads | gemma3_text (two ropes) |
| mixtral | experts | qwen2_moe, qwen3_moe, gpt_oss (sinks, a window in every second layer, biases of experts) |
| qwen2_vl | images, three num_position_axes of positions, shapes looked at before a step | qwen2_5_vl, qwen3_vl |

Images with tokens of one position (llava; idefics3 and smolvlm, which have tiles) are in the tests of images below,
in every tier. So are videos of all families that take them, and what qwen3_vl adds to its first layers, in
`test_videos_of_models.py`.
"""

from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import TEXT, Asked, BuildFamily, Shown, ask, build_family, device, families, opener

# isort: split
import torch
import transformers

from penstock import Missing
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker import paged_attention
from penstock.engine.worker.encoding_exchange import MISSING, EncoderOptions
from penstock.engine.worker.image_encoder import ImageEncoder
from penstock.engine.worker.model_loader import load
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.tensor import Handle


@pytest.mark.parametrize("name", families())
def test_greedy_answers_are_those_of_transformers(name: str, family: BuildFamily) -> None:
    """In chunks, in batches that others join and leave, after preemption, and from blocks that others have filled."""
    of = family(name)
    assert len({tuple(answer) for answer in of.answers}) == len(of.answers), "these prompts show nothing"
    result = ask(device(of), of.requests)
    assert result.answers == of.answers
    assert result.preemptions > 0
    assert result.cached_tokens > 0


@pytest.mark.parametrize("name", families("llama", "gemma2", "mistral"))
def test_rows_that_are_gathered_answer_alike(name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other devices do it, and types that the native core does not know."""
    monkeypatch.setattr(paged_attention, "CPU_DTYPES", ())
    of = family(name)
    assert ask(device(of), of.requests).answers == of.answers


def test_seeded_answer_is_the_same_alone_and_in_a_batch(family: BuildFamily) -> None:
    of = family("mistral")
    together = ask(device(of), of.requests, seed=5)
    assert together.preemptions > 0
    assert together.answers != of.answers
    for number in (1, 3, 6):
        alone = ask(device(of), [of.requests[number]], depth=1, seed=5)
        assert alone.answers[0] == together.answers[number]


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
def test_resumed_answer_equals_the_answer_without_a_loss(name: str, seed: int | None, family: BuildFamily) -> None:
    of = family(name)
    whole = ask(device(of), of.requests, seed=seed, logprobs=2)
    counts = [at % (request.tokens - 1) for at, request in enumerate(of.requests)]
    resumed = [answer[:count] for answer, count in zip(whole.answers, counts, strict=True)]
    rest = ask(device(of), of.requests, seed=seed, logprobs=2, resumed=resumed)
    for answer, before, after in zip(whole.answers, resumed, rest.answers, strict=True):
        assert answer == [*before, *after]
    for values, count, after in zip(whole.logprobs, counts, rest.logprobs, strict=True):
        assert after == pytest.approx(values[count:], abs=1e-4) and len(after) == len(values) - count


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_are_those_of_transformers(name: str, family: BuildFamily) -> None:
    """Capped, too, where they are: the likeliest token does not show it."""
    of = family(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(of.path)
    with torch.inference_mode():
        output = reference(torch.tensor([of.requests[3].prompt]), output_hidden_states=True)
    ours = load(of.path, TPGroup(), torch.device("cpu"))
    torch.testing.assert_close(ours.logits(output.hidden_states[-1][0]), output.logits[0])


@pytest.mark.parametrize("text", [text for text in TEXT if text != "llama"])
def test_a_model_that_sees_may_have_the_text_of_each_family(text: str, tmp_path: Path) -> None:
    of = build_family("llava", tmp_path, model_type=text, **TEXT[text])
    assert ask(device(of), of.requests).answers == of.answers


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "idefics3"])
def test_an_image_is_encoded_once_and_is_seen(name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    of = family(name)
    fetched: list[bytes] = []
    monkeypatch.setattr(ImageEncoder, "encode", _counting(ImageEncoder.encode, fetched))
    with_image = of.requests[1]
    changed = {key: {**tensors, "pixel_values": -tensors["pixel_values"]} for key, tensors in of.images.items()}
    ours = device(of, blocks=64)
    requests = [
        with_image,
        Asked([5, *with_image.prompt], [(key, at + 1, size) for key, at, size in with_image.inputs]),
    ]
    first = ask(ours, requests).answers[0]
    assert len(fetched) == 1
    assert first == of.answers[1]
    assert ask(device(of, blocks=64, open_handle=opener(changed)), [with_image]).answers[0] != first


def _counting(encode: Any, calls: list[Any]) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(arguments[1:])
        return encode(*arguments)

    return counted


def test_full_cache_of_encodings_evicts_for_the_next_image(family: BuildFamily) -> None:
    of = family("llava")
    ours = device(of, encoder=EncoderOptions(cache_nbytes=1))
    assert ask(ours, of.requests).answers == of.answers
    assert ours._images is not None and len(ours._images._encoded) == 1


def test_missing_image_fails_only_its_own_request(family: BuildFamily) -> None:
    of = family("qwen2_vl")
    gone = of.requests[1].inputs[0][0]

    def open_handle(item: Handle) -> Any:
        if item.key == gone:
            raise Missing("it went")
        return opener(of.images)(item)

    result = ask(device(of, open_handle=open_handle), of.requests[:4])
    assert result.failed == {1}
    assert [result.answers[0], *result.answers[2:]] == [of.answers[0], *of.answers[2:4]]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_an_image_is_opened_by_no_sample_that_finds_its_blocks(name: str, family: BuildFamily) -> None:
    of = family(name)
    opened: list[bytes | None] = []

    def open_handle(item: Handle) -> Any:
        opened.append(item.key)
        return opener(of.images)(item)

    ours = device(of, blocks=64, open_handle=open_handle)
    result = ask(ours, [of.requests[1], of.requests[1]], slots=1)
    assert result.answers == [of.answers[1]] * 2 and result.cached_tokens > 0
    key = of.requests[1].inputs[0][0]
    assert opened == [key] * (2 if name == "qwen2_vl" else 1)  # there, for its shape too
    del ours._images._encoded[key]  # another image needed the room
    again = ask(ours, [of.requests[1]], slots=1)
    assert again.answers == [of.answers[1]] and len(opened) == (3 if name == "qwen2_vl" else 2)


def test_an_image_without_a_key_is_kept_for_its_request_alone(family: BuildFamily) -> None:
    of = family("llava")
    prompt, inputs, _ = of.requests[2]
    value = of.images[inputs[0][0]]
    opened: list[Handle] = []

    def open_handle(item: Handle) -> Any:
        opened.append(item)
        return Shown(value)

    ours = device(of, blocks=64, open_handle=open_handle)
    keyless = Asked(prompt, [(None, *place) for _, *place in inputs])
    result = ask(ours, [keyless, keyless], slots=2, budget=5)
    assert result.answers[0] == result.answers[1] != of.answers[2] and not result.failed
    assert len(opened) == len({id(item) for item in opened}) == 4
    assert ours._images is not None
    assert result.cached_tokens <= inputs[0][1]  # an image without a key is never cached
    for slot in range(2):
        ours._images.leave(slot)
    assert not ours._images._encoded and not ours._images._nbytes


def test_request_fails_if_another_rank_misses_its_image(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llava", "qwen2_vl"):
        of = family(name)
        ours = device(of, blocks=64)
        monkeypatch.setattr(ours._model.ranks, "least_of_each", lambda states: [MISSING] * len(states))
        result = ask(ours, of.requests[:3])
        assert result.reasons == {1: FinishReason.MISSING, 2: FinishReason.MISSING}
        assert result.answers[0] == of.answers[0]


def test_request_with_malformed_image_tensors_fails_alone(family: BuildFamily) -> None:
    of = family("qwen2_vl")
    key = of.requests[1].inputs[0][0]
    right = of.images[key]
    for wrong in (
        5,
        {},
        {"tokens": 3},
        {"image_grid_thw": right["image_grid_thw"]},
        {"pixel_values": right["pixel_values"]},
        {**right, "pixel_values": right["pixel_values"][:, :-1]},
        {**right, "image_grid_thw": right["image_grid_thw"] + 2},
    ):
        result = ask(device(of, open_handle=opener({**of.images, key: wrong})), of.requests[:2])
        assert result.reasons == {1: FinishReason.MISFIT}, wrong
        assert result.answers[0] == of.answers[0]


def test_request_fails_if_its_placeholder_is_shorter_than_the_image(family: BuildFamily) -> None:
    of = family("llava")
    prompt, inputs, _ = of.requests[1]
    key, position, length = inputs[0]
    less = Asked(prompt[: position + 1] + prompt[position + 2 :], [(key, position, length - 1)])
    assert ask(device(of), [less, of.requests[0]]).failed == {0}
