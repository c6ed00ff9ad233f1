"""What workers use of transformers, which is imported here as if torch had neither collectives nor a compiler.

Workers shard models and join results themselves, and compile nothing. Transformers' own ways would import
`torch.distributed.tensor`, FSDP and TorchDynamo, 0.9 of 4.3 s of a worker's start. Workers hide the packages that
transformers imports where they are installed: torchvision imports more of TorchDynamo than a stand-in has.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed
from torch.overrides import TorchFunctionMode

COMPILER = "torch._dynamo"
INDEXING = f"{COMPILER}._trace_wrapped_higher_order_op"
HIDDEN = (
    *("accelerate", "deepspeed", "hqq", "kernels", "librosa", "peft", "scipy", "sklearn", "soundfile", "soxr", "timm"),
    *("torch_npu", "torchao", "torchaudio", "torchvision"),
)
# Functions and methods by which stock modules fill new parameters: those of torch, and of transformers in their place.
DRAWS = {f"{way}{draw}_" for way in ("", "kaiming_", "xavier_") for draw in ("normal", "uniform")} | {"trunc_normal_"}
CREATED = {torch.arange, torch.rand, torch.randn}  # new tensors with values: on the meta device much work in Python
IS_FIRST = "transformers" not in sys.modules  # else transformers imports the packages that it has found


class Unmarked(ModuleType):
    """Stands in for TorchDynamo: its decorators, which mark functions for `torch.compile`, return them as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda function=None, *_, **__: (lambda marked: marked) if function is None else function


class Indexing(ModuleType):
    @staticmethod
    def TransformGetItemToIndex() -> Any:  # a class, which masks of some families use when they run
        module = importlib.import_module(INDEXING)
        if isinstance(module, Indexing):
            raise RuntimeError("a model ran in one thread while another thread imported a model")
        return module.TransformGetItemToIndex()


class WithoutDraws(TorchFunctionMode):
    """Leaves parameters on the meta device as they are. The first draw there would import sympy and the reference
    operators of torch, 0.6 s of a worker's start. `has_values`: ranges are on the CPU, for the same reason. A family
    that joins a range to tensors of the default device raises RuntimeError then."""

    def __init__(self, has_values: bool) -> None:
        super().__init__()
        self._has_values = has_values

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in DRAWS and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        is_created = self._has_values and function in CREATED and "device" not in kwargs
        if is_created and torch.get_default_device().type == "meta":
            values = function(*args, **kwargs, device="cpu")
            return values if function is torch.arange else torch.empty_like(values, device="meta")
        return function(*args, **kwargs)


_stand_ins = threading.RLock()  # one thread at a time has them in sys.modules


@contextlib.contextmanager
def without_compiler(has_values: bool = True) -> Iterator[None]:
    """Keeps imports, and operations on the meta device, from importing TorchDynamo, sympy and the packages in HIDDEN.
    No model may run meanwhile, and modules that are imported here cannot be compiled later, as their marks are lost.
    Does nothing in a process that imported transformers before this module, but for `WithoutDraws(has_values)`."""
    with _stand_ins:
        stand_ins: dict[str, Any] = {INDEXING: Indexing(INDEXING), COMPILER: Unmarked(COMPILER)}
        if COMPILER in sys.modules or not IS_FIRST:
            stand_ins = {}
        if IS_FIRST:
            stand_ins |= {name: None for name in HIDDEN if name not in sys.modules}  # None: Python finds no package
        sys.modules.update(stand_ins)
        try:
            with WithoutDraws(has_values):
                yield
        finally:
            for name, stand_in in stand_ins.items():  # INDEXING first: the real package must not find it
                if sys.modules.get(name, ...) is stand_in:  # else TorchDynamo was imported meanwhile
                    del sys.modules[name]


def build_on_meta(build: Callable[[], Any]) -> Any:
    """Returns the model that `build` makes, without memory for parameters."""
    with contextlib.suppress(RuntimeError), torch.device("meta"), without_compiler():
        return build()
    with torch.device("meta"), without_compiler(has_values=False):  # as for `proportional` rotary frequencies
        return build()


@contextlib.contextmanager
def without_second_scan() -> Iterator[None]:
    """Keeps the package `transformers.models` from reading all modules of all families, as `transformers` has just
    done. The package offers no names of its own then, and its modules are imported as before."""
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    define = utils.define_import_structure

    def define_unless_known(path: str, prefix: str | None = None) -> Any:
        return {frozenset(): {}} if Path(path).parent.name == "models" else define(path, prefix)

    utils.define_import_structure = define_unless_known
    try:
        yield
    finally:
        utils.define_import_structure = define


_is_available = torch.distributed.is_available
torch.distributed.is_available = lambda: False
try:
    with without_compiler(), without_second_scan():
        import transformers.masking_utils  # noqa: F401  # the module of each family imports it
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            MODEL_MAPPING,
            AttentionInterface,
            AutoConfig,
            AutoModel,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForSequenceClassification,
            vision_utils,
        )
        from transformers.activations import SiLUActivation
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            Concatenate,
            MergeModulelist,
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
finally:
    torch.distributed.is_available = _is_available

__all__ = [
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_MAPPING",
    "ROPE_INIT_FUNCTIONS",
    "AttentionInterface",
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "Concatenate",
    "MergeModulelist",
    "SiLUActivation",
    "WeightConverter",
    "WeightRenaming",
    "build_on_meta",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "rename_source_key",
    "vision_utils",
    "without_compiler",
]
