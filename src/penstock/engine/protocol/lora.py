"""Options of LoRA adapters, and the adapters of an engine."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from penstock.engine.protocol.option import Option, check_options

MAX_RANK = 512
MAX_ADAPTERS = 1024


class Adapter(NamedTuple):
    """A LoRA adapter of the model."""

    name: str  # by which clients call the adapter
    path: str  # of the directory
    digest: bytes  # of the content; b"": the files have not been read


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The LoRA adapters of an engine."""

    enable_lora: Annotated[bool, Option("lora")] = False
    """Serve the LoRA adapters of --lora-modules beside the model"""
    lora_modules: Annotated[tuple[str, ...], Option("lora", metavar="NAME=DIR", nargs="+", if_absent="none")] = ()
    """LoRA adapters in PEFT's format: for each a name by which clients call it, and its directory"""
    max_lora_rank: Annotated[int, Option("lora", ge=1, le=MAX_RANK)] = 16
    """Maximum rank of an adapter"""
    max_loras: Annotated[int | None, Option("lora", ge=1, le=MAX_ADAPTERS, if_absent="no limit")] = None
    """Maximum number of different adapters in a batch; requests for further adapters wait"""
    digests: tuple[bytes, ...] = ()
    """Hash of each adapter's content, which `with_model_defaults` computes"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.lora_modules and not self.enable_lora:
            raise ValueError("lora_modules need enable_lora (--enable-lora)")
        if len(self.lora_modules) > MAX_ADAPTERS:
            raise ValueError(f"expected at most {MAX_ADAPTERS} lora_modules, got {len(self.lora_modules)}")
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                raise ValueError(f"expected lora_modules as in NAME=DIR, got {module!r}")
        names = [adapter.name for adapter in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"expected each name once in lora_modules, got {twice!r} twice")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        digests = self.digests or (b"",) * len(self.lora_modules)
        parts = (module.partition("=") for module in self.lora_modules)
        return tuple(Adapter(name, path, digest) for (name, _, path), digest in zip(parts, digests, strict=True))
