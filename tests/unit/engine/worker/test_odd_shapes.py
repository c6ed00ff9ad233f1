"""Models of unheard-of shapes: random heads, windows, biases, ties and positions, answered as by transformers.

`PENSTOCK_TIER=all` has all of them; otherwise there are some, each with fewer requests.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import TEXT, WORDS, Asked, Family, ask, build_family, device

# isort: split
import torch
import transformers

from penstock.engine.worker import paged_attention
from tests import tiers
from tests.support.ranks import answers_of_threads
from tests.unit.engine.worker.test_rope import FACTORS, SHORT

MODELS = 14
NUMBERS = (0, 8, 11) if tiers.TIER == "push" else range(MODELS)
REQUESTS = 6 if tiers.TIER == "push" else 10
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")  # each of them twice


def odd_shape(number: int) -> tuple[str, dict[str, Any]]:
    """A family, and what is other than usual. The same for the same number."""
    chance = random.Random(number)
    name, kind = chance.choice(list(TEXT)), KINDS[number % len(KINDS)]
    key_heads = chance.choice((1, 2, 3))
    heads = max(2, key_heads * chance.choice((1, 2, 3, 5)))  # or two ranks would have too few
    size = chance.choice((8, 12, 16, 20))
    has_experts = name in ("mixtral", "gpt_oss") or name.endswith(
        "_moe"
    )  # lines of experts have a multiple of 16 bytes
    shape: dict[str, Any] = {
        "num_key_value_heads": key_heads,
        "num_attention_heads": heads,
        "head_dim": size,
        "hidden_size": heads * chance.choice((8, 16, 24) if has_experts else (8, 12, 20)),
        "intermediate_size": chance.randint(33, 97),
        "num_hidden_layers": chance.randint(1, 3),
        "vocab_size": chance.randint(max(WORDS) + 1, 180),
        "tie_word_embeddings": chance.random() < 0.5,
        "rope_parameters": rope(chance, kind, size),
    }
    if name in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        shape["attention_bias"] = chance.random() < 0.5
    if name == "llama":
        shape["mlp_bias"] = chance.random() < 0.5
    if name in ("mistral", "mixtral", "gemma2", "gemma3_text"):
        shape["sliding_window"] = chance.randint(3, 30)
    if name in ("qwen2", "qwen3"):
        layers = shape["num_hidden_layers"]
        shape |= {"use_sliding_window": True, "sliding_window": chance.randint(3, 30)}
        shape["layer_types"] = [chance.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    if name == "gemma3_text":
        shape["layer_types"] = ["full_attention", "sliding_attention", "full_attention"][: shape["num_hidden_layers"]]
        sliding = {"rope_type": "default", "rope_theta": 1e3}
        shape["rope_parameters"] = {"full_attention": shape["rope_parameters"], "sliding_attention": sliding}
    if name == "gemma2":
        shape["final_logit_softcapping"] = chance.choice((None, 5.0))
    if name in ("mixtral", "gpt_oss"):
        shape["intermediate_size"] = 8 * chance.randint(3, 8)
    if name.endswith("_moe"):
        shape["moe_intermediate_size"] = 8 * chance.randint(2, 5)
        shape["norm_topk_prob"] = chance.random() < 0.5
    return name, shape


def of_experts(name: str) -> bool:
    return name in ("mixtral", "gpt_oss") or name.endswith("_moe")


def rope(chance: random.Random, kind: str, size: int) -> dict[str, Any]:
    theta = {"rope_type": kind, "rope_theta": chance.choice((1e3, 1e4, 1e6))}
    longer = [1.0 + 3 * chance.random() * at for at in range(size // 2)]
    more: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 2.0},
        "yarn": FACTORS,
        "llama3": {**FACTORS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {**FACTORS, "short_factor": [1.0] * (size // 2), "long_factor": longer},
        "proportional": {"partial_rotary_factor": 0.5},
    }
    return theta | more.get(kind, {})


def requests_of(number: int) -> list[Asked]:
    """They begin alike, and so share blocks; some are longer than any window, and than what longrope calls short."""
    chance = random.Random(number)
    beginning = chance.choices(WORDS, k=80)
    requests = [Asked(beginning[: 2 * SHORT + 1], [], 20), Asked(beginning[:SHORT], [], 30)]
    while len(requests) < REQUESTS:
        same, own = chance.randint(0, 60), chance.randint(1, 20)
        requests.append(Asked(beginning[:same] + chance.choices(WORDS, k=own), [], chance.randint(1, 40)))
    return requests


def odd(number: int, path: Path, **options: Any) -> Family:
    name, shape = odd_shape(number)
    of = build_family(name, path, **{"requests": requests_of(number), **options}, **shape)
    assert len({tuple(answer) for answer in of.answers}) > len(of.requests) / 2, "these prompts show nothing"
    return of


@pytest.mark.parametrize("number", NUMBERS)
def test_a_model_of_any_shape_answers_as_transformers_does(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In company and alone, in chunks, after preemption, from blocks of others; on two ranks, gathered."""
    of, chance = odd(number, tmp_path), random.Random(number)
    for budget in (chance.randint(4, 12), 64):
        result = ask(device(of), of.requests, budget=budget)
        assert result.answers == of.answers
        assert result.preemptions > 0 and result.cached_tokens > 0
    roomy = device(of, blocks=64, block_size=chance.choice((3, 8, 16)))
    assert [ask(roomy, [request], slots=1, budget=16).answers[0] for request in of.requests] == of.answers
    assert answers_of_threads(2, of, of.requests, budget=16) == [of.answers] * 2
    monkeypatch.setattr(paged_attention, "CPU_DTYPES", ())
    assert ask(device(of), of.requests).answers == of.answers


