"""Experts in MXFP4: numbers are decoded as transformers decodes them, and a model answers as the decoded one does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Family, ask, build_family, device

# isort: split
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine.cluster.node_weights import WeightFile
from penstock.engine.worker import weight_loader
from penstock.engine.worker.model_loader import load
from penstock.engine.worker.mxfp4 import read_experts
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.engine.worker.weight_slices import WeightSlice
from tests.support.ranks import threads_must_answer

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


class Stored:
    """Stands for a slice of safetensors, and counts the numbers that are read at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.most = 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._tensor[index]
        self.most = max(self.most, part.numel())
        return part


def drawn_experts(experts: int, outputs: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random blocks, and scales of small weights."""
    blocks = torch.randint(256, (experts, outputs, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 125, (experts, outputs, groups), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_byte_and_scale_is_decoded_as_by_transformers(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    blocks, scales = every.view(1, 16, 1, 16).expand(256, -1, -1, -1), every.view(256, 1, 1).expand(-1, 16, 1)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    decoded = read_experts("w", Stored(blocks), Stored(scales), None, dtype, CPU)
    assert decoded.dtype == dtype and decoded.shape == expected.shape == (256, 32, 16)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decoded.signbit(), expected.signbit())  # of zeros, too


@pytest.mark.parametrize("part", [WeightSlice(-1, 12, ((2, 7),), 6), WeightSlice(-2, 96, ((0, 40), (60, 90)), 40)])
def test_rank_decodes_its_slice_and_reads_one_expert_at_a_time(part: WeightSlice) -> None:
    blocks, scales = drawn_experts(4, 12, 3)
    whole, stored = convert_moe_packed_tensors(blocks, scales), Stored(blocks)
    assert torch.equal(
        read_experts("w", stored, Stored(scales), part, torch.bfloat16, CPU), part.of(whole, whole.shape, "w")
    )
    assert stored.most * 4 == blocks.numel()


def test_blocks_of_another_format_are_refused() -> None:
    blocks, scales = drawn_experts(1, 12, 3)
    for wrong in ((blocks[0], scales), (blocks[..., :8], scales), (blocks, scales[:, :6])):
        with pytest.raises(ValueError, match=r"w: expected blocks of MXFP4 \[experts, outputs, groups, 16\]"):
            read_experts("w", *map(Stored, wrong), None, torch.float32, CPU)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A gpt-oss with experts in MXFP4, and the answers of transformers with the decoded experts."""
    packed: dict[str, torch.Tensor] = {}

    def quantize(stock: Any) -> None:
        for name, parameter in stock.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, inputs, outputs = parameter.shape
                blocks, scales = drawn_experts(experts, outputs, inputs // 32)
                parameter.data.copy_(convert_moe_packed_tensors(blocks, scales))
                packed.update({f"{name}_blocks": blocks, f"{name}_scales": scales})

    of = build_family("gpt_oss", tmp_path_factory.mktemp("gpt_oss"), prepare=quantize)
    file = of.path / "model.safetensors"
    others = {name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in packed}
    save_file({**others, **packed}, file, {"format": "pt"})
    edit(of.path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return of


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_quantized_model_answers_as_the_decoded_model(quantized: Family) -> None:
    assert len({tuple(answer) for answer in quantized.answers}) == len(quantized.answers), "these prompts show nothing"
    assert ask(device(quantized), quantized.requests).answers == quantized.answers


def test_ranks_of_a_quantized_model_answer_alike(quantized: Family) -> None:
    threads_must_answer(2, quantized)


def test_decoded_experts_are_shared_by_the_workers_of_a_node(
    quantized: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WeightFile.create("weights", "test")
    assert ask(device(quantized, weight_file=file), quantized.requests).answers == quantized.answers
    monkeypatch.setattr(weight_loader, "read_experts", None)  # the next worker decodes nothing
    assert ask(device(quantized, weight_file=file), quantized.requests).answers == quantized.answers
    file.close()


def test_quantized_model_without_a_dtype_is_loaded_in_bfloat16(quantized: Family, tmp_path: Path) -> None:
    path = Path(shutil.copytree(quantized.path, tmp_path / "model"))
    edit(path, dtype=None)
    assert load(path, TPGroup(), CPU).dtype == torch.bfloat16
