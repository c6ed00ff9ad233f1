"""The runner of a model that attends both ways, such as BERT: makes a vector or a score of each prompt, in one step.

The prompts of a step stand one behind the other, without padding, so linear layers compute all tokens at once. Nothing
is kept of a prompt: blocks of the core are numbers without memory, and no prefix is shared.
"""

from __future__ import annotations

from itertools import groupby
from logging import DEBUG
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.cluster.logs import event
from penstock.engine.cluster.model_fingerprint import ModelFiles
from penstock.engine.cluster.node_weights import WeightFile
from penstock.engine.model_dir import (
    first_position,
    is_sigmoid,
    pooling_of,
    require_family,
    second_text_offset,
)
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import NOTHING
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import AdapterChange, AdapterState, Ints, Step
from penstock.engine.worker import weight_loader
from penstock.engine.worker.cpu_kernels import keep_freed_memory, set_threads
from penstock.engine.worker.cpu_threads import share
from penstock.engine.worker.device import EncodingCounts, SamplerOutput
from penstock.engine.worker.grammars import GrammarCounts
from penstock.engine.worker.model_loader import load_on_cpu, quantization_of
from penstock.engine.worker.model_runner import FULL_STEP_TOKENS
from penstock.engine.worker.paged_attention import NAME, AttentionStyle
from penstock.engine.worker.pooler import Pooler
from penstock.engine.worker.shared_weights import SharedWeights
from penstock.engine.worker.stock import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    build_on_meta,
    without_compiler,
)


class EncoderAttention:
    """Attention within each of the prompts of a step, which stand in the order of their lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._groups = [(length, len(list(prompts))) for length, prompts in groupby(lengths)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        """Returns [tokens, heads, size] of the same. A token sees those at a distance below the window, both ways."""
        parts, begin = [], 0
        for length, count in self._groups:
            part, shape = slice(begin, begin + length * count), (count, length, *query.shape[1:])
            queries, keys, values = (tensor[part].view(shape).transpose(1, 2) for tensor in (query, key, value))
            mask = None
            if how.window is not None and how.window < length:
                positions = torch.arange(length)
                mask = (positions[:, None] - positions).abs() < how.window
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=how.scale)
            parts.append(attended.transpose(1, 2).flatten(0, 1))
            begin = part.stop
        return torch.cat(parts)


class EncoderRunner:
    """Launches steps on a CPU. See `Device`."""

    def __init__(self, config: EngineConfig, pooler: Pooler, weight_file: WeightFile | None = None) -> None:
        """Loads the model. Raises ValueError if it is not supported, and RuntimeError if its files change meanwhile."""
        set_threads(config.threads or share(config.data_parallel_size))
        keep_freed_memory()
        path = Path(config.model)
        files = ModelFiles(path)
        parts = files.fingerprint.digest, files.weights_identity, config.dtype, "encoder", config.pooling
        shared = SharedWeights.open(weight_file, *parts, check=files.require_unchanged)
        self._stock = load_encoder(path, config.dtype, shared, has_classifier=config.pooling == "classify")
        files.require_unchanged()
        self._pooler = pooler
        self._is_sigmoid = config.pooling == "classify" and is_sigmoid(config)
        self._mode = "" if config.pooling == "classify" else pooling_of(config).mode
        self._first_position = first_position(path)
        self._second_text = second_text_offset(config)
        self.vocabulary: int = self._stock.config.vocab_size + self._second_text
        self.blocks = config.max_num_seqs * config.max_blocks_per_request
        self.model = files.fingerprint.word
        self.dtype = str(self._stock.dtype).removeprefix("torch.")
        self.full_step_tokens: int | None = FULL_STEP_TOKENS
        self.max_short_prompt: int | None = None
        self.kv_epoch: bytes | None = None
        self.tune_after: float | None = None
        self.encodings = EncodingCounts()
        self.adapters: tuple[AdapterState, ...] = ()
        self.grammars = GrammarCounts()  # no request of vectors has a grammar

    def change_adapter(self, change: AdapterChange) -> str:
        return "models that attend both ways have no LoRA adapters"

    def tune(self) -> None:
        """Does nothing: `tune_after` is never due."""

    @torch.inference_mode()
    def launch(self, batch: BatchState, step: Step) -> SamplerOutput:
        """Computes the prompts that `batch` has just been told of."""
        slots = batch.sampled
        if not slots.size:
            return SamplerOutput(NOTHING)
        prompts = [batch.prompts[slot] for slot in slots.tolist()]
        order = sorted(range(len(prompts)), key=lambda number: prompts[number].size)
        lengths = [prompts[number].size for number in order]
        hidden = self._hidden(np.concatenate([prompts[number] for number in order]), lengths)
        vectors = self._scores(hidden) if not self._mode else self._pooler.vectors(self._pooled(hidden))
        return self._pooler.step(vectors[torch.argsort(torch.tensor(order))], slots, {})

    def _hidden(self, numbers: Ints, lengths: list[int]) -> tuple[Tensor, ...]:
        """Returns the hidden states [tokens, size] of each prompt. `numbers`: ids, and those of second texts."""
        ids = torch.from_numpy(numbers).to(torch.int64)[None]
        arguments: dict[str, Tensor] = {}
        if self._second_text:
            arguments["token_type_ids"] = ids // self._second_text
            ids %= self._second_text
        positions = torch.cat([torch.arange(length) for length in lengths])[None] + self._first_position
        attention = EncoderAttention(lengths)
        outcome = self._stock.base_model(input_ids=ids, position_ids=positions, paged=attention, **arguments)
        hidden: tuple[Tensor, ...] = outcome.last_hidden_state[0].split(lengths)
        return hidden

    def _pooled(self, hidden: tuple[Tensor, ...]) -> Tensor:
        if self._mode == "mean":
            return torch.stack([states.float().mean(0) for states in hidden])
        return torch.stack([states[0 if self._mode == "cls" else -1] for states in hidden])

    def _scores(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Returns the score of each prompt, by the model's classifier, which reads the first position."""
        first = torch.stack([states[:1] for states in hidden])
        dense = getattr(self._stock.base_model, "pooler", None)
        logits: Tensor = self._stock.classifier(first if dense is None else dense(first)).float()
        return torch.sigmoid(logits) if self._is_sigmoid else logits


def load_encoder(path: Path, dtype: str, shared: SharedWeights | None, *, has_classifier: bool) -> Any:
    """Loads a model of transformers, with packed linear layers. Raises ValueError if it is not supported."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    require_family(config.model_type, config.architectures or (), quantization_of(config))
    chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    kind: Any = AutoModelForSequenceClassification if has_classifier else AutoModel
    # Some files lack the layer that a classifier has behind the first position, and vectors need none.
    options = {} if has_classifier or config.model_type == "modernbert" else {"add_pooling_layer": False}
    stock = build_on_meta(lambda: kind.from_config(config, dtype=chosen, attn_implementation=NAME, **options))
    stock.eval().requires_grad_(False)
    device = torch.device("cpu")
    with without_compiler():
        weight_loader.rebuild_buffers(stock, device)
    load_on_cpu(stock, path, {}, device, shared)
    event("model is loaded", DEBUG, family=config.model_type)
    return stock
