"""LoRA adapters of a model: the tokens of an adapter get y = W x + scale * B A x from the layers that it changes.

W x is computed for all tokens of a step at once, by the same kernels as without adapters; tokens of one adapter stand
together. Native layers know the adapters. Where modules compute, their products are swapped for the time of a step with
tokens of adapters: other steps compute as without adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.adapter_files import (
    SETTINGS,
    WEIGHTS,
    LowRank,
    digest_of,
    find_low_ranks,
    read_settings,
)
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.lora import Adapter
from penstock.engine.worker.cpu_kernels import GatedMlp, Product, SharedSlice
from penstock.engine.worker.cpu_linear import PANEL, pack_linears
from penstock.engine.worker.weight_slices import WeightSlice

AdapterRun: TypeAlias = "tuple[int, int, int]"  # number of an adapter, first token, and token behind the last


class NativeLayer(Protocol):
    """A decoder layer that one native call computes."""

    native: _native.DecoderLayer
    mlp: Any  # computed by a module; None: by the native call, too
    stock: Any  # computes the layer by its modules


def adapter_runs(numbers: Index) -> list[AdapterRun]:
    """Returns the runs of tokens with an adapter. `numbers`: of each token's adapter, from 1; 0: none."""
    if not numbers.any():
        return []
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), numbers.size]
    runs = zip(numbers[bounds[:-1]].tolist(), bounds[:-1], bounds[1:], strict=True)
    return [run for run in runs if run[0]]


