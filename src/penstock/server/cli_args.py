"""Options of `penstock serve`, and how they become an `EngineConfig` and `ServerOptions`, which declare most."""

from __future__ import annotations

import argparse
import os
from typing import Annotated, Any

import msgspec

from penstock.engine import cli_args as engine_args
from penstock.engine.launcher.hub_model import HubOptions
from penstock.engine.media.image_processor import ImageLimits
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.model_dir import is_pooling, takes_images
from penstock.engine.protocol.config import EngineConfig, Nodes, SimulatedDevice
from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.option import Option, add_options, option_values
from penstock.environment import API_KEY, TENSOR_TRANSPORT
from penstock.server import node_args
from penstock.server.options import ServerOptions

GROUPS = (*engine_args.GROUPS, "nodes", "server", "multimodal", "limits", "logging")
CACHE_NBYTES = 1 << 28  # of a model that takes images
IMAGES, VIDEOS = ImageLimits(), VideoLimits()  # defaults


def parse_media_counts(text: str) -> dict[str, int]:
    """Returns the numbers of media in `{"image": 4, "video": 0}` or `image=4,video=0`."""
    try:
        if text.startswith("{"):
            counts = msgspec.json.decode(text, type=dict[str, int])
        else:
            pairs = (pair.partition("=") for pair in text.split(","))
            counts = {name.strip(): int(count) for name, _, count in pairs}
    except (msgspec.DecodeError, ValueError) as error:
        message = f'expected numbers like {{"image": 4}} or image=4,video=1: {error}'
        raise argparse.ArgumentTypeError(message) from None
    others = [name for name, count in counts.items() if name not in ("image", "video") and count]
    if others:
        message = f"expected numbers of images and videos only, as no model here takes {' or '.join(others)}"
        raise argparse.ArgumentTypeError(message)
    return counts


class MediaCounts(msgspec.Struct):
    """The option of both `ImageLimits.count` and `VideoLimits.count`."""

    limit_mm_per_prompt: Annotated[
        dict[str, int],
        Option(
            "multimodal",
            metavar="JSON",
            parse=parse_media_counts,
            if_absent=f"image={IMAGES.count},video={VIDEOS.count}",
        ),
    ]
    """Maximum numbers of images and videos in a prompt, as in {"image": 4} or image=4,video=1"""


def add(parser: argparse.ArgumentParser) -> None:
    engine = (EngineConfig, engine_args.DeviceModel, SimulatedDevice, HubOptions, LoraConfig, Nodes, node_args.NodeRole)
    add_options(parser, GROUPS, (*engine, ServerOptions, MediaCounts, ImageLimits, VideoLimits))


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises ValueError, TypeError."""
    fields: dict[str, Any] = {
        "data_parallel_size": node_args.groups_of_this_node(options),
        "nodes": node_args.nodes(options),
    }
    transport = options.tensor_transport or TENSOR_TRANSPORT.read()
    if options.mm_processor_cache_gb is None and transport != "inline":
        model = EngineConfig(**engine_args.model_fields(options))
        has_tensors = options.enable_prompt_embeds or options.runner == "pooling" or takes_images(model)
        has_tensors = has_tensors or (options.runner == "auto" and is_pooling(model))
        fields["store_nbytes"] = CACHE_NBYTES if has_tensors or transport in ("store", "device") else 0
    return engine_args.engine_config(options, tensor_transport=transport, **fields)


def read_chat_template(text: str) -> str:
    """Returns the template of a file, or `text`, if it is a template. Raises ValueError."""
    if any(character in text for character in "{}\n"):
        return text
    try:
        with open(text, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected chat_template, a file or a template, got {text!r}: {error}") from None


def server_options(options: argparse.Namespace) -> ServerOptions:
    """Raises ValueError."""
    fields = option_values(ServerOptions, options)
    for name in (*fields.get("served_model_name", ()), *fields.get("allowed_media_domains", ())):
        if not options.model and os.path.isdir(name):  # it was taken for one more name
            raise ValueError(f"{name!r} is a directory, and no MODEL is given: MODEL comes before the options")
    if "chat_template" in fields:
        fields["chat_template"] = read_chat_template(fields["chat_template"])
    if fields.get("otlp_traces_endpoint"):
        from penstock.server.chat.request_reporter import exporter_module

        exporter_module()
    fields["api_keys"] = (*fields.get("api_keys", ()), *filter(None, [API_KEY.read()]))
    counts = options.limit_mm_per_prompt or {}
    images = ImageLimits(**option_values(ImageLimits, options), count=counts.get("image", IMAGES.count))
    videos = VideoLimits(**option_values(VideoLimits, options), count=counts.get("video", VIDEOS.count))
    return ServerOptions(**fields, image_limits=images, video_limits=videos)
