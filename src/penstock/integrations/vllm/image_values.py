"""A processed image of vLLM as a value of a store, and back: encoded by vLLM, its buffers are tensors of the value.

Leaves to the caches where values lie, and for how long.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
from vllm.distributed.device_communicators.shm_object_storage import MsgpackSerde
from vllm.platforms import current_platform

from penstock.integrations.vllm.settings import Settings

READ_ONLY = "The given buffer is not writable"  # what torch warns of where it makes a tensor of read-only memory


def are_views_safe(settings: Settings) -> bool:
    """Returns whether received tensors may be views of the store, which are read-only.

    On a device the model runner only copies them there. On a CPU the model itself reads them, and may write.
    """
    if settings.views == "arena":
        return not current_platform.is_cpu()
    return settings.views == "always"


class ImageValues:
    """Encodes and decodes as vLLM's shared-memory cache does.

    Args:
        serde: vLLM's encoder and decoder; None: of MultiModalKwargsItem and tensors.
        has_views: decoded tensors are views, except those that stay on the CPU when a model runs on a device.
    """

    def __init__(self, serde: Any = None, *, has_views: bool) -> None:
        self._serde = MsgpackSerde() if serde is None else serde
        self._has_views = has_views and isinstance(self._serde, MsgpackSerde)
        if self._has_views:
            warnings.filterwarnings("ignore", message=READ_ONLY)
            self._serde.mm_decoder.share_mem = True
            self._serde.tensor_decoder.share_mem = True

    def encode(self, item: Any) -> tuple[list[Any], int]:
        """Returns a value for a store, and its size as vLLM counts it."""
        data, nbytes, layout, layout_nbytes = self._serde.serialize(item)
        parts = [data] if isinstance(data, bytes) else data
        return [layout, [np.frombuffer(part, np.uint8) for part in parts]], nbytes + layout_nbytes

    def decode(self, value: list[Any]) -> Any:
        """Returns what was encoded. Views hold the lease of the value."""
        layout, arrays = value
        type_name, _, lengths = pickle.loads(layout)
        parts = [memoryview(array) for array in arrays]
        if lengths is None:
            return pickle.loads(parts[0])
        if type_name == "Tensor":
            return self._serde.tensor_decoder.decode(parts)
        item = self._serde.mm_decoder.decode(parts)
        if self._has_views:
            for element in item.values():
                if element.field.keep_on_cpu:
                    element.data = _copied(element.data)
        return item


def _copied(data: Any) -> Any:
    if isinstance(data, list):
        return [_copied(part) for part in data]
    return data.clone() if hasattr(data, "clone") else data