class Factors(NamedTuple):
    """A and B of one adapter, for all layers of a product. B has the scale."""

    a: Any  # nn.Linear
    b: Any

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Factors:
        layers = []
        for matrix in (a, b):
            layers.append(nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta"))
            layers[-1].weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
        return cls(*layers)


class AdaptedProduct:
    """A product of linear layers with one input, and what each adapter adds to it."""

    def __init__(self, product: Callable[[Tensor], Tensor], outputs: int) -> None:
        self._product = product
        self.outputs = outputs
        self.factors: dict[int, Factors] = {}  # by the number of the adapter
        self.runs: Sequence[AdapterRun] = ()  # of the step that is computed
        self.tokens = 0

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) != self.tokens:
            raise RuntimeError(f"expected all {self.tokens} tokens of a step with adapters, got {len(flat)}")
        if isinstance(self._product, Product):
            added = flat.new_zeros(self.tokens, self.outputs)
            for run, rows in self._added(flat):
                added[run] = rows
            return self._product(x, added)
        out = self._product(x)
        for run, rows in self._added(flat):
            out.view(-1, self.outputs)[run] += rows
        return out

    def _added(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for number, begin, end in self.runs:
            factors = self.factors.get(number)
            if factors is not None:
                yield slice(begin, end), factors.b(factors.a(x[begin:end]))


class LayerPlace(NamedTuple):
    """Where a layer's product is computed, and which of its outputs are the layer's."""

    owner: Any  # object with the attribute that computes the product
    name: str  # of the attribute
    outputs: Tensor | None  # None: all


Adapted: TypeAlias = "tuple[LayerPlace, AdaptedProduct]"


def set_adapter(layer: NativeLayer, module: Any, number: int, places: Mapping[tuple[int, str], Adapted]) -> None:
    """Gives a native layer an adapter of its four products."""
    if layer.mlp is not None:
        return  # modules compute steps with adapters
    attention, mlp = module.self_attn, module.mlp
    shared = attention.q_proj.forward.shared
    owners = (shared, "product"), (attention.o_proj, "forward"), (mlp, "forward"), (mlp.down_proj, "forward")
    for index, (owner, name) in enumerate(owners):
        factors = places[id(owner), name][1].factors.get(number) if (id(owner), name) in places else None
        if factors is not None:
            layer.native.set_adapter(number, index, factors.a.forward.packed, factors.b.forward.packed)


class LoadedAdapters:
    """The adapters of a model on this rank, with numbers from 1. They change between steps only."""

    def __init__(
        self,
        stock: Any,
        slices: Mapping[str, WeightSlice],
        device: torch.device,
        layers: Sequence[tuple[Any, NativeLayer]],
    ) -> None:
        self._decoder = stock.get_decoder()
        self._prefix = next(name for name, module in stock.named_modules() if module is self._decoder)
        self._slices, self._dtype, self._device = slices, stock.dtype, device
        self._numbers: dict[bytes, int] = {}
        self._places: dict[tuple[int, str], Adapted] = {}
        self._layers = layers
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []
        self.errors: dict[bytes, str] = {}  # why adapters are not loaded

    @property
    def digests(self) -> list[bytes]:
        return [*self._numbers, *self.errors]

    def load(self, adapter: Adapter) -> str:
        """Loads this rank's part of an adapter. Returns why that fails: the adapter does not fit the model, or the
        files are not those that were read before; "": the adapter is loaded."""
        if adapter.digest in self._numbers:
            return ""
        self.errors.pop(adapter.digest, None)
        try:
            self._add(adapter)
        except Exception as error:  # also of safetensors, or the device has no room: the group goes on without it
            self.unload(adapter.digest)
            reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
            self.errors[adapter.digest] = reason
            event("adapter not loaded", ERROR, adapter=adapter.name, reason=reason)
        return self.errors.get(adapter.digest, "")

    def _add(self, adapter: Adapter) -> None:
        parts = self._read_parts(adapter)
        number = min(set(range(1, len(self._numbers) + 2)) - set(self._numbers.values()))
        self._numbers[adapter.digest] = number
        added: list[nn.Linear] = []
        for key, layers in parts.items():
            _, product = self._places[key]
            product.factors[number] = _together(layers, product.outputs, self._dtype, self._device)
            added += product.factors[number]
        if self._device.type == "cpu":
            pack_linears(nn.ModuleList(added))
        for module, layer in self._layers:
            set_adapter(layer, module, number, self._places)
        self._find_swaps()
        event("adapter loaded", adapter=adapter.name, products=len(parts))

    def unload(self, digest: bytes) -> None:
        """Frees an adapter that no row has, if it is there."""
        self.errors.pop(digest, None)
        number = self._numbers.pop(digest, None)
        if number is None:
            return
        for _, product in self._places.values():
            product.factors.pop(number, None)
        for _, layer in self._layers:
            layer.native.remove_adapter(number)

    def _read_parts(self, adapter: Adapter) -> dict[tuple[int, str], list[tuple[LayerPlace, Tensor, Tensor]]]:
        """Returns what this rank adds to each product. Raises ValueError and OSError."""
        parts: dict[tuple[int, str], list[tuple[LayerPlace, Tensor, Tensor]]] = {}
        tensors, low_ranks = read_adapter(adapter)
        for low_rank in low_ranks:
            place = find_place(self._decoder, low_rank.layer, adapter)
            key = id(place.owner), place.name
            if key not in self._places:
                self._places[key] = place, _adapted(place)
            cut = self._slices.get(f"{self._prefix}.{low_rank.layer}.weight")
            a, b = _own_part(self._decoder.get_submodule(low_rank.layer), tensors, low_rank, cut)
            parts.setdefault(key, []).append((place, a, b))
        return parts

    def _find_swaps(self) -> None:
        self._swaps.clear()
        for place, product in self._places.values():
            is_gated = isinstance(getattr(place.owner, place.name), GatedMlp)
            self._swaps.append((vars(place.owner), place.name, GatedMlp(product, place.owner) if is_gated else product))
        # Where modules compute, all of them do.
        self._swaps += [(vars(module), "forward", layer.stock) for module, layer in self._layers]

    def number_of(self, digest: bytes | None) -> int:
        """Returns the number of an adapter; of None: 0. Raises RuntimeError for an adapter that this rank lacks."""
        if digest is None:
            return 0
        number = self._numbers.get(digest)
        if number is None:
            raise RuntimeError(f"expected a LoRA adapter of this rank, got {digest.hex()}: nodes have different files")
        return number

    @contextlib.contextmanager
    def applied(self, runs: Sequence[AdapterRun], tokens: int) -> Iterator[None]:
        """Lets the modules of the decoder compute a step of so many tokens with their adapters."""
        before = [attributes.get(name) for attributes, name, _ in self._swaps]
        for _, product in self._places.values():
            product.runs, product.tokens = runs, tokens
        for attributes, name, replacement in self._swaps:
            attributes[name] = replacement
        try:
            yield
        finally:
            for (attributes, name, _), former in zip(self._swaps, before, strict=True):
                if former is None:  # a method of the class computes
                    del attributes[name]
                else:
                    attributes[name] = former


def load_adapters(
    stock: Any,
    adapters: Sequence[Adapter],
    slices: Mapping[str, WeightSlice],
    device: torch.device,
    layers: Sequence[tuple[Any, NativeLayer]],
) -> LoadedAdapters:
    """Loads this rank's part of the adapters of a loaded model. `LoadedAdapters.errors` names those that fail.
    `layers`: modules that native calls compute, with the calls."""
    loaded = LoadedAdapters(stock, slices, device, layers)
    for adapter in adapters:
        loaded.load(adapter)
    if device.type == "cuda":
        event("steps with adapters run modules", why="the kernels of layers, and graphs, know no adapters")
    return loaded


def read_adapter(adapter: Adapter) -> tuple[dict[str, Tensor], list[LowRank]]:
    """Returns the tensors of an adapter, and what they add to each layer."""
    directory = Path(adapter.path)
    weights = (directory / WEIGHTS).read_bytes()
    if digest_of((directory / SETTINGS).read_bytes(), weights) != adapter.digest:
        raise ValueError(
            f"the LoRA adapter {adapter.name!r} is not the one that was loaded: {directory} has other files"
        )
    tensors = load_tensors(weights)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return tensors, find_low_ranks(directory, shapes, read_settings(directory))


def find_place(decoder: nn.Module, layer: str, adapter: Adapter) -> LayerPlace:
    """Raises ValueError if the decoder has no such linear layer."""
    path, _, name = layer.rpartition(".")
    try:
        module, parent = decoder.get_submodule(layer), decoder.get_submodule(path)
    except AttributeError:
        module = parent = nn.Module()
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{adapter.path}: the model has no linear layer {layer}")
    forward = vars(module).get("forward")
    if isinstance(forward, SharedSlice):
        return LayerPlace(forward.shared, "product", torch.arange(forward.begin, forward.end))
    if isinstance(vars(parent).get("forward"), GatedMlp) and name in ("gate_proj", "up_proj"):
        panels = torch.arange(2 * module.weight.shape[0]).view(-1, 2, PANEL)
        return LayerPlace(parent, "forward", panels[:, int(name == "up_proj")].flatten())
    return LayerPlace(module, "forward", None)


def _adapted(place: LayerPlace) -> AdaptedProduct:
    product = getattr(place.owner, place.name)
    if isinstance(product, GatedMlp):
        product = product.product
    return AdaptedProduct(
        product, product.packed.outputs if isinstance(product, Product) else place.owner.weight.shape[0]
    )


def _own_part(
    layer: nn.Linear, tensors: Mapping[str, Tensor], low_rank: LowRank, cut: WeightSlice | None
) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of A, and of B times the scale: a layer has a part of its inputs, or of its outputs."""
    a, b = tensors[low_rank.a], tensors[low_rank.b].float() * low_rank.scale
    if cut is not None and cut.dimension == -1:
        a = cut.of(a, a.shape, low_rank.a)
    elif cut is not None:
        b = cut.of(b, b.shape, low_rank.b)
    if (b.shape[0], a.shape[1]) != tuple(layer.weight.shape):
        raise ValueError(f"{low_rank.layer}: expected a LoRA adapter for a weight of {tuple(layer.weight.shape)}")
    return a, b


def _together(
    layers: Sequence[tuple[LayerPlace, Tensor, Tensor]], outputs: int, dtype: torch.dtype, device: torch.device
) -> Factors:
    """Joins A and B of the layers of one product: each layer's part of B is in its own columns, and the rest is 0."""
    whole = torch.zeros(outputs, sum(len(a) for _, a, _ in layers))
    first = 0
    for place, a, b in layers:
        own = slice(None) if place.outputs is None else place.outputs
        whole[own, first : first + len(a)] = b
        first += len(a)
    joined = torch.cat([a for _, a, _ in layers])
    return Factors.of(joined.to(device, dtype), whole.to(device, dtype))
