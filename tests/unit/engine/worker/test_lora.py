"""Requests with LoRA adapters are answered as by models into which the adapters are merged, token for token."""

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Asked, BuildFamily, Family, Told, ask, device

# isort: split
import numpy as np

from penstock.engine.cluster.adapter_files import SETTINGS
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AdapterChange
from penstock.engine.worker.lora import adapter_runs
from tests.support.adapters import merged_answers, write_adapter
from tests.support.ranks import results_of_threads

FAMILIES = ("llama", "qwen3", "mistral", "gemma2")


def two_adapters(of: Family, folder: Path) -> list[Adapter]:
    """One of all layers, and one of a part of them with another rank and scale."""
    whole = write_adapter(folder / "whole", of.path, 1)
    part = write_adapter(
        folder / "part", of.path, 2, targets=("q_proj", "v_proj", "up_proj"), rank=3, lora_alpha=2, use_rslora=True
    )
    return [whole, part]


def must_answer_as_merged(of: Family, adapters: Sequence[Adapter], result: Told, requests: Sequence[Asked]) -> None:
    choices = [None, *adapters]
    expected = [
        merged_answers(of, choices[number % len(choices)], [request])[0] for number, request in enumerate(requests)
    ]
    alone = merged_answers(of, None, requests)
    assert sum(answer != base for answer, base in zip(expected, alone, strict=True)) >= len(requests) // 2
    assert result.answers == expected


def turns(adapters: Sequence[Adapter]) -> list[bytes]:
    return [b"", *(adapter.digest for adapter in adapters)]


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_in_one_batch_answer_as_merged_weights(name: str, family: BuildFamily, tmp_path: Path) -> None:
    """In chunks, beside rows without an adapter, and after preemption."""
    of = family(name)
    adapters = two_adapters(of, tmp_path)
    requests = of.requests + of.requests[3:5]
    result = ask(device(of, adapters=adapters), requests, adapters=turns(adapters))
    assert result.preemptions > 0
    must_answer_as_merged(of, adapters, result, requests)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ranks_answer_with_adapters_as_merged_weights(name: str, family: BuildFamily, tmp_path: Path) -> None:
    of = family(name)
    adapters = two_adapters(of, tmp_path)
    requests = of.requests[2:6]
    first, second = results_of_threads(2, of, requests, adapters=adapters, of_requests=turns(adapters))
    assert first.answers == second.answers
    must_answer_as_merged(of, adapters, first, requests)


def test_patterns_of_ranks_and_alphas_are_honoured(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    patterns = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5}, "alpha_pattern": {"self_attn.k_proj": 1}}
    adapter = write_adapter(tmp_path / "patterns", of.path, 3, **patterns)
    requests = of.requests[:4]
    result = ask(device(of, adapters=[adapter]), requests, adapters=[adapter.digest])
    assert result.answers == merged_answers(of, adapter, requests) != merged_answers(of, None, requests)


