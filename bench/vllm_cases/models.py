"""Tiny models that vLLM serves: the text model of `bench/serve.py`, and Qwen2-VLs with the same tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.serve_cases import model

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}"
)


@dataclass(frozen=True)
class Vision:
    """The sizes of a vision encoder, and the largest image that its processor does not scale down."""

    patch_size: int = 14
    depth: int = 2
    embed_dim: int = 128
    num_heads: int = 2
    key_value_heads: int = 2  # of the text model
    max_pixels: int = 1 << 20


SMALL = Vision()
# 24 bytes a pixel reach the encoder, which computes little of each: transfers show beside it. Divisible by TP 4.
LARGE_INPUT = Vision(patch_size=28, depth=1, embed_dim=64, num_heads=4, key_value_heads=4, max_pixels=1 << 23)


def make_text(folder: Path) -> Path:
    """Makes the model if it is not there; returns its directory."""
    directory = folder.parent / "text-model"
    if not (directory / "config.json").exists():
        model.make(directory)
    return directory


def make_multimodal(folder: Path) -> Path:
    """Makes the model if it is not there; returns its directory."""
    directory = folder.parent / "image-model"
    if not (directory / "config.json").exists():
        make_qwen2_vl(directory, SMALL)
    return directory


def make_qwen2_vl(directory: Path, vision: Vision) -> None:
    import torch
    import transformers

    model.make(directory)  # for its tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, MARKS)
    torch.manual_seed(0)
    shape = {**model.SHAPE, "num_hidden_layers": 2, "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    shape["num_key_value_heads"] = vision.key_value_heads
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    config = transformers.Qwen2VLConfig(
        text_config={**shape, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={
            "depth": vision.depth, "embed_dim": vision.embed_dim, "num_heads": vision.num_heads, "mlp_ratio": 2,
            "hidden_size": shape["hidden_size"], "patch_size": vision.patch_size, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "in_channels": 3,
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=False,
    )  # fmt: skip
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    normal = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"min_pixels": 56 * 56, "max_pixels": vision.max_pixels}
    (directory / "preprocessor_config.json").write_text(json.dumps({**names, **sizes, **pixels, **normal}))
