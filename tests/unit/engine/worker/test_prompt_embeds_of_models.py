"""Prompts that are embeddings: those of a text's own ids are answered as the ids are, token for token."""

from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BLOCK_SIZE, Asked, BuildFamily, Family, Shown, ask, device, families, opener

# isort: split
import torch
import transformers

from penstock.engine.protocol.columns import EMBEDS
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker.model_runner import ModelRunner
from penstock.engine.worker.sampler import Sampler
from tests.support.ranks import answers_of_threads

PLACEHOLDER = 5  # any id that is not an image's


def embedded(of: Family, dtype: torch.dtype = torch.float32) -> Family:
    """The family, with embeddings in place of each prompt of text: as the stock model's own layer gives them, which
    scales them where the family does (Gemma)."""
    kind: Any = transformers.AutoModelForImageTextToText if of.images else transformers.AutoModelForCausalLM
    layer = kind.from_pretrained(of.path, dtype=dtype).get_input_embeddings()
    requests, items = [], dict(of.images)
    for number, request in enumerate(of.requests):
        if request.inputs:
            requests.append(request)
            continue
        key = b"embeds %d" % number + bytes(24)
        with torch.inference_mode():
            items[key] = {EMBEDS: layer(torch.tensor(request.prompt)).clone()}
        requests.append(Asked([PLACEHOLDER] * len(request.prompt), [(key, 0, len(request.prompt))], request.tokens))
    return of._replace(requests=requests, images=items)


def taking(of: Family, **options: Any) -> ModelRunner:
    return device(of, takes_embeds=True, **options)


@pytest.mark.parametrize("name", families("llama", "gemma2", "gemma3_text", "mixtral", "qwen2_vl", "qwen3_vl"))
def test_embeds_of_ids_are_answered_as_the_ids_are(name: str, family: BuildFamily) -> None:
    """In chunks of prefill, in batches with others, after preemption, and from blocks that others have filled."""
    of = embedded(family(name))
    result = ask(taking(of), [*of.requests, *of.requests])
    assert result.answers == of.answers * 2
    assert result.preemptions > 0 and result.cached_tokens > 0 and not result.failed


@pytest.mark.parametrize("name", families("llama", "gemma2"))
def test_embeds_are_answered_alike_by_two_ranks(name: str, family: BuildFamily) -> None:
    of = embedded(family(name))
    assert answers_of_threads(2, of, of.requests[:4], takes_embeds=True) == [of.answers[:4]] * 2


def test_embeds_and_ids_share_a_batch(family: BuildFamily) -> None:
    plain = family("llama")
    of = embedded(plain)
    mixed = [request for pair in zip(plain.requests, of.requests, strict=True) for request in pair]
    assert ask(taking(of, blocks=64), mixed).answers == [answer for answer in of.answers for _ in range(2)]


def test_blocks_are_shared_by_equal_embeds_alone(family: BuildFamily) -> None:
    of = embedded(family("llama"))
    longest = max(of.requests, key=lambda request: len(request.prompt))
    ((key, *place),) = longest.inputs
    other = longest._replace(inputs=[(b"other".ljust(32), *place)])
    changed = {**of.images, other.inputs[0][0]: {EMBEDS: -of.images[key][EMBEDS]}}
    result = ask(taking(of, blocks=64, open_handle=opener(changed)), [longest, longest, other], slots=1)
    assert result.answers[0] == result.answers[1] != result.answers[2]
    assert result.cached_tokens == (len(longest.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE > 0


def test_embeds_are_opened_once_for_all_chunks_of_a_prompt(family: BuildFamily) -> None:
    of = embedded(family("llama"))
    longest = max(of.requests, key=lambda request: len(request.prompt))
    opened: list[Any] = []

    def open_handle(item: Any) -> Any:
        opened.append(item.key)
        return Shown(of.images[item.key])

    ask(taking(of, blocks=64, open_handle=open_handle), [longest], budget=4)
    assert opened == [longest.inputs[0][0]]


@pytest.mark.parametrize("sent", [torch.float32, torch.float16, torch.bfloat16])
def test_embeds_are_cast_to_the_dtype_of_the_model(sent: torch.dtype, family: BuildFamily) -> None:
    plain = family("llama", dtype=torch.bfloat16)
    of, items = embedded(plain, torch.bfloat16), {}
    for key, value in of.images.items():
        numbers = value[EMBEDS].to(sent)  # float16 has fewer exponents, which these need not
        items[key] = {EMBEDS: numbers.view(torch.int16) if sent == torch.bfloat16 else numbers}
    result = ask(taking(of, blocks=64, dtype="bfloat16", open_handle=opener(items)), of.requests[:4])
    # In the same steps: near ties may fall otherwise in other ones.
    assert result.answers == ask(device(plain, blocks=64, dtype="bfloat16"), plain.requests[:4]).answers


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(1, 63),
        torch.zeros(2, 64),
        torch.zeros(64),
        torch.full((1, 64), torch.nan),
        torch.full((1, 64), 0x7F80, dtype=torch.int16),
    ],
    ids=["hidden size", "tokens", "dimensions", "NaN", "infinite"],
)
def test_embeds_that_do_not_fit_fail_alone(wrong: torch.Tensor, family: BuildFamily) -> None:
    of = embedded(family("llama"))
    key = of.requests[0].inputs[0][0]
    result = ask(taking(of, open_handle=opener({**of.images, key: {EMBEDS: wrong}})), of.requests[:2])
    assert result.reasons == {0: FinishReason.MISFIT}
    assert result.answers[1] == of.answers[1]


def test_embeds_beyond_the_dtype_of_the_model_do_not_fit(family: BuildFamily) -> None:
    of = embedded(family("llama"))
    key = of.requests[0].inputs[0][0]
    large = {**of.images, key: {EMBEDS: torch.full((1, 64), 1e5)}}
    assert ask(taking(of, dtype="float16", open_handle=opener(large)), of.requests[:1]).reasons == {
        0: FinishReason.MISFIT
    }


def test_penalties_count_no_id_of_embeds(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[list[int]] = []
    join = Sampler.join

    def recording_join(sampler: Sampler, slot: int, params: Any, prompt: Any, **more: Any) -> None:
        joined.append(prompt.tolist())
        join(sampler, slot, params, prompt, **more)

    monkeypatch.setattr(Sampler, "join", recording_join)
    plain = family("qwen2_vl")
    of = embedded(plain)
    ask(taking(of, blocks=64), of.requests[:2])
    assert joined == [[], of.requests[1].prompt]  # an image's ids are as before
    mixed = Asked([7, *of.requests[0].prompt, 9], [(of.requests[0].inputs[0][0], 1, len(of.requests[0].prompt))])
    joined.clear()
    ask(taking(of, blocks=64), [mixed])
    assert joined == [[7, 9]]
