"""Packed linear layers beside those of torch, each alone and fused, and what packing does to a model's modules."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock.engine import _native
from penstock.engine.worker.cpu_kernels import kernel_threads, set_threads
from penstock.engine.worker.cpu_linear import FLOAT32_KERNELS, PANEL, find_groups, pack_linears

FASTEST = _native.linear_kernel()


@pytest.fixture(params=_native.linear_kernels())
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.choose_linear_kernel(request.param)
    yield request.param
    _native.choose_linear_kernel(FASTEST)


class Attention(nn.Module):
    def __init__(self, size: int, keys: int, *, has_bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=has_bias)
        self.k_proj = nn.Linear(size, keys, bias=has_bias)
        self.v_proj = nn.Linear(size, keys)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)


class Mlp(nn.Module):
    def __init__(self, size: int, width: int, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ScaledMlp(Mlp):
    def forward(self, x: torch.Tensor) -> Any:
        return 2 * super().forward(x)


def require_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() <= 0.02 * expected.abs().max() + 1e-3


def pack(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Returns the module in bfloat16 with packed layers, and in float32."""
    module = module.to(torch.bfloat16).requires_grad_(False)
    exact = copy.deepcopy(module).float()
    pack_linears(module)
    return module, exact


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 1100])
def test_packed_linear_computes_what_torch_does(kernel: str, rows: int) -> None:
    torch.manual_seed(rows)
    packed, exact = pack(nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 33, bias=False)))
    x = torch.randn(1, rows, 70).to(torch.bfloat16)
    require_close(packed(x), exact(x.float()))


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_keys_and_values_are_one_product(has_bias: bool) -> None:
    torch.manual_seed(0)
    model = Attention(64, 32, has_bias=has_bias).to(torch.bfloat16)
    assert [len(group.layers) for group in find_groups(model)] == [3]
    packed, exact = pack(model)
    for rows in (1, 40):
        x = torch.randn(1, rows, 64).to(torch.bfloat16)
        require_close(packed(x), exact(x.float()))


@torch.inference_mode()
def test_shared_product_is_right_in_any_order_and_for_other_inputs() -> None:
    torch.manual_seed(0)
    packed, exact = pack(Attention(64, 32, has_bias=False))
    first, second = (torch.randn(3, 64).to(torch.bfloat16) for _ in range(2))
    for layer, x in (("v_proj", first), ("q_proj", second), ("k_proj", second), ("k_proj", first), ("v_proj", second)):
        require_close(getattr(packed, layer)(x), getattr(exact, layer)(x.float()))


@torch.inference_mode()
@pytest.mark.parametrize("kind, act_fn, is_fused", [
    (Mlp, nn.SiLU(), True), (Mlp, nn.GELU(approximate="tanh"), True), (Mlp, nn.GELU(), False),
    (ScaledMlp, nn.SiLU(), False),
])  # fmt: skip
def test_gate_is_fused_where_the_module_computes_one(kind: type[Mlp], act_fn: nn.Module, is_fused: bool) -> None:
    torch.manual_seed(0)
    model = kind(64, 96, act_fn).to(torch.bfloat16)
    assert [group.gated is not None for group in find_groups(model)] == [is_fused, False]
    packed, exact = pack(model)
    x = torch.randn(1, 20, 64).to(torch.bfloat16)
    require_close(packed(x), exact(x.float()))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 17, 600])
