"""The families of models that are served: `model_type` of config.json, and the class of transformers of each.

Imports neither torch nor transformers, so that a model is refused before a process starts. A test holds the classes
against transformers' own registry, and the table of docs/howto/serve.md against this one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TEXT = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VISION = {  # and images
    "idefics3": "Idefics3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
FAMILIES = {**TEXT, **VISION}
_OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)\w+$")  # it classifies, say, and generates nothing


def require_family(model_type: str, architectures: Sequence[str] = (), is_quantized: bool = False) -> None:
    """Raises ValueError where a model of this config.json cannot be served."""
    heads = [one for one in architectures if not _OTHER_HEAD.search(one)]
    if model_type not in FAMILIES or (architectures and not heads):
        raise ValueError(
            f"Model architectures {list(architectures)} (model_type {model_type!r}) are not supported; "
            f"supported are {', '.join(TEXT.values())}; with images {', '.join(VISION.values())}"
        )
    if is_quantized:
        raise ValueError(f"{model_type!r}: quantized weights are not supported (quantization_config in config.json)")
