"""Rotary frequencies by each row's own length, where a stock model chooses them by the longest row of a call.

With `longrope`, transformers has one set of frequencies for calls of up to `original_max_position_embeddings` tokens,
and another for longer ones. There, a prompt is one call, and each token of an answer another: the prompt's length
decides for all tokens of the prompt, and the position of a token of the answer for that token. A step of this engine
has tokens of many requests: tokens with long frequencies are marked by an inverted position, which is below 0.
`dynamic` changes frequencies only beyond `max_position_embeddings`, and no request is longer than that.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.protocol.columns import Index
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.stock import ROPE_INIT_FUNCTIONS

LONG = "longrope"


def by_row(decoder: nn.Module, config: Any) -> int | None:
    """Replaces the rotary embeddings of a text decoder. Returns the most tokens of a prompt with short frequencies;
    None: all prompts have them.

    `config` is the text config. Raises ValueError if layers change to long frequencies at different lengths.
    """
    limits: set[int] = set()
    rotaries = [(name, module) for name, module in decoder.named_modules() if hasattr(module, "rope_type")]
    for name, rotary in rotaries:
        types = _types(rotary)
        kinds = [kind for kind, type_ in types.items() if type_ == LONG]
        if kinds:
            limits.update(_parameters(config, kind)["original_max_position_embeddings"] for kind in kinds)
            owner, _, own = name.rpartition(".")
            setattr(decoder.get_submodule(owner), own, _ByRow(rotary, config, kinds))
        _set_types(rotary, {kind: "default" if _depends_on_call(name) else name for kind, name in types.items()})
    if len(limits) > 1:
        raise ValueError(f"longrope with several original_max_position_embeddings ({sorted(limits)}) is not supported")
    return min(limits, default=None)


def kinds_of(rotary: Any) -> list[str | None]:
    """Returns the kinds of layers for which a rotary embedding has frequencies of their own; None: all layers."""
    rotary = rotary.short if isinstance(rotary, _ByRow) else rotary
    return list(_types(rotary)) if hasattr(rotary, "rope_type") else [None]


def options_of(kind: str | None) -> dict[str, str]:
    """Returns the options with which a rotary embedding is called for layers of a kind."""
    return {} if kind is None else {"layer_type": kind}


def mark_long(positions: Index, input_batch: InputBatch, prompt_lengths: Index, max_short_prompt: int) -> Index:
    """Returns positions [tokens], inverted for tokens with long frequencies. `prompt_lengths`: of the batch's rows."""
    lengths = np.repeat(prompt_lengths, input_batch.counts)
    return np.where(np.maximum(lengths, positions + 1) > max_short_prompt, ~positions, positions)


class _ByRow(nn.Module):
    """A rotary embedding with both sets of frequencies, which chooses one for each token."""

    def __init__(self, rotary: Any, config: Any, kinds: list[str | None]) -> None:
        super().__init__()
        _set_types(rotary, dict.fromkeys(_types(rotary), "default"))
        self.short, self.long = rotary, copy.deepcopy(rotary)
        self._kinds = kinds
        for kind in kinds:
            name = "inv_freq" if kind is None else f"{kind}_inv_freq"
            short: Tensor = getattr(rotary, name)
            length = _parameters(config, kind)["original_max_position_embeddings"] + 1
            long, _ = ROPE_INIT_FUNCTIONS[LONG](config, short.device, seq_len=length, layer_type=kind)
            setattr(self.long, name, long.to(short.dtype))

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        options = options_of(layer_type)
        is_long = position_ids < 0
        positions = torch.where(is_long, ~position_ids, position_ids)
        cos, sin = self.short(x, positions, **options)
        if layer_type not in self._kinds:
            return cos, sin
        long_cos, long_sin = self.long(x, positions, **options)
        chosen = is_long[..., None]
        return torch.where(chosen, long_cos, cos), torch.where(chosen, long_sin, sin)


def _depends_on_call(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == LONG


def _types(rotary: Any) -> dict[str | None, str]:
    """Returns the rope type of each kind of layer; key None: of all layers."""
    return dict(rotary.rope_type) if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}


def _set_types(rotary: Any, types: dict[str | None, str]) -> None:
    rotary.rope_type = types if isinstance(rotary.rope_type, dict) else types[None]


def _parameters(config: Any, kind: str | None) -> Any:
    return config.rope_parameters if kind is None else config.rope_parameters[kind]