def test_all_kinds_of_positions_and_all_families_are_among_the_odd_shapes() -> None:
    shapes = [odd_shape(number) for number in range(MODELS)]
    assert {KINDS[number % len(KINDS)] for number in range(MODELS)} == set(KINDS)
    assert len({name for name, _ in shapes}) >= 6
    assert {shape["tie_word_embeddings"] for _, shape in shapes} == {False, True}


def test_answers_in_bfloat16_differ_where_two_ids_are_nearly_as_likely(tmp_path: Path) -> None:
    """How many are equal, and how near the two ids are where the others first differ (in the report: -s)."""
    count, gaps, experts = 0, [], []
    for number in NUMBERS:
        requests = requests_of(number)[:4]
        of = odd(number, tmp_path / str(number), requests=requests, dtype=torch.bfloat16)
        stock = transformers.AutoModelForCausalLM.from_pretrained(of.path, dtype=torch.bfloat16).eval()
        actual = ask(device(of, dtype="bfloat16"), requests).answers
        count += len(requests)
        for request, ours, reference in zip(requests, actual, of.answers, strict=True):
            if ours != reference:
                to = experts if of_experts(odd_shape(number)[0]) else gaps
                to.append(roundings_apart(stock, request.prompt, ours, reference))
    near = [sum(gap <= most for gap in gaps) for most in (1, 2)]
    print(
        f"bfloat16: {count - len(gaps + experts)} of {count} answers are equal; of {len(gaps)} others {near[0]} differ "
        f"first where two logits are at most one rounding apart, {near[1]} at most two, all at most {max(gaps)}; of "
        f"models with experts {len(experts)} others at most {max(experts, default=0)}"
    )
    assert len(gaps) + len(experts) <= count / 2
    # Of a model with experts, a rounding of the router's may choose other experts, here and in transformers.
    assert max(gaps) <= 16 and near[1] >= len(gaps) / 2  # each layer rounds several times


def roundings_apart(stock: Any, prompt: list[int], ours: list[int], reference: list[int]) -> float:
    """The logits of the two ids at which these answers first differ, in units of the likeliest one's last bit."""
    at = next(at for at, (own, other) in enumerate(zip(ours, reference, strict=True)) if own != other)
    with torch.inference_mode():
        logits = stock(torch.tensor([[*prompt, *reference[:at]]])).logits[0, -1].double()
    _, exponent = math.frexp(float(logits.abs().max()))
    return abs(float(logits[ours[at]] - logits[reference[at]])) / 2.0 ** (exponent - 8)
