"""Models on several ranks: which slice of each parameter a rank has, and where the ranks add up what they have.

The model's own plan says which layers are cut, and how. Every tensor is a plain one: a layer that is cut is the same
layer, only narrower. Leaves to `weights` to read the slices.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn


class Ranks:
    """The processes that share a model. With one alone, nothing is said to anybody."""

    def __init__(self, rank: int = 0, size: int = 1, meeting: str = "", device: str = "cpu") -> None:
        """Blocks until all have come. `meeting` is where: `tcp://127.0.0.1:PORT`, or `file://PATH`.

        `device` is this rank's own; "cuda" is that of its number.
        """
        self.rank = rank
        self.size = size
        if device.startswith("cuda"):
            torch.cuda.set_device(rank if device == "cuda" else torch.device(device).index)
        if size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or it asks what this machine is called, and believes it
            torch.distributed.init_process_group(
                "nccl" if device.startswith("cuda") else "gloo",
                init_method=meeting,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(minutes=5),
            )

    def close(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of what all ranks have, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """What all ranks have, side by side in the last dimension."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def from_first(self, tensor: Tensor) -> Tensor:
        """What rank 0 has, in place."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, 0)
        return tensor

    def least(self, number: int) -> int:
        if self.size == 1:
            return number
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(number, device=device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        return int(tensor)


class Slice(NamedTuple):
    """A rank's part of a parameter, in one dimension, counted from the last."""

    dimension: int
    rank: int
    size: int  # how many ranks there are
    parts: int = 1  # that stand one after the other in this dimension, each to be cut
    is_padded: bool = False  # with zeros, so that all ranks have as much

    def ranges(self, length: int) -> list[tuple[int, int]]:
        """From where to where, of a dimension that long."""
        part = length // self.parts
        each = -(-part // self.size) if self.is_padded else part // self.size
        begins = [number * part + self.rank * each for number in range(self.parts)]
        return [(min(begin, length), min(begin + each, length)) for begin in begins]

    def shape(self, whole: torch.Size, name: str) -> list[int]:
        length = whole[self.dimension]
        if length % (self.parts * self.size) and not self.is_padded:
            raise ValueError(f"{name}: {length} cannot be cut for {self.size} ranks: use fewer")
        cut = list(whole)
        cut[self.dimension] = -(-length // self.size)
        return cut

    def of(self, source: Any, shape: list[int]) -> Tensor:
        """The part, of a tensor, or of one in a file, of that shape."""
        before = (slice(None),) * (len(shape) + self.dimension)
        ranges = self.ranges(shape[self.dimension])
        pieces = [source[(*before, slice(begin, end))] for begin, end in ranges]
        piece: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dimension)
        missing = -(-shape[self.dimension] // self.size) - piece.shape[self.dimension]
        if self.is_padded and missing:
            piece = F.pad(piece, [0, 0] * (-self.dimension - 1) + [0, missing])
        return piece


FIRST_ONLY = Slice(-1, 0, 0)  # the bias of a sum: one rank adds it, the others add zeros


def shard(model: nn.Module, plan: dict[str, str], ranks: Ranks) -> dict[str, Slice]:
    """Cuts a model that is on the meta device. Returns the slice of each parameter that has one.

    Raises ValueError where the plan has a style that is not known here, or something cannot be cut evenly.
    """
    slices: dict[str, Slice] = {}
    if ranks.size == 1:
        return slices
    modules = dict(model.named_modules())
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    styles = {re.sub(r"\.\d+(?=\.|$)", ".*", name): name for name in names}
    for pattern, style in plan.items():
        if pattern in styles and style not in STYLES:
            raise ValueError(
                f"{pattern}: the plan of {type(model).__name__} wants {style!r}; known are {', '.join(sorted(STYLES))}"
            )
    for name in names:
        wanted = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if wanted is not None:
            STYLES[wanted](_Cut(model, modules, ranks, slices), name)
    return slices


class _Cut(NamedTuple):
    """One cut, as the styles make it."""

    model: nn.Module
    modules: dict[str, nn.Module]
    ranks: Ranks
    slices: dict[str, Slice]

    def parameter(self, name: str, dimension: int, parts: int = 1, is_padded: bool = False) -> None:
        owner, _, own = name.rpartition(".")
        module = self.modules[owner]
        whole = module._parameters.get(own)
        if whole is not None:
            cut = Slice(dimension, self.ranks.rank, self.ranks.size, parts, is_padded)
            module._parameters[own] = nn.Parameter(whole.new_empty(cut.shape(whole.shape, name)), requires_grad=False)
            self.slices[name] = cut

    def after(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self.modules[name].register_forward_hook(lambda _module, _inputs, outcome: change(outcome))

    def add_up_after(self, name: str) -> None:
        self.after(name, self.ranks.add_up)


def _colwise(cut: _Cut, name: str, parts: int = 1, is_padded: bool = False) -> None:
    if name not in cut.modules:  # a parameter: the outputs are its last dimension but one
        cut.parameter(name, -2, parts)
        return
    cut.parameter(f"{name}.weight", -2, parts, is_padded)
    cut.parameter(f"{name}.bias", -1, parts, is_padded)


def _packed_colwise(cut: _Cut, name: str) -> None:
    _colwise(cut, name, parts=2)


def _colwise_gather_output(cut: _Cut, name: str) -> None:
    module: Any = cut.modules[name]
    whole = module.out_features
    _colwise(cut, name, is_padded=True)
    cut.after(name, lambda outcome: cut.ranks.gather(outcome)[..., :whole])


def _rowwise(cut: _Cut, name: str) -> None:
    if name not in cut.modules:  # a parameter: whose module it is adds up
        cut.parameter(name, -1)
        return
    cut.parameter(f"{name}.weight", -1)
    if cut.modules[name]._parameters.get("bias") is not None and cut.ranks.rank > 0:
        cut.slices[f"{name}.bias"] = FIRST_ONLY
    cut.add_up_after(name)


def _rowwise_split_input(cut: _Cut, name: str) -> None:
    _rowwise(cut, name)

    def split(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].chunk(cut.ranks.size, dim=-1)[cut.ranks.rank], *inputs[1:])

    cut.modules[name].register_forward_pre_hook(split)


def _embedding_rowwise(cut: _Cut, name: str) -> None:
    """Each rank knows some of the ids, and has zeros for the others."""
    cut.parameter(f"{name}.weight", -2, is_padded=True)
    embedding: Any = cut.modules[name]
    each = embedding.weight.shape[0]
    embedding.padding_idx = None  # for who trains; it may be another rank's
    look_up = embedding.forward

    def forward(ids: Tensor) -> Tensor:
        here = ids - cut.ranks.rank * each
        elsewhere = (here < 0) | (here >= each)
        found = look_up(here.clamp(0, each - 1))
        return cut.ranks.add_up(found.masked_fill(elsewhere[..., None], 0))

    embedding.forward = forward


def _add_up(cut: _Cut, name: str) -> None:
    cut.add_up_after(name)


def _whole(_: _Cut, __: str) -> None:
    """Every rank has all of it."""


STYLES: dict[str, Callable[[_Cut, str], None]] = {
    "colwise": _colwise,
    "packed_colwise": _packed_colwise,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_rep": _colwise_gather_output,
    "rowwise": _rowwise,
    "rowwise_rep": _rowwise_split_input,
    "rowwise_split_input": _rowwise_split_input,
    "embedding_rowwise": _embedding_rowwise,
    "moe_tp_experts": _add_up,
    "all_reduce": _add_up,
    "replicate": _whole,
    "replicated_with_grad_allreduce": _whole,
}
