"""Rotary positions of every kind: an answer does not depend on the other requests of the step."""

from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import TEXT, VISION, Family, ask, build_family, device, stock_of

# isort: split
import torch

from penstock.engine.worker.model_loader import load
from penstock.engine.worker.tensor_parallel import TPGroup
from tests import tiers
from tests.support.ranks import answers_of_threads

SHORT = 20  # tokens up to which longrope has its short frequencies: some prompts are longer, most answers come to it
HALF = 8  # of a head's size
FACTORS = {"factor": 4.0, "original_max_position_embeddings": SHORT}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": FACTORS,
    "llama3": {**FACTORS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**FACTORS, "short_factor": [1.0] * HALF, "long_factor": [1.0 + 3 * at for at in range(HALF)]},
    "proportional": {"partial_rotary_factor": 0.5},
}
LOOKING = ("dynamic", "longrope")  # at the whole call, in a stock model
PLANES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CASES = [
    (name, kind)
    for name in [*TEXT, *VISION]
    for kind in KINDS
    if (tiers.TIER != "push" or name in ("llama", "gemma3_text", "qwen2_vl") or (name, kind) == ("gemma2", "longrope"))
    and not (name in PLANES and kind == "longrope")
]


def changes(name: str, kind: str) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}
    if name == "gemma3_text":
        plain = {"rope_type": "default", "rope_theta": 1e4}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": plain}}
    if name in PLANES:
        return {"rope_parameters": {**rope, "mrope_section": [2, 3, 3]}}
    return {"rope_parameters": rope, **({"head_dim": 16} if name == "mixtral" else {})}


def turning(name: str, kind: str, path: Path) -> Family:
    of = build_family(name, path, **changes(name, kind))
    assert any(len(request.prompt) < SHORT < len(request.prompt) + request.tokens for request in of.requests)
    assert any(len(request.prompt) > SHORT for request in of.requests)
    return of


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_alone_and_in_company_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    of = turning(name, kind, tmp_path)
    result = ask(device(of), of.requests)
    assert result.answers == of.answers
    assert result.preemptions > 0 and result.cached_tokens > 0
    ours = device(of, blocks=64)
    assert [ask(ours, [request], slots=1).answers[0] for request in of.requests] == of.answers


@pytest.mark.parametrize("kind", LOOKING)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_two_ranks_answer_alike(name: str, kind: str, tmp_path: Path) -> None:
    of = turning(name, kind, tmp_path)
    assert answers_of_threads(2, of, of.requests) == [of.answers] * 2


def test_a_prompt_of_another_kind_finds_none_of_its_blocks(tmp_path: Path) -> None:
    """A long prompt has other keys from its first token on, the same keys as another long one."""
    of = turning("llama", "longrope", tmp_path)
    short, long = of.requests[4], of.requests[6]
    assert short.prompt[:12] == long.prompt[:12]
    ours = device(of, blocks=64)
    result = ask(ours, [short, long], slots=1)
    assert result.answers == [of.answers[4], of.answers[6]] and result.cached_tokens == 0
    assert ask(ours, [long, long], slots=1).cached_tokens == 20


@pytest.mark.parametrize("name", PLANES)
def test_longrope_with_positions_on_planes_is_refused_by_name(name: str, tmp_path: Path) -> None:
    stock_of(name, **changes(name, "longrope")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'{name}' with rope_type longrope is not supported"):
        load(tmp_path, TPGroup(), torch.device("cpu"))


def test_longrope_that_begins_at_several_lengths_is_refused_by_name(tmp_path: Path) -> None:
    rope = changes("llama", "longrope")["rope_parameters"]
    later = {**rope, "original_max_position_embeddings": 2 * SHORT}
    both = {"full_attention": rope, "sliding_attention": later}
    stock_of("gemma3_text", rope_parameters=both).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"several original_max_position_embeddings \(\[20, 40\]\)"):
        load(tmp_path, TPGroup(), torch.device("cpu"))