def test_resumed_answer_goes_on_with_its_adapter(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    adapters = two_adapters(of, tmp_path)
    whole = ask(device(of, adapters=adapters), of.requests, adapters=turns(adapters))
    resumed = [answer[: number + 1] for number, answer in enumerate(whole.answers)]
    rest = ask(device(of, adapters=adapters), of.requests, adapters=turns(adapters), resumed=resumed)
    assert [[*before, *after] for before, after in zip(resumed, rest.answers, strict=True)] == whole.answers


def test_prefix_is_shared_within_an_adapter_only(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    adapters = two_adapters(of, tmp_path)
    ours, request = device(of, blocks=64, adapters=adapters), of.requests[-1]
    mixed = ask(ours, [request] * 3, slots=1, adapters=turns(adapters))
    assert mixed.cached_tokens == 0 and len({tuple(answer) for answer in mixed.answers}) == 3
    assert ask(ours, [request] * 3, slots=1, adapters=[adapters[0].digest]).cached_tokens > 0


def test_hash_of_an_adapter_is_of_its_content_and_not_of_its_name(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    first, renamed, other = (
        write_adapter(tmp_path / name, of.path, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.digest == renamed.digest != other.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_adapter_have_the_same_bits_beside_adapters(
    dtype: str, family: BuildFamily, tmp_path: Path
) -> None:
    of = family("llama")
    adapters = two_adapters(of, tmp_path)
    options: dict[str, Any] = {"blocks": 64, "dtype": dtype}
    requests = [of.requests[3], of.requests[5], of.requests[6]]
    beside = ask(device(of, adapters=adapters, **options), requests, adapters=turns(adapters), logprobs=0)
    alone = ask(device(of, **options), requests, logprobs=0)
    assert beside.answers[0] == alone.answers[0] and beside.logprobs[0] == alone.logprobs[0]
    assert beside.answers[1] != alone.answers[1]


def test_adapter_answers_the_same_bits_alone_and_in_company(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    adapters = two_adapters(of, tmp_path)
    options: dict[str, Any] = {"blocks": 64, "dtype": "bfloat16", "adapters": adapters}
    requests = of.requests[3:6]
    beside = ask(device(of, **options), requests, adapters=turns(adapters), logprobs=0)
    alone = ask(device(of, **options), requests[1:2], adapters=turns(adapters)[1:2], logprobs=0)
    assert (beside.answers[1], beside.logprobs[1]) == (alone.answers[0], alone.logprobs[0])


def test_products_are_the_model_s_own_after_a_step_with_adapters(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    ours = device(of, adapters=two_adapters(of, tmp_path))
    decoder = ours._model.stock.get_decoder()

    def computations() -> list[Any]:
        return [vars(module).get("forward") for module in decoder.modules()]

    before = computations()
    assert ours._model.adapters is not None
    with pytest.raises(KeyError), ours._model.adapters.applied([(1, 0, 2)], 2):
        assert computations() != before
        raise KeyError("a step fails")
    assert computations() == before


def test_changed_adapter_is_left_out_and_named_by_a_worker(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    adapter, other = write_adapter(tmp_path / "sql", of.path, 1), write_adapter(tmp_path / "poems", of.path, 2)
    path = tmp_path / "sql" / SETTINGS
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 1}))
    ours = device(of, adapters=[adapter, other])
    states = {state.digest: state.error for state in ours.adapters}
    assert states[other.digest] == "" and "'sql' is not the one that was loaded" in states[adapter.digest]
    result = ask(ours, of.requests[:2], adapters=[other.digest])
    assert result.answers == merged_answers(of, other, of.requests[:2])


@pytest.mark.parametrize("fault", ["read_adapter", "_together", "set_adapter"])
def test_worker_goes_on_without_an_adapter_that_it_cannot_load(
    fault: str, family: BuildFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a dtype that safetensors' module for torch does not know, or a device without room."""
    of = family("llama")
    (adapter, _), ours = two_adapters(of, tmp_path), device(of, adapters=())

    def fail(*_: Any) -> None:
        raise KeyError("F8_E8M0")

    with monkeypatch.context() as context:
        context.setattr(f"penstock.engine.worker.lora.{fault}", fail)
        assert ours.change_adapter(AdapterChange(0, 0, *adapter, True)) == "KeyError: 'F8_E8M0'"
    assert ours._model.adapters is not None
    assert not any(product.factors for _, product in ours._model.adapters._places.values())
    assert ours.change_adapter(AdapterChange(0, 0, *adapter, True)) == ""
    expected = merged_answers(of, adapter, of.requests[:2])
    assert ask(ours, of.requests[:2], adapters=[adapter.digest]).answers == expected


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters_come_and_go_between_steps(name: str, family: BuildFamily, tmp_path: Path) -> None:
    """In native layers, and in modules; numbers are used again."""
    of = family(name)
    first, second = two_adapters(of, tmp_path)
    ours, requests = device(of, adapters=()), of.requests[:4]
    expected = {each: merged_answers(of, each, requests) for each in (None, first, second)}

    def answers(adapter: Adapter | None) -> list[list[int]]:
        return ask(ours, requests, adapters=[b"" if adapter is None else adapter.digest]).answers

    for adapter in (first, second, first):
        assert answers(None) == expected[None]
        assert ours.change_adapter(AdapterChange(0, 0, *adapter, True)) == ""
        assert [state.digest for state in ours.adapters] == [adapter.digest]
        assert answers(adapter) == expected[adapter]
        ours.change_adapter(AdapterChange(0, 0, *adapter, False))
    assert ours.adapters == ()


def test_adapter_that_is_unloaded_gives_its_memory_back(family: BuildFamily, tmp_path: Path) -> None:
    of = family("llama")
    (adapter, _), ours = two_adapters(of, tmp_path), device(of, adapters=())
    assert ours._model.adapters is not None
    ours.change_adapter(AdapterChange(0, 0, *adapter, True))
    products = [product for _, product in ours._model.adapters._places.values()]
    layers = [layer for product in products for each in product.factors.values() for layer in each]
    packed = [layer.forward.packed for layer in layers]
    layers.clear()
    ours.change_adapter(AdapterChange(0, 0, *adapter, False))
    gc.collect()
    unshared = [object() for _ in packed]
    assert [sys.getrefcount(each) for each in packed] == [sys.getrefcount(each) for each in unshared] != []


def test_tokens_of_an_adapter_are_runs() -> None:
    assert adapter_runs(np.array([0, 0, 2, 2, 3, 0, 2])) == [(2, 2, 4), (3, 4, 5), (2, 6, 7)]
    assert adapter_runs(np.zeros(4, np.intp)) == []
