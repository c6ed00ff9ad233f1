"""What a core sends and a worker answers, of vLLM's own classes: decode steps, their outputs, steps with an image."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from bench.impls.tensors import pattern
from bench.vs_vllm import vllm_end
from bench.vs_vllm.workload import Decode

OUTPUTS = 16  # different ones
CACHE_GB = 0.5
PROMPT = 32  # tokens, of a request with an image

_classes: dict[str, Any] = {}


def import_classes() -> None:
    for what, (module, _) in vllm_end.BUILDERS.items():
        _classes[what] = importlib.import_module(module)
    _classes["inputs"] = importlib.import_module("vllm.multimodal.inputs")
    _classes["factories"] = importlib.import_module("vllm.multimodal.cache.factories")


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _decode_steps(decode: Decode, count: int) -> Iterator[dict[str, Any]]:
    """Yields decode steps as plain data. Requests came at different times: in each step some need a block."""
    for _ in range(count):
        advance = decode.step()
        yield {
            "names": [request.name for request in decode.running],
            "new_blocks": [advance.due.get(row) for row in range(len(decode.running))],
            "computed": [request.computed for request in decode.running],
            "outputs": [len(request.output) for request in decode.running],
            "sampled": advance.sampled,
        }
        decode.finish(advance)


def scheduled(requests: int, count: int) -> list[Any]:
    decode = Decode(requests, is_spread=True)
    return [vllm_end.scheduler_output(_classes["scheduler_output"], step) for step in _decode_steps(decode, count)]


def outputs(requests: int, count: int = OUTPUTS) -> list[Any]:
    decode = Decode(requests, is_spread=True)
    return [
        vllm_end.model_runner_output(_classes["model_runner_output"], step) for step in _decode_steps(decode, count)
    ]


def steps(order: Any, images: ImageSender | None) -> Iterator[Any]:
    """Yields the steps of an order, which are all made before the first is given."""
    if not order.nbytes:
        return iter(scheduled(order.requests, order.messages))
    step = scheduled(order.requests, 1)[0]
    if images is not None:
        images.prepare(order.nbytes)
    step.scheduled_new_reqs = [_request_with(_item(order.nbytes) if images is None else None)]
    return itertools.repeat(step, order.messages)


def call(step: Any, images: ImageSender | None) -> tuple[Any, ...]:
    """Returns what vLLM's executor sends for a step. The image goes to the cache first, where there is one."""
    if images is not None:
        images.put(step)
    return "execute_model", (step,), {}, 0


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _item(nbytes: int) -> Any:
    import torch

    inputs = _classes["inputs"]
    pixels = inputs.MultiModalFieldElem(data=torch.from_numpy(pattern(nbytes)), field=inputs.MultiModalBatchedField())
    return inputs.MultiModalKwargsItem({"pixel_values": pixels})


def _request_with(item: Any) -> Any:
    inputs = _classes["inputs"]
    feature = inputs.MultiModalFeatureSpec(
        data=item, modality="image", identifier="image", mm_position=inputs.PlaceholderRange(offset=0, length=PROMPT)
    )
    return _classes["scheduler_output"].NewRequestData(
        req_id="request-with-image",
        prompt_token_ids=list(range(PROMPT)),
        mm_features=[feature],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1, 2],),
        num_computed_tokens=0,
        lora_request=None,
    )


def tensor_of(message: tuple[Any, ...], images: ImageReceiver | None) -> Any:
    """Returns the tensor of a step's image, as a worker gets it."""
    features = message[1][0].scheduled_new_reqs[0].mm_features
    if images is not None:
        features = images.get(features)
    return features[0].data["pixel_values"].data


def _config(workers: int) -> Any:
    """Returns as much of vLLM's configuration as its caches read."""
    multimodal = SimpleNamespace(
        mm_processor_cache_gb=CACHE_GB, mm_shm_cache_max_object_size_mb=128, mm_processor_cache_type="shm"
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=workers,
            tensor_parallel_size=workers,
            data_parallel_size=1,
            data_parallel_external_lb=False,
            _api_process_count=1,
            _api_process_rank=0,
        ),
        model_config=SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=lambda: multimodal),
    )


class ImageSender:
    """vLLM's cache of the API server, of the kind in shared memory; here it is in the core."""

    def __init__(self, workers: int) -> None:
        os.environ.setdefault("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", f"penstock-bench-{os.getpid()}")
        self._config = _config(workers)
        self._cache = _classes["factories"].processor_cache_from_config(self._config)
        self._keys = map("{:064x}".format, itertools.count())
        self._item: Any = None
        self._nbytes = 0
        self.for_workers = self._config, multiprocessing.get_context("fork").Lock()

    def prepare(self, nbytes: int) -> None:
        """Makes the image of this size, which all requests after this have under keys of their own."""
        if nbytes != self._nbytes:
            self._item, self._nbytes = _item(nbytes), nbytes

    def put(self, step: Any) -> None:
        key = next(self._keys)
        item, _ = self._cache.get_and_update_item((self._item, []), key)
        if item is self._item:
            raise ValueError(f"the cache did not take an image of {self._nbytes} bytes")
        feature = step.scheduled_new_reqs[0].mm_features[0]
        feature.data, feature.identifier, feature.mm_hash = item, key, key


class ImageReceiver:
    """vLLM's cache of a worker."""

    def __init__(self, created: tuple[Any, Any]) -> None:
        self._cache = _classes["factories"].worker_receiver_cache_from_config(*created)

    def get(self, features: list[Any]) -> list[Any]:
        and_update_features: list[Any] = self._cache.get_and_update_features(features)
        return and_update_features
