"""Faults that are planted in the kernels, one at a time: the tests of kernels find each of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Asked  # noqa: F401

# isort: split
import torch

from tests.support.interpreter import require_interpreter

require_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from penstock.engine.worker.cuda import attention, decoder, kernels, state, step_graphs  # noqa: E402
from tests.support.attention_cases import Case, check_attention, check_far_cache  # noqa: E402
from tests.support.device_state_cases import check_long_write, check_state  # noqa: E402
from tests.support.layer_cases import check_gate, check_norm, check_rotation, check_write  # noqa: E402

BF16 = torch.bfloat16


def check_all_attention() -> None:
    for style in ("plain", "window", "softcap", "sinks"):
        check_attention(Case(style=style, block_size=4, groups=3))
    check_attention(Case(key_size=192, value_size=80, dtype=BF16))


def check_layers() -> None:
    check_norm(96, BF16, has_x=True)
    check_rotation(6, 2, 64, BF16, has_norm=True)
    check_write(80, 48, BF16)
    check_gate(1500, BF16)


def check_states() -> None:
    check_long_write()
    check_state(0)


# The check that finds it, the text in `kernels.py`, and what stands there instead. All places of a text are changed.
MUTANTS: dict[str, tuple[Callable[[], None], str, str]] = {
    "causal mask": (check_all_attention, " & (key_position[None, :] <= position[:, None])", ""),
    "tiles without a mask": (
        check_all_attention,
        "tl.minimum(first_position + 1, end)",
        "tl.minimum(first_position + 17, end)",
    ),
    "window + 1": (check_all_attention, "> position[:, None] - WINDOW)", ">= position[:, None] - WINDOW)"),
    "window begins late": (check_all_attention, "first_position + 1 - WINDOW", "first_position + 17 - WINDOW"),
    "place of 32 bits": (check_far_cache, "return blocks.to(tl.int64)", "return blocks"),
    "write to a place of 32 bits": (
        check_far_cache,
        "place = tl.load(places + token).to(tl.int64)",
        "place = tl.load(places + token)",
    ),
    "sinks in each part": (
        check_all_attention,
        "is_first = begin == tl.load(items + 4 * num_items + item)",
        "is_first = begin >= 0",
    ),
    "no sink in the sum": (check_all_attention, "total += 1.0", "total += 0.0"),
    "softmax carry": (
        check_all_attention,
        "total = total * factor + tl.sum(weight, 1)",
        "total = total + tl.sum(weight, 1)",
    ),
    "softcap": (check_all_attention, "/ softcap)) + 1.0))", "/ softcap)) + 2.0))"),
    "block ahead": (check_all_attention, "own_table, at + TILE, limit", "own_table, at, limit"),
    "end + 1": (
        check_all_attention,
        "tl.minimum(item_begin + size * TILE, length[None, :])",
        "tl.minimum(item_begin + size * TILE, length[None, :] + 1)",
    ),
    "part is lost": (check_all_attention, "count = (tiles + size - 1) // size", "count = tl.maximum(tiles // size, 1)"),
    "merge carry": (check_all_attention, "result = result * old_factor", "result = result"),
    "merge of one part less": (check_all_attention, "is_part = at + p < count", "is_part = at + p < count - 1"),
    "group of a head": (check_all_attention, "head = kv_head * GROUPS + m % GROUPS", "head = kv_head + m % GROUPS * 2"),
    "second part of keys": (
        check_all_attention,
        "score = tl.dot(query1, key1, score",
        "score = tl.dot(query1, key1, score * 0.5",
    ),
    "query of a chunk": (
        check_all_attention,
        "position = length - num_tokens + query",
        "position = length - num_tokens + query - 1",
    ),
    "norm of the residual alone": (
        check_layers,
        "value = (value.to(tl.float32) + added.to(tl.float32))",
        "value = (value.to(tl.float32) + 0 * added.to(tl.float32))",
    ),
    "norm without rounding": (check_layers, "(scaled.to(x.dtype).to(tl.float32) * weight", "(scaled * weight"),
    "rotation without rounding": (
        check_layers,
        "((x.to(tl.float32) * cos).to(T).to(tl.float32)",
        "((x.to(tl.float32) * cos)",
    ),
    "rotation the other way": (
        check_layers,
        "rotate(low, high, cos_low, -sin_low, T)",
        "rotate(low, high, cos_low, sin_low, T)",
    ),
    "norm of keys by queries": (check_layers, "is_query = (h < HEADS)[:, None]", "is_query = (h <= HEADS)[:, None]"),
    "write to place -1": (check_layers, "if place < 0:", "if place < -1:"),
    "gate without sigmoid": (check_layers, "tl.exp(-value)", "tl.exp(value)"),
    "computed + 1": (
        check_states,
        "tl.store(computed + slot, position + 1, runs)",
        "tl.store(computed + slot, position, runs)",
    ),
    "slot -1 runs": (check_states, "runs = slot >= 0", "runs = slot >= -1"),
    "place in the block": (
        check_states,
        "block * BLOCK + position % BLOCK, -1",
        "block * BLOCK + position % (BLOCK - 1), -1",
    ),
    "padding has length 1": (check_states, "tl.where(runs, position + 1, 0)", "position + 1"),
    "long write": (check_states, "for begin in range(0, length, SIZE):", "for begin in range(0, 1, SIZE):"),
    "id of slot -1": (
        check_states,
        "tl.load(out + 2 * row, slot >= 0, 0), slot >= 0)",
        "tl.load(out + 2 * row, slot >= 0, 0), slot >= -1)",
    ),
    "second column is the id": (check_states, "tl.load(out + 2 * row,", "tl.load(out + 2 * row + 1,"),
    "counts of the sample before": (check_states, "tl.zeros([SIZE], tl.int32), begin + i < vocabulary", "0, i < 0"),
    "prompt counts as generated": (check_states, "range(first, length, SIZE)", "range(0, length, SIZE)"),
    "id is counted once": (check_states, "tl.atomic_add(", "tl.store("),
    "rope without offset": (check_states, "tl.load(own + ROPE + axis, runs, 0)", "0 * axis"),
    "short rope for all": (check_states, "-1 - rope", "rope"),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Replaces the kernels by kernels with another text."""
    source = Path(kernels.__file__).read_text()
    name = "mutant_of_kernels"

    def replace(text: str, other: str) -> None:
        assert text in source, f"kernels.py has no {text!r}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(text, other))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        for user in (attention, decoder, state, step_graphs):
            monkeypatch.setattr(user, "kernels", module)

    return replace


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_is_found(name: str, plant: Callable[[str, str], None]) -> None:
    check, text, other = MUTANTS[name]
    plant(text, other)
    with pytest.raises((AssertionError, InterpreterError)):
        check()


@pytest.mark.parametrize("check", [check_all_attention, check_far_cache, check_layers, check_states])
def test_kernels_without_a_fault_pass(check: Callable[[], None], plant: Callable[[str, str], None]) -> None:
    plant("LOG2E", "LOG2E")
    check()


@triton.jit
def access(x, place, KIND: tl.constexpr):
    at = x + place + tl.arange(0, 4)
    if KIND == 0:
        tl.store(at, 1)
    elif KIND == 1:
        tl.store(x, tl.sum(tl.load(at)))
    else:
        tl.atomic_add(at, 1)


@pytest.mark.parametrize("kind", range(3))
def test_kernel_that_leaves_its_tensors_fails(kind: int) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    access[(1,)](x, 0, kind)
    with pytest.raises(InterpreterError, match="1 of 4 addresses are in no tensor"):
        access[(1,)](x, -1, kind)
