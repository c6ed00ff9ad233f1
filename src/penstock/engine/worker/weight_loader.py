"""Loads parameters from a directory of safetensors: each rank reads its slices, and nothing else.

Transformers maps the names of tensors in a checkpoint to parameters, and merges several tensors into one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from penstock.engine.cluster.weight_files import read_weights
from penstock.engine.worker.mxfp4 import BLOCKS, SCALES, read_experts
from penstock.engine.worker.stock import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)
from penstock.engine.worker.weight_slices import FIRST_ONLY, WeightSlice


class WeightFiles:
    """The tensors of a directory, by name, read on demand. Raises ValueError as `read_weights` does."""

    def __init__(self, path: Path) -> None:
        headers, self._file_of = read_weights(path)
        self._files = {header.path.name: self._open(header.path) for header in headers}
        self.names = sorted(self._file_of, key=dot_natural_key)

    @staticmethod
    def _open(path: Path) -> Any:
        return safe_open(path, framework="pt")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def open(self, name: str) -> Any:
        """Returns a slice of safetensors, which is read by an index."""
        return self._files[self._file_of[name]].get_slice(name)

    def read(self, name: str, part: WeightSlice | None) -> Tensor:
        source = self.open(name)
        whole: Tensor = source[...] if part is None else part.of(source, source.get_shape(), name)
        return whole


def load(
    model: Any,
    path: Path,
    slices: dict[str, WeightSlice],
    device: torch.device,
    mapped: Mapping[str, Tensor] | None = None,
    packed: Collection[str] = (),
) -> set[str]:
    """Loads the parameters of a model on the meta device, in the model's dtypes. Tensors of `mapped` replace those of
    the files, and parameters of `packed` are not loaded. Returns the names of parameters that are no views of a file.

    Raises ValueError if a parameter is missing from the files, or has another shape.
    """
    files = WeightFiles(path)
    parameters = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    buffers = dict(model.named_buffers(remove_duplicate=False))
    put(model, mapped or {})
    missing = {name: tensor for name, tensor in parameters.items() if name not in {*(mapped or ()), *packed}}
    converted = set()
    for name, tensor, is_view in _converted(model, files, parameters, missing, slices, device):
        _put(model, name, tensor, parameters, device)
        if name not in buffers and not (is_view and tensor.dtype == parameters[name].dtype):
            converted.add(name)
        missing.pop(name, None)
    for name, source in model.all_tied_weights_keys.items():
        if name in missing:
            _put(model, name, _tied(model, name, source, slices), parameters, device)
            if source in converted or slices.get(name) != slices.get(source):
                converted.add(name)
            del missing[name]
    if missing:
        some = ", ".join(list(missing)[:4])
        raise ValueError(f"{path}: {len(missing)} parameters of {type(model).__name__} are not there: {some}")
    return converted


def put(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Sets parameters of a model. Raises ValueError if one has another shape."""
    parameters = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        _put(model, name, tensor, parameters, tensor.device)


def _converted(
    model: Any,
    files: WeightFiles,
    parameters: dict[str, Tensor],
    missing: Collection[str],
    slices: dict[str, WeightSlice],
    device: torch.device,
) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields each missing parameter in the files, under the model's name, and whether the tensor is a view of one."""
    known = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in known if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in known if isinstance(conversion, WeightConverter)]
    merged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in files.names:
        stem = key.removesuffix(BLOCKS)
        is_mxfp4 = key.endswith(BLOCKS) and stem + SCALES in files
        source = stem if is_mxfp4 else key
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, parameters)
        if name not in parameters and source in parameters:
            name, pattern = source, None
        if name not in missing:
            continue  # a tensor that this model class does not have, or has in memory
        if pattern is None:
            part = slices.get(name)
            if is_mxfp4:
                packed = files.open(key), files.open(stem + SCALES)
                yield name, read_experts(name, *packed, part, parameters[name].dtype, device), False
            elif part is FIRST_ONLY:
                yield name, torch.zeros_like(parameters[name], device="cpu"), False
            else:
                yield name, files.read(key, part), part is None
        else:
            merged[name][pattern].append(key)
    for name, keys in merged.items():
        first = next(iter(keys))
        converter = copy.deepcopy(next(conversion for conversion in converters if first in conversion.source_patterns))
        merging = _merged(model, files, name, keys, converter, slices)
        yield from ((target, tensor, False) for target, tensor in merging if target in missing)


def _merged(
    model: Any,
    files: WeightFiles,
    name: str,
    keys: dict[str, list[str]],
    converter: Any,
    slices: dict[str, WeightSlice],
) -> Iterator[tuple[str, Tensor]]:
    """Yields a parameter that the files have in pieces (experts, most often), each of them sharded as the whole is."""
    part = slices.get(name)
    only_put_together = all(isinstance(operation, (MergeModulelist, Concatenate)) for operation in converter.operations)
    cut_first = part is not None and only_put_together and len(part.ranges) in (1, len(converter.source_patterns))
    own = part.first() if part is not None and cut_first else None
    for pattern, sources in keys.items():
        converter.collected_tensors[pattern] = [files.read(key, own) for key in sources]
    for target, tensor in converter.convert(name, model=model, config=model.config).items():
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        cut = slices.get(target)
        yield target, tensor if cut is None or cut_first else cut.of(tensor, tensor.shape, target)


def _tied(model: Any, name: str, source: str, slices: dict[str, WeightSlice]) -> Tensor:
    """Returns a parameter that shares another one's values (tied weights), or its slice of them."""
    tensor: Tensor = model.get_parameter(source)
    own_slice, source_slice = slices.get(name), slices.get(source)
    if own_slice == source_slice:
        return tensor
    if own_slice is None or source_slice is not None:
        raise ValueError(f"{name} is the same as {source}, and the plan cuts them differently")
    return own_slice.of(tensor, tensor.shape, name)


def _put(model: nn.Module, name: str, tensor: Tensor, parameters: dict[str, Tensor], device: torch.device) -> None:
    empty = parameters[name]
    if tensor.shape != empty.shape:
        raise ValueError(f"{name}: expected a shape of {tuple(empty.shape)}, got {tuple(tensor.shape)}")
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = tensor.to(device=device, dtype=empty.dtype)
    is_buffer = own in dict(module.named_buffers(recurse=False))
    setattr(module, own, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


def rebuild_buffers(model: Any, device: torch.device) -> None:
    """Computes buffers that are in no file and that the meta device left empty, such as rotary frequencies.

    Call it before `load`, as it sets parameters, too. Raises ValueError if the model does not initialize a buffer.
    """
    buffers = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        if buffer.device.type != device.type:
            owner, _, own = name.rpartition(".")
            empty = torch.full_like(buffer, _NEVER.get(buffer.dtype, float("nan")), device=device)
            setattr(model.get_submodule(owner), own, empty)
            buffers.append((name, empty))
    model.initialize_weights()
    for name, _ in buffers:
        buffer = model.get_buffer(name)
        never = _NEVER.get(buffer.dtype)
        if bool(buffer.isnan().any() if never is None else (buffer == never).any()):
            raise ValueError(f"{name}: {type(model).__name__} does not say how it is computed")


_NEVER: dict[torch.dtype, int | bool] = {torch.int64: -(1 << 62), torch.int32: -(1 << 30)}  # of others: not a number
