"""A model on several ranks answers as transformers does, token for token, however few heads there are to share."""

import threading
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import TEXT, BuildFamily, device, families

# isort: split
from penstock.engine import _native
from penstock.engine.worker.cpu_linear import FLOAT32_KERNELS
from tests.support.ranks import Threads, ranks_must_answer, results_of_threads, shared_memory, threads_must_answer

EVEN: list[Any] = [(2, name, {}) for name in families()]
WIDE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen2_vl", "qwen3_vl")
HALVES = [  # of heads of keys: two ranks have one between them
    *((4, name, {}) for name in families(*WIDE)),
    *((2, name, {"num_key_value_heads": 1}) for name in families("llama", "mixtral", "qwen2_moe", "idefics3")),
]
UNEVEN = [  # so that some ranks have zeros: of the first, two and one of the three that look at a head of keys
    (4, "qwen2", {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 97}),
    (2, "smolvlm", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    (2, "gemma3_text", {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}),
    (2, "qwen3_moe", {"moe_intermediate_size": 36}),
    (4, "gpt_oss", {"num_attention_heads": 6, "intermediate_size": 36}),
]


def test_two_processes_answer_like_one(family: BuildFamily, tmp_path: Path) -> None:
    """Both plan the same steps, and both know what was sampled, as rank 0 chose. For how models differ, threads do."""
    ranks_must_answer(2, [family(name) for name in ("llama", "mixtral", "qwen2_vl")], tmp_path, slice(1, 4))


@pytest.mark.parametrize(("size", "name", "changes"), EVEN + HALVES + UNEVEN)
def test_ranks_answer_like_one_however_few_heads_and_columns_there_are(
    size: int, name: str, changes: dict[str, int], family: BuildFamily
) -> None:
    threads_must_answer(size, family(name, **changes))


@pytest.mark.parametrize("name", families(*TEXT))
def test_layers_of_ranks_are_one_native_call(name: str, family: BuildFamily) -> None:
    ranks = Threads(0, [None, None], threading.Barrier(1), shared_memory(2))
    has_experts = name in ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
    is_native = not has_experts and _native.linear_kernel() in FLOAT32_KERNELS
    decoders = [device(family(name), ranks=ranks)._model._decoder, device(family(name))._model._decoder]
    assert [decoder is not None for decoder in decoders] == [is_native] * 2


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("qwen2_vl", {}), ("llama", {"hidden_size": 72})])
def test_ranks_answer_in_bfloat16(name: str, changes: dict[str, int], family: BuildFamily) -> None:
    """Linear layers are packed then. Rounding may change answers, so the first log-probabilities are compared."""
    of = family(name, **changes)
    requests = of.requests[:2]
    first, second = results_of_threads(2, of, requests, dtype="bfloat16")
    (alone,) = results_of_threads(1, of, requests, dtype="bfloat16")
    assert first.answers == second.answers and [len(answer) for answer in first.answers] == [
        request.tokens for request in requests
    ]
    for values, expected in zip(first.logprobs, alone.logprobs, strict=True):
        assert abs(values[0] - expected[0]) < 0.1
