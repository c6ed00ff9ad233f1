"""Tensor parallelism: shards a model over ranks by its own plan, and adds the all-reduces.

The plan of transformers says which layers are sharded, and how. Every tensor is a plain one: a sharded layer is the
same layer, only narrower. `weight_slices` computes where slices begin and end, and `weight_loader` reads them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed
from torch import Tensor, nn

from penstock.engine import _native
from penstock.engine.cluster.cuda_devices import numbers_of, uuid_digits
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.rendezvous import Rendezvous
from penstock.engine.worker.weight_slices import FIRST_ONLY, HeadSlices, WeightSlice, share, within

ALIGNED = 8  # columns, or rows: the arithmetic of some devices and of experts wants 16 bytes, of two-byte numbers
SUMMED_DTYPES = (torch.float32, torch.bfloat16)  # of tensors that ranks add up in shared memory
MAX_SENT_NBYTES = 64 << 10  # of tensors that all ranks write to shared memory though one is sent
JOIN_TIMEOUT = datetime.timedelta(minutes=5)  # of a rank, and of each collective operation
KEYS = ("k_proj", "v_proj")  # layers with heads as outputs
QUERIES = ("q_proj", "o_proj", "sinks")  # the second one: as inputs; sinks are a parameter with a number for each head
# Plans of ours, for families that transformers does not shard, by the names in the decoder.
PLANS = {
    "gpt_oss": {
        **dict.fromkeys((f"layers.*.self_attn.{layer}_proj" for layer in "qkv"), "colwise"),
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "last_dimension",
        **dict.fromkeys((f"layers.*.mlp.experts.gate_up_proj{bias}" for bias in ("", "_bias")), "interleaved"),
        "layers.*.mlp.experts.down_proj": "colwise",  # its inputs are the last dimension but one
        "layers.*.mlp.experts.down_proj_bias": "first_only",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
}


class TPGroup:
    """The ranks that share a model. With one rank, its methods send nothing."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        rendezvous: Rendezvous | None = None,
        device: str = "cpu",
        collectives: str = "auto",
    ) -> None:
        """Blocks until all ranks have joined.

        `rendezvous`: where ranks meet; None: a rank alone. `device`: of the rank, with a number or a UUID.
        `collectives`: see `EngineConfig`. Numbers of the host always go by gloo: no agreement waits for a CUDA device.
        Raises ValueError if the device does not exist.
        """
        self.rank = rank
        self.size = size
        self.summed: WeakSet[nn.Module] = WeakSet()  # modules with results that all ranks add up
        self.gathered: WeakSet[nn.Module] = WeakSet()  # modules of which each rank has some columns of the result
        self.memory: _native.RankMemory | None = None  # that all ranks of a machine share
        self._pidfds: list[int] = []
        self._is_alone = False
        is_cuda = device.startswith("cuda")
        self._uses_host = is_cuda and collectives == "gloo"  # gloo takes tensors of the host
        if is_cuda:
            torch.cuda.set_device(device_index(device.partition(":")[2] or str(rank)))
        if size > 1:
            if rendezvous is None:
                raise ValueError(f"expected a rendezvous for {size} ranks, got none")
            if (interface := rendezvous.interface) is not None:  # else gloo asks what this machine is called
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda and not self._uses_host else "gloo",
                store=_store(rank, rendezvous),
                rank=rank,
                world_size=size,
                timeout=JOIN_TIMEOUT,
            )
            if not is_cuda:
                self._share_memory()

    def close(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self.memory, self._pidfds = None, []

    def _share_memory(self) -> None:
        """Maps memory of rank 0 in all ranks. Blocks until all ranks have called."""
        nbytes = _native.rank_memory_nbytes(self.size)
        token, file = secrets.randbits(62), None
        if self.rank == 0:
            file = os.memfd_create(f"ranks-{token}", os.MFD_CLOEXEC)
            os.ftruncate(file, nbytes)
        own = torch.tensor([os.getpid(), token, file or 0])
        all_ranks = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(all_ranks, own)
        owner, token, number = all_ranks[0].tolist()
        if self.rank:  # the path names another file, or none, where rank 0 is on another machine
            path = f"/proc/{owner}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:ranks-{token}"):
                    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if self.least(int(file is not None)):
            assert file is not None, "all ranks have it"
            pids = [int(each[0]) for each in all_ranks]
            self._pidfds = [os.pidfd_open(pid) for pid in pids]
            self.memory = _native.RankMemory(_native.map_file(file, nbytes, True), self.rank, self.size, self._pidfds)
        event("ranks add up", by="gloo" if self.memory is None else "shared memory")
        if file is not None:
            os.close(file)

    def sums_in_memory(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the results of modules are those of one rank, or of ranks that share memory and add up each."""
        return self.size == 1 or (self.memory is not None and all(module in self.summed for module in modules))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, tensors of other ranks are neither sent nor received. Operations allocate what they would otherwise,
        and their results mean nothing."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Adds up the tensors of all ranks, in place."""
        if self.memory is not None and tensor.dtype in SUMMED_DTYPES and tensor.is_contiguous():
            self.memory.sum(tensor.data_ptr(), tensor.numel(), tensor.dtype == torch.bfloat16)
            return tensor
        return self._in_place(tensor, torch.distributed.all_reduce)

    def gather(self, tensor: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Returns the first `width` columns of the tensors of all ranks, concatenated in the last dimension. `out`:
        memory for the result, if the caller has some."""
        own = tensor.cpu() if self._uses_host else tensor.contiguous()
        if self.memory is not None:
            return gather_in_memory(self.memory, own, self.size).flatten(-2)[..., :width]
        parts = own.new_empty((self.size * own.shape[0], *own.shape[1:]))
        if not self._is_alone:
            torch.distributed.all_gather_into_tensor(parts, own)
        firsts = range(0, self.size * own.shape[-1], own.shape[-1])
        by_rank = zip(parts.to(tensor.device).chunk(self.size), firsts, strict=True)
        return torch.cat([part[..., : max(0, width - first)] for part, first in by_rank], dim=-1, out=out)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copies the tensor of rank `source` to all ranks, in place."""
        if self.memory is not None and tensor.is_contiguous() and tensor.nbytes <= MAX_SENT_NBYTES:
            return tensor.copy_(gather_in_memory(self.memory, tensor.view(-1), self.size)[source].view(tensor.shape))
        return self._in_place(tensor, lambda shared: torch.distributed.broadcast(shared, source))

    def _in_place(self, tensor: Tensor, operate: Callable[[Tensor], object]) -> Tensor:
        if self.size == 1 or self._is_alone:
            return tensor
        shared = tensor.cpu() if self._uses_host else tensor
        operate(shared)
        return tensor.copy_(shared) if self._uses_host else tensor

    def least(self, number: int) -> int:
        return self.least_of_each([number])[0]

    def least_of_each(self, numbers: list[int]) -> list[int]:
        """Returns the least of each number on all ranks. Each rank has as many."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        least: list[int] = tensor.tolist()
        return least


def gather_in_memory(memory: _native.RankMemory, own: Tensor, size: int) -> Tensor:
    """Returns the rows [..., width] of all ranks, as [..., ranks, width]."""
    width = own.shape[-1]
    rows = own.numel() // max(1, width)
    out = own.new_empty(*own.shape[:-1], size, width)
    memory.gather(own.data_ptr(), rows, width * own.itemsize, out.data_ptr())
    return out


def device_index(name: str) -> int:
    """Returns the number of a CUDA device of this process, by its number or UUID. Raises ValueError."""
    count = torch.cuda.device_count()
    if name.isdecimal():
        if int(name) < count:
            return int(name)
    else:
        uuids = [uuid_digits(str(torch.cuda.get_device_properties(number).uuid)) for number in range(count)]
        matches = numbers_of(name, uuids)
        if len(matches) == 1:
            return matches[0]
    raise ValueError(f"expected a CUDA device, got {name}: this process has {count}; see nvidia-smi -L, and --devices")


def _store(rank: int, rendezvous: Rendezvous) -> Any:
    """Connects to the store that rank 0 serves on the socket of the rendezvous."""
    listener = rendezvous.listener
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]  # documented, and not in `__all__`
        rendezvous.host,
        rendezvous.port,
        is_master=rank == 0,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def shard(model: nn.Module, plan: dict[str, str], ranks: TPGroup, heads: HeadSlices) -> dict[str, WeightSlice]:
    """Shards a model on the meta device. Returns the slice of each sharded parameter.

    Raises ValueError if the plan has an unknown style, or there are too few heads.
    """
    heads.require(ranks.size)
    slices: dict[str, WeightSlice] = {}
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
        layer_style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if layer_style is not None:
            STYLES[layer_style](_Sharding(model, modules, ranks, heads, slices), name)
    return slices


def outputs_are_summed(model: nn.Module, slices: Mapping[str, WeightSlice]) -> bool:
    """Returns whether all ranks add up the output of the attention of each layer."""
    outputs = [name for name, _ in model.named_modules() if name.endswith(f"self_attn.{QUERIES[1]}")]
    return bool(outputs) and all(f"{name}.weight" in slices for name in outputs)


class _Sharding(NamedTuple):
    """The sharding of one model: the styles call its methods, and it collects the slices."""

    model: nn.Module
    modules: dict[str, nn.Module]
    ranks: TPGroup
    heads: HeadSlices
    slices: dict[str, WeightSlice]

    def parameter(self, name: str, dimension: int, parts: int = 1, unit: int = ALIGNED) -> None:
        """Shards a parameter in one dimension, which has `parts` equal parts, each of them sharded in whole units."""
        owner, _, own = name.rpartition(".")
        module = self.modules[owner]
        whole = getattr(module, own)
        if whole is not None:
            layer = owner.rpartition(".")[2] if own in ("weight", "bias") else own
            cut = self._slice(layer, dimension, whole.shape[dimension], parts, unit)
            setattr(module, own, nn.Parameter(whole.new_empty(cut.shape(whole.shape)), requires_grad=False))
            self.slices[name] = cut

    def _slice(self, layer: str, dimension: int, length: int, parts: int, unit: int) -> WeightSlice:
        rank, size = self.ranks.rank, self.ranks.size
        if layer in KEYS:
            return self.heads.of_keys(dimension, length, rank, size)
        if layer in QUERIES:
            return self.heads.of_queries(dimension, length, rank, size)
        part = length // parts
        begin, width = share(part, rank, size, unit)
        begin, end = within(begin, width, part)
        ranges = tuple((number * part + begin, number * part + end) for number in range(parts))
        return WeightSlice(dimension, length, ranges, width)

    def after(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self.modules[name].register_forward_hook(lambda _module, _inputs, outcome: change(outcome))

    def add_up_after(self, name: str) -> None:
        self.ranks.summed.add(self.modules[name])
        self.after(name, self.ranks.all_reduce)


def _colwise(cut: _Sharding, name: str, parts: int = 1) -> None:
    if name not in cut.modules:  # a parameter: the outputs are its last dimension but one
        cut.parameter(name, -2, parts)
        return
    cut.parameter(f"{name}.weight", -2, parts)
    cut.parameter(f"{name}.bias", -1, parts)


def _packed_colwise(cut: _Sharding, name: str) -> None:
    _colwise(cut, name, parts=2)


def _last_dimension(cut: _Sharding, name: str) -> None:
    cut.parameter(name, -1)


def _interleaved(cut: _Sharding, name: str) -> None:
    """Shards outputs that are gates and up projections in turns, aligned as the inputs of the next layer."""
    cut.parameter(name, -1, unit=2 * ALIGNED)


def _first_only(cut: _Sharding, name: str) -> None:
    if cut.ranks.rank > 0:
        cut.slices[name] = FIRST_ONLY


def _colwise_gather_output(cut: _Sharding, name: str) -> None:
    module: Any = cut.modules[name]
    whole = module.out_features
    _colwise(cut, name)
    cut.ranks.gathered.add(module)
    cut.after(name, lambda outcome: cut.ranks.gather(outcome, whole))


def _rowwise(cut: _Sharding, name: str) -> None:
    if name not in cut.modules:  # a parameter: its module adds up
        _last_dimension(cut, name)
        return
    cut.parameter(f"{name}.weight", -1)
    if getattr(cut.modules[name], "bias", None) is not None:
        _first_only(cut, f"{name}.bias")
    cut.add_up_after(name)


def _rowwise_split_input(cut: _Sharding, name: str) -> None:
    _rowwise(cut, name)
    cut.ranks.summed.discard(cut.modules[name])  # native layers do not split inputs
    part = cut.slices[f"{name}.weight"]

    def split(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (part.of(inputs[0], inputs[0].shape, name), *inputs[1:])

    cut.modules[name].register_forward_pre_hook(split)


def _embedding_rowwise(cut: _Sharding, name: str) -> None:
    """Shards an embedding by ids: each rank has the vectors of some ids, and adds zeros for the others."""
    cut.parameter(f"{name}.weight", -2)
    embedding: Any = cut.modules[name]
    each = embedding.weight.shape[0]
    embedding.padding_idx = None  # for training only; it may be another rank's
    look_up = embedding.forward

    def forward(ids: Tensor) -> Tensor:
        here = ids - cut.ranks.rank * each
        elsewhere = (here < 0) | (here >= each)
        embedded = look_up(here.clamp(0, each - 1))
        return cut.ranks.all_reduce(embedded.masked_fill(elsewhere[..., None], 0))

    embedding.forward = forward


def _add_up(cut: _Sharding, name: str) -> None:
    cut.add_up_after(name)


def _whole(_: _Sharding, __: str) -> None:
    """Leaves a layer whole on every rank."""


STYLES: dict[str, Callable[[_Sharding, str], None]] = {
    "colwise": _colwise,
    "packed_colwise": _packed_colwise,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_rep": _colwise_gather_output,
    "rowwise": _rowwise,
    "rowwise_rep": _rowwise_split_input,
    "rowwise_split_input": _rowwise_split_input,
    "embedding_rowwise": _embedding_rowwise,
    "last_dimension": _last_dimension,
    "interleaved": _interleaved,
    "first_only": _first_only,
    "moe_tp_experts": _add_up,
    "all_reduce": _add_up,
    "replicate": _whole,
    "replicated_with_grad_allreduce": _whole,
}
