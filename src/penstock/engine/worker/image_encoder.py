"""Encodes one image or video on this rank: opens its tensors, and runs the model's vision encoder on them.

Prompt embeddings are encoded already: they are cast to the model's dtype.

The server has put the tensors, the output of the model's processor, into the store, or into the handle itself. Where a
model wants vectors for several of its layers (`InputEmbeds`), the encoding of a token has them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from penstock import DecodeError, Missing
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import EMBEDS
from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker import vision_inputs
from penstock.engine.worker.input_batch import queued
from penstock.engine.worker.model import LoadedModel
from penstock.tensor import Handle, Lease, Store

if TYPE_CHECKING:
    from penstock.tensor.cuda import ReceivedTensors, Uploads

Open = Callable[[Handle], Lease]  # raises Missing
VIDEO, GRID = "pixel_values_videos", "video_grid_thw"  # of a video; SmolVLM's videos are images with many tiles
OURS = (torch.OutOfMemoryError, torch.distributed.DistError)  # any other error of the encoder is the image's fault


class DeviceInputs(NamedTuple):
    """The ways of tensors to a CUDA device beside copies to pinned memory."""

    uploads: Uploads | None = None  # from the store
    received: ReceivedTensors | None = None  # of devices


NO_INPUTS = DeviceInputs()


class Part(NamedTuple):
    """Some of the times of a video, or of the tiles of an image. No vision encoder attends from one to another."""

    begin: int
    end: int


class Unusable(Exception):
    """An image is missing from the store, or does not fit the model."""

    def __init__(self, why: FinishReason) -> None:
        super().__init__(why.name)
        self.why = why


class ImageEncoder:
    """The vision encoder of the model, on this rank."""

    def __init__(self, model: LoadedModel, open_handle: Open, inputs: DeviceInputs = NO_INPUTS) -> None:
        self._model = model
        self._open_handle = open_handle
        self._uploads, self._received = inputs
        # Of the encoding of a token.
        self.size: int = model.stock.config.get_text_config().hidden_size * (1 + model.deepstack_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def empty(self, length: int) -> Tensor:
        """Returns memory for an encoding."""
        return torch.empty(length, self.size, dtype=self._model.dtype, device=self._model.device)

    def open(self, item: Handle) -> Mapping[str, Any]:
        """Returns an image's value; the image is held as long as one of its tensors lives. Raises Unusable."""
        try:
            value = self._open_handle(item).value("torch")
        except Missing:
            raise Unusable(FinishReason.MISSING) from None
        except (DecodeError, ValueError) as error:
            raise misfit(error) from None
        if not isinstance(value, Mapping):
            raise misfit(ValueError(f"expected tensors by name, got {type(value).__name__}"))
        return value

    def encode(self, item: Handle, length: int, part: Part | None = None) -> Tensor:
        """Returns the encoding of an image, or of a part: [length, size] in the model's dtype. `length`: the tokens in
        the prompt. Raises Unusable."""
        value = self.open(item)
        if self._received is not None:
            value = self._resolved(value, self._received)
        try:
            tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
            encoded = self._encode(tensors if part is None else _cut(tensors, part))
        except OURS:
            raise
        except Exception as error:
            raise misfit(error) from None
        if encoded.shape != (length, self.size):
            raise misfit(ValueError(f"expected {(length, self.size)}, got an encoding of {tuple(encoded.shape)}"))
        return encoded

    def _resolved(self, value: Mapping[str, Any], received: ReceivedTensors) -> Mapping[str, Any]:
        """Returns the value with the tensors that its sender has on a device. Raises Unusable."""
        try:
            return received.resolve(value)
        except OURS:
            raise
        except Missing:
            raise Unusable(FinishReason.MISSING) from None
        except Exception as error:  # of the driver, or the device cannot reach the tensor
            event("tensor of a device was not received", WARNING, error=f"{type(error).__name__}: {error}")
            raise Unusable(FinishReason.ERROR) from None

    def _encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        if EMBEDS in tensors:
            return self._cast(tensors[EMBEDS])
        layers = vision_inputs.encode(self._model, tensors, self._upload, is_video=VIDEO in tensors)
        return torch.cat(layers, dim=-1).to(self._model.dtype)

    def _upload(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        uploads = self._uploads
        if tensor.device.type == "cuda":
            return tensor.to(dtype or tensor.dtype)
        if uploads is None or not tensor.is_contiguous() or not uploads.is_registered(tensor):
            return queued(tensor, self._model.device, dtype)
        on_device: Tensor = uploads.copy_to_device(tensor)
        return on_device.to(dtype or tensor.dtype)

    def release_copied(self) -> None:
        """Releases images that have been copied to the device, or that the device has read."""
        if self._uploads is not None:
            self._uploads.flush()
        if self._received is not None:
            self._received.flush()

    def _cast(self, embeds: Tensor) -> Tensor:
        """Returns prompt embeddings in the model's dtype, and zeros for further layers: a copy, as the value is held
        for this step only. Raises ValueError."""
        if embeds.dtype == torch.int16:  # the server has no torch, and NumPy no bfloat16
            embeds = embeds.view(torch.bfloat16)
        cast = embeds.to(self._model.dtype, copy=True)
        if not cast.isfinite().all():
            raise ValueError(f"a number of the prompt embeddings is too large for {cast.dtype}")
        layers = self._model.deepstack_layers
        return self._upload(F.pad(cast, (0, layers * cast.shape[-1])) if layers else cast)


def device_inputs(
    device: torch.device, store: Store | None, open_handle: Open, *, receives_tensors: bool
) -> DeviceInputs:
    """Raises NoDevice if the process cannot receive tensors of a device."""
    received = None
    if device.type != "cuda":
        return NO_INPUTS
    if receives_tensors:
        from penstock.tensor.cuda import ReceivedTensors

        received = ReceivedTensors(open_handle)
        if received.driver.legacy_reason:
            event("device memory is shared by legacy handles", WARNING, why=received.driver.legacy_reason)
    return DeviceInputs(None if store is None else register_store(store), received)


def register_store(store: Store) -> Uploads | None:
    """Registers the store with the CUDA device, so that images are copied from there; None: it cannot be done."""
    from penstock.tensor.cuda import NoDevice, Uploads

    try:
        uploads = Uploads(store)
    except NoDevice as error:
        event("store is not registered", why=str(error))
        return None
    uploads.register()
    refusals = uploads.refusals()
    if refusals:
        event("store is not registered", WARNING, why=refusals[0])
        return None
    event("store registered", nbytes=uploads.stats.registered_nbytes)
    return uploads


def _cut(tensors: Mapping[str, Tensor], part: Part) -> dict[str, Tensor]:
    """Returns the tensors of a part."""
    if VIDEO not in tensors:
        return {name: tensor[:, part.begin : part.end] for name, tensor in tensors.items()}
    times, height, width = tensors[GRID].reshape(3).tolist()
    patches = height * width
    if tensors[VIDEO].shape[0] != times * patches:
        raise ValueError(f"expected {times * patches} patches, got {tensors[VIDEO].shape[0]}")
    grid = torch.tensor([[part.end - part.begin, height, width]])
    return {VIDEO: tensors[VIDEO][part.begin * patches : part.end * patches], GRID: grid}


def misfit(error: Exception) -> Unusable:
    event("input does not fit the model", error=f"{type(error).__name__}: {error}")
    return Unusable(FinishReason.MISFIT)
