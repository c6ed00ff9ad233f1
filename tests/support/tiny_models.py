"""Tiny models with random weights, in the form in which vLLM serves them: tiny-llama, and tiny-qwen2vl, which sees.

Needs torch, transformers and tokenizers, nothing of ours, so that an interpreter with vLLM can run it:
python tests/support/tiny_models.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LLAMA, QWEN2_VL = "tiny-llama", "tiny-qwen2vl"
HIDDEN, LAYERS, HEAD = 256, 2, 64
SPREAD = 0.1  # of the weights: with less, most prompts have the same answer
END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (END, START_OF_TURN, END_OF_TURN, VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)
CHAT = (
    "{% for message in messages %}" + START_OF_TURN + "{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + VISION_START + IMAGE + VISION_END + "{% endif %}"
    "{% endfor %}{% endif %}" + END_OF_TURN + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START_OF_TURN + "assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> Any:
    """A token for each byte, and the special ones. Nothing is trained, so it is the same everywhere."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, pad_token=END, eos_token=END_OF_TURN, chat_template=CHAT
    )
    fast.save_pretrained(folder)
    return fast


def _text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "initializer_range": SPREAD,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        **more,
    }


def write_llama(folder: Path) -> Path:
    """Writes tiny-llama into the folder, and returns its path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / LLAMA
    config = LlamaConfig(head_dim=HEAD, **_text_config(write_tokenizer(path)))
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def write_qwen2_vl(folder: Path) -> Path:
    """Writes tiny-qwen2vl into the folder, and returns its path."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    path = folder / QWEN2_VL
    tokenizer = write_tokenizer(path)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), (IMAGE, VIDEO, VISION_START, VISION_END)))
    config = Qwen2VLConfig(
        text_config=_text_config(tokenizer, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "embed_dim": 128,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": SPREAD,
        },
        tie_word_embeddings=False,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 4 * 14 * 14,
        "max_pixels": 1 << 24,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


if __name__ == "__main__":
    for write in (write_llama, write_qwen2_vl):
        print(write(Path(sys.argv[1])))
