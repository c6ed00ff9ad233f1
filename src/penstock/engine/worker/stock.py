"""What workers use of transformers, which is imported here as if torch had no collectives.

Workers shard models and join results themselves. The imports for transformers' own ways (`torch.distributed.tensor`,
FSDP) would take a sixth of a worker's start.
"""

from __future__ import annotations

import torch.distributed

_is_available = torch.distributed.is_available
torch.distributed.is_available = lambda: False
try:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
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
    "ROPE_INIT_FUNCTIONS",
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "Concatenate",
    "MergeModulelist",
    "SiLUActivation",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "rename_source_key",
]
