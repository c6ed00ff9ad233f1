"""What the real device is made of: attention over blocks, slices for ranks, and what is refused when it is loaded."""

import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BuildFamily, batch_of_rows, build_family, device

# isort: split
import torch
import transformers

from penstock.engine.model_dir import FAMILIES
from penstock.engine.worker import paged_attention, tensor_parallel
from penstock.engine.worker.input_batch import TokenTable
from penstock.engine.worker.model_loader import TEXT_OF, load, replace_patch_convolutions
from penstock.engine.worker.model_runner import CPU_SHARE, ModelRunner
from penstock.engine.worker.paged_attention import AttentionStyle, KVCache, KVCacheShape, PagedAttention
from penstock.engine.worker.tensor_parallel import TPGroup, shard
from penstock.engine.worker.weight_slices import HeadSlices

CPU = torch.device("cpu")
SIZE, HEADS, SHARED = 8, 6, 2  # of a head, of queries, of keys


def test_kv_cache_takes_no_memory_before_it_is_written() -> None:
    """A worker that is killed is told of when the kernel has taken its pages back: half a gigabyte takes 70 ms."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    memory = KVCache({0: KVCacheShape(8, 64, 64)}, blocks=16384, block_size=16, dtype=torch.bfloat16, device=CPU)
    keys, values = memory.layers[0]
    assert keys.shape == values.shape == (16384 * 16, 8, 64)
    assert not keys[::4096].any() and not values[-1].any()
    assert resident() - before < 160 << 20, "of 512 MB; a page that is read may be one of 2 MB"


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────
def dense(query: Any, key: Any, value: Any, how: AttentionStyle) -> Any:
    """One request, one token and one head after the other. The queries are of the last tokens."""
    attended = torch.zeros(query.shape)
    for row in range(query.shape[0]):
        at = key.shape[0] - query.shape[0] + row
        first = 0 if how.window is None else max(0, at + 1 - how.window)
        for head in range(HEADS):
            shared_head = head * SHARED // HEADS
            scores = key[first : at + 1, shared_head] @ query[row, head] * how.scale
            if how.softcap is not None:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            if how.sinks is not None:
                scores = torch.cat((scores, how.sinks[head : head + 1]))
            weights = torch.softmax(scores, 0)[: at + 1 - first]
            attended[row, head] = weights @ value[first : at + 1, shared_head]
    return attended


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, HEADS)])
@pytest.mark.parametrize("most_gathered", [1, 24, 1 << 16])
def test_a_token_sees_what_came_before_it_and_nothing_else(
    window: int | None, softcap: float | None, sinks: Any, most_gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "MAX_GATHERED", most_gathered)
    rows = [(7, 1), (1, 1), (20, 1), (9, 9), (13, 4), (4, 4), (2, 1), (18, 11)]
    batch = batch_of_rows(rows)
    torch.manual_seed(3)
    memory = KVCache({0: KVCacheShape(SHARED, SIZE, SIZE)}, 64, 4, torch.float32, CPU)
    for tensor in memory.layers[0]:
        tensor.fill_(float("nan"))  # whatever others have left there is not seen
    how = AttentionStyle(1.3, window, softcap, sinks)
    keys = {slot: torch.randn(length, SHARED, SIZE) for slot, (length, _) in enumerate(rows)}
    values = {slot: torch.randn(length, SHARED, SIZE) for slot, (length, _) in enumerate(rows)}
    before = batch_of_rows([(length, length) for length, _ in rows])
    for slot, place, position in zip(before.slots, before.places, before.positions, strict=True):
        if position < rows[slot][0] - rows[slot][1]:
            memory.layers[0][0][place], memory.layers[0][1][place] = keys[slot][position], values[slot][position]
    query = torch.randn(batch.slots.size, HEADS, SIZE)
    at = list(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True))
    key, value = (torch.stack([of[slot][position] for slot, position in at]) for of in (keys, values))
    attended = PagedAttention(memory, batch, CPU).attend(0, query, key, value, how)
    for slot, start, count in zip(batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True):
        part = slice(start, start + count)
        torch.testing.assert_close(attended[part], dense(query[part], keys[slot], values[slot], how))


def test_tokens_are_remembered_however_many_they_become() -> None:
    tokens = TokenTable(3, CPU)
    tokens.join(1, np.arange(5, dtype=np.int32))
    tokens.join(2, np.arange(100, 400, dtype=np.int32))
    tokens.write(np.array([1]), np.array([5], np.int32), torch.tensor([77]))
    tokens.write(np.array([2, 1]), np.array([900, 6], np.int32), torch.tensor([88, 78], dtype=torch.int32))
    slots, positions = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([4, 5, 6, 299, 900])
    assert tokens.read(slots, positions).tolist() == [4, 77, 78, 399, 88]


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_sharding_plan_with_an_unknown_style_is_refused() -> None:
    ranks = TPGroup()
    ranks.size = 2
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)])})
    with pytest.raises(ValueError, match=r"layers\.\*: .* wants 'diagonal'; known are all_reduce, colwise"):
        shard(model, {"layers.*": "diagonal"}, ranks, HeadSlices(2, 2))
    assert shard(model, {"elsewhere": "diagonal"}, ranks, HeadSlices(2, 2)) == {}


def test_every_style_of_the_plans_of_these_families_is_known() -> None:
    for name in FAMILIES:
        config = transformers.AutoConfig.for_model(TEXT_OF.get(name, name)).get_text_config()
        plan = config.base_model_tp_plan | tensor_parallel.PLANS.get(name, {})
        assert set(plan.values()) <= set(tensor_parallel.STYLES), name
        assert plan["layers.*.self_attn.o_proj"].startswith("rowwise"), "no KV cache is kept"


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("llama", tmp_path_factory.mktemp("llama")).path


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_another_architecture_is_refused_with_those_that_are_supported(broken: Path) -> None:
    change_config(broken, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    supported = "are not supported; supported are Gemma2ForCausalLM, .*; with images Idefics3ForConditionalGeneration, "
    with pytest.raises(ValueError, match=rf"\['GPT2LMHeadModel'\] \(model_type 'gpt2'\) {supported}"):
        load(broken, TPGroup(), CPU)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])  # of gpt-oss alone
def test_quantized_weights_are_refused(method: str, broken: Path) -> None:
    change_config(broken, quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"'llama': weights quantized by '{method}' are not supported"):
        load(broken, TPGroup(), CPU)


def test_a_name_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a local directory"):
        load(tmp_path / "meta-llama", TPGroup(), CPU)


def test_heads_that_cannot_be_shared_are_refused(llama: Path) -> None:
    ranks = TPGroup()
    ranks.size = 3
    wrong = "num_attention_heads is 4 and num_key_value_heads 2, which cannot be cut for 3 ranks: use 2"
    with pytest.raises(ValueError, match=wrong):
        load(llama, ranks, CPU)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_keeps_one_head_where_there_are_fewer_than_ranks(
    rank: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TPGroup, "all_reduce", lambda _, tensor: tensor)  # the others are not there
    monkeypatch.setattr(TPGroup, "least", lambda _, number: number)
    ranks = TPGroup()
    ranks.size, ranks.rank = 4, rank
    ours = load(llama, ranks, CPU)
    assert set(ours.shapes.values()) == {KVCacheShape(1, 16, 16)}


def test_parameters_that_are_missing_or_have_another_shape_are_named(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    moved = tensors.pop("model.norm.weight")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 parameters of LlamaForCausalLM are not there: model\.norm\.weight"):
        load(broken, TPGroup(), CPU)
    save_file({**tensors, "model.norm.weight": moved[:-1].clone()}, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected a shape of \(64,\), got \(63,\)"):
        load(broken, TPGroup(), CPU)


def test_a_model_has_the_type_that_is_wanted_or_that_of_its_configuration(llama: Path) -> None:
    assert load(llama, TPGroup(), CPU).dtype == torch.float32
    narrow = load(llama, TPGroup(), CPU, "bfloat16")
    assert {parameter.dtype for parameter in narrow.stock.parameters()} == {torch.bfloat16}
    assert narrow.stock.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32
    with pytest.raises(ValueError, match="expected dtype to be auto, float32, bfloat16 or float16, got 'int8'"):
        ModelRunner(llama, slots=1, dtype="int8")


def test_the_cache_has_its_share_of_the_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.worker.model_runner.memory_available", lambda: (10_000_000, "this test"))
    each = 4 * 2 * 2 * (16 + 16) * 4  # tokens, layers, heads, key and value, bytes
    ours = ModelRunner(llama, slots=1, block_size=4, threads=1)
    assert ours.blocks == math.floor(CPU_SHARE * 10_000_000 / each)
    assert ModelRunner(llama, slots=1, block_size=4, threads=1, max_blocks=7).blocks == 7  # if no more can be filled
    monkeypatch.setattr("penstock.engine.worker.model_runner.memory_available", lambda: (1, "this test"))
    with pytest.raises(ValueError, match="no room for keys and values"):
        ModelRunner(llama, slots=1, block_size=4, threads=1)


# ── patches ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_patch_convolution_is_computed_as_a_product() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv3d(3, 10, (2, 4, 4), stride=(2, 4, 4))
    overlapping = torch.nn.Conv3d(3, 10, (2, 4, 4), stride=(2, 2, 2))
    patches = torch.randn(6, 3, 2, 4, 4)
    expected = layer(patches)
    replace_patch_convolutions(torch.nn.Sequential(layer, overlapping))
    computed = layer(patches)
    assert computed.shape == expected.shape
    torch.testing.assert_close(computed, expected)
    assert "forward" not in vars(overlapping)
    with pytest.raises(ValueError, match=r"expected patches \[3, 2, 4, 4\], got \[3, 2, 4, 8\]"):
        layer(torch.randn(6, 3, 2, 4, 8))


def test_step_without_images_releases_encodings_of_whole_images(family: BuildFamily) -> None:
    """The encoding of an image with tokens left is held for one more step."""
    images = device(family("llava"))._images
    assert images is not None
    images._shared = {b"whole": torch.zeros(1), b"begun": torch.zeros(1)}
    images._unfinished = {b"begun"}
    images.begin_step()
    assert list(images._shared) == [b"begun"]
    images.begin_step()
    assert not images._shared
