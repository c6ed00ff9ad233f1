"""A model of Qwen3's kind as a GGUF file in bfloat16, which llama.cpp reads. Needs the package `gguf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.impls import Unavailable
from bench.serve_cases.model import SPECIAL, TEMPLATE


def write_gguf(directory: Path, file: Path) -> None:
    """Writes the weights and the tokenizer of a directory into a file. Raises Unavailable."""
    try:
        import gguf
    except ImportError as error:
        raise Unavailable("needs the package gguf, which writes llama.cpp's files") from error
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise Unavailable(f"writes models of type qwen3, and not {config['model_type']}")
    writer = gguf.GGUFWriter(file, "qwen3")
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, gguf, json.loads((directory / "tokenizer.json").read_text())["model"])
    _add_weights(writer, gguf, directory, config["num_hidden_layers"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])


def _add_tokenizer(writer: Any, gguf: Any, bpe: dict[str, Any]) -> None:
    ids = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ids)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in ids])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    pad, begin, end = (bpe["vocab"][token] for token in SPECIAL)
    writer.add_pad_token_id(pad)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _add_weights(writer: Any, gguf: Any, directory: Path, layers: int) -> None:
    import torch
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    with safe_open(directory / "model.safetensors", "pt") as weights:
        for name in weights.keys():
            own, tensor = names.get_name(name, try_suffixes=(".weight",)), weights.get_tensor(name)
            if tensor.ndim == 1:
                writer.add_tensor(own, tensor.to(torch.float32).numpy())
            else:
                bits = tensor.to(torch.bfloat16).view(torch.uint8).numpy()
                writer.add_tensor(own, np.ascontiguousarray(bits), raw_dtype=gguf.GGMLQuantizationType.BF16)