def test_packed_linear_adds_numbers_to_its_sums(kernel: str, rows: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and kernel not in FLOAT32_KERNELS:
        pytest.skip("torch computes")
    torch.manual_seed(rows)
    layer: Any = nn.Linear(70, 50).to(dtype).requires_grad_(False)
    exact = copy.deepcopy(layer).float()
    pack_linears(layer)
    x, wide = torch.randn(rows, 70).to(dtype), 3 * torch.randn(rows, 64).to(dtype)
    added: Any = wide[:, :50]  # a stride of its own
    computed, alone = layer.forward(x, added), layer.forward(x)
    assert torch.equal(layer.forward(x, torch.zeros(rows, 50, dtype=dtype)), alone)
    expected = exact(x.float()) + added.float()
    assert (computed.float() - expected).abs().max() <= (
        0.01 if dtype == torch.bfloat16 else 1e-6
    ) * expected.abs().max()


@torch.inference_mode()
def test_gate_is_applied_to_sums_with_added_numbers(kernel: str) -> None:
    torch.manual_seed(0)
    packed, exact = pack(Mlp(64, 96, nn.SiLU()))
    x = torch.randn(20, 64).to(torch.bfloat16)
    gate, up = torch.randn(2, 20, 96).to(torch.bfloat16)
    panels = torch.stack((gate.view(20, -1, PANEL), up.view(20, -1, PANEL)), dim=2).flatten(1)
    fused: Any = packed.forward
    gate_sums, up_sums = (getattr(exact, name)(x.float()) for name in ("gate_proj", "up_proj"))
    require_close(fused.product(x, panels), nn.functional.silu(gate_sums + gate) * (up_sums + up))


class OtherMlp(Mlp):
    """Its trial tells nothing if the weights are zeros."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@torch.inference_mode()
def test_trial_of_a_gate_does_not_depend_on_weights_or_hooks() -> None:
    torch.manual_seed(0)
    model = OtherMlp(64, 32, nn.SiLU()).to(torch.bfloat16).requires_grad_(False)
    model.down_proj.weight.zero_()
    layers, calls = list(model.children()), []
    model.down_proj.register_forward_hook(lambda *_: calls.append(1))
    assert [group.gated is None for group in find_groups(model)] == [True, True]
    assert list(model.children()) == layers and not calls


@torch.inference_mode()
def test_gate_is_fused_by_each_modules_shape_and_activation() -> None:
    torch.manual_seed(0)
    gates = [nn.GELU(approximate="tanh"), nn.GELU()]
    mlps = [Mlp(64, 32, nn.SiLU()), Mlp(64, 36, nn.SiLU()), *(Mlp(64, 32, gate) for gate in gates)]
    model = nn.Sequential(*mlps).to(torch.bfloat16)
    assert [group.gated is not None for group in find_groups(model) if len(group.layers) == 2] == [True, True, False]
    packed, exact = pack(model)
    x = torch.randn(1, 5, 64).to(torch.bfloat16)
    require_close(packed(x), exact(x.float()))


@torch.inference_mode()
def test_layers_of_two_modules_are_packed_once() -> None:
    torch.manual_seed(0)
    first, second = Attention(64, 32, has_bias=True), Attention(64, 32, has_bias=True)
    second.q_proj = first.q_proj
    second.k_proj.weight = first.k_proj.weight
    second.v_proj = second.k_proj
    packed, exact = pack(nn.ModuleList([first, second]))
    x = torch.randn(1, 5, 64).to(torch.bfloat16)
    for module, other in zip(packed, exact, strict=True):  # type: ignore[call-overload]
        require_close(module(x), other(x.float()))


@torch.inference_mode()
def test_shard_of_inputs_is_packed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 50)
    layer.weight = nn.Parameter(layer.weight[:, 24:].clone())  # `in_features` stays 64, as in a rank of several
    packed, exact = pack(nn.Sequential(layer))
    x = torch.randn(1, 5, 40).to(torch.bfloat16)
    out = packed(x)
    require_close(out, exact(x.float()))
    assert out.is_contiguous()  # all-reduces take no other tensor


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 7])
def test_wide_rows_are_multiplied_by_slices_of_the_weights(threads: int) -> None:
    """Of 8,200 inputs, few rows fit the cache: 130 rows are several blocks, which must not read all weights each."""
    torch.manual_seed(1)
    before = kernel_threads(), torch.get_num_threads()
    set_threads(threads, before[1])
    packed, exact = pack(nn.Linear(8_200, 520, bias=False))
    x = torch.randn(130, 8_200).to(torch.bfloat16)
    require_close(packed(x), exact(x.float()))
    set_threads(*before)


@torch.inference_mode()
def test_packed_linear_takes_any_strides_and_no_rows() -> None:
    torch.manual_seed(0)
    packed, exact = pack(nn.Sequential(nn.Linear(64, 33)))
    wide = torch.randn(4, 5, 200).to(torch.bfloat16)
    thirds, expanded = wide[..., ::3][..., :64], wide[:1, :1, :64].expand(3, 4, 64)
    for x in (wide[..., 7:71], wide.transpose(0, 1)[..., :64], thirds, expanded):
        require_close(packed(x), exact(x.float()))
    assert packed(wide[:0, :, :64]).shape == (0, 5, 33) and packed(wide[0, 0, :64]).shape == (33,)


@torch.inference_mode()
def test_hooks_of_packed_layers_run() -> None:
    packed, _ = pack(Mlp(64, 32, nn.SiLU()))
    x = torch.randn(2, 64).to(torch.bfloat16)
    expected = packed(x)
    packed.down_proj.register_forward_hook(lambda _module, _inputs, out: out + 1)  # type: ignore[union-attr, operator, unused-ignore]
    assert torch.equal(packed(x), expected + 1)


def test_layers_of_other_dtypes_stay(kernel: str) -> None:
    model = nn.ModuleList([nn.Linear(64, 32).to(dtype) for dtype in (torch.float16, torch.float32)])
    half, single = (layer.weight for layer in model)
    pack_linears(model)
    assert model[0].weight is half and (model[1].weight is single) == (kernel not in FLOAT32_KERNELS)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 45, 1100])
def test_float32_layers_compute_what_torch_does(kernel: str, rows: int) -> None:
    """The products of queries, keys and values and of a gate are fused, too. Rows alone have the same bits."""
    if kernel not in FLOAT32_KERNELS:
        pytest.skip("torch computes float32 beside this kernel")
    torch.manual_seed(rows)
    parts = Attention(70, 32, has_bias=True), nn.Linear(134, 33), nn.Linear(33, 64), Mlp(64, 48, nn.SiLU())
    exact = nn.Sequential(*parts).requires_grad_(False)
    packed = copy.deepcopy(exact)
    pack_linears(packed)
    assert all(parameter.is_meta for name, parameter in packed.named_parameters() if name.endswith("weight"))
    x = torch.randn(rows, 70)
    actual = packed(x)
    torch.testing.assert_close(actual, exact(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed(x[-1:]), actual[-1:])


@torch.inference_mode()
def test_rows_have_the_same_bits_alone_and_in_company(kernel: str) -> None:
    torch.manual_seed(0)
    packed, _ = pack(Mlp(96, 64, nn.SiLU()))
    x = torch.randn(50, 96).to(torch.bfloat16)
    together = packed(x)
    assert all(torch.equal(packed(x[row : row + 1])[0], together[row]) for row in range(50))


def test_tied_embedding_keeps_its_weights() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, **shape, num_key_value_heads=1, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        expected = model(ids).logits.float()
        pack_linears(model)
        actual = model(ids).logits.float()
    assert model.get_input_embeddings().weight.device.type == "cpu" and model.lm_head.weight.is_meta
    assert (actual - expected).abs().max() <= 0.03 * expected.abs().max()


def test_packed_linear_refuses_what_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).to(torch.bfloat16).requires_grad_(False)
    pack_linears(model)
    narrow = {"dtype": torch.bfloat16}
    for wrong in (torch.zeros(1, 64), torch.zeros(1, 65, **narrow), torch.zeros(1, 64, **narrow, device="meta")):
        with pytest.raises(ValueError, match=r"expected a Tensor \[\.\.\., 64\] of bfloat16 on cpu, got a Tensor"):
            model(wrong)
    with pytest.raises(ValueError, match="no kernel other"):
        _native.choose_linear_kernel("other")
