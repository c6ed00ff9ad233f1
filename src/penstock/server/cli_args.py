"""Command-line options of `penstock serve`, and how they become an `EngineConfig` and `ServerOptions`.

Options that vLLM also has carry its names, units and meaning.
"""

from __future__ import annotations

import argparse
import math
import os

import msgspec

from penstock.engine import cli_args as arguments
from penstock.engine.client.image_processor import ImageLimits
from penstock.engine.model_dir import takes_images
from penstock.engine.protocol.config import ENCODER_MODES, EngineConfig
from penstock.server import node_args
from penstock.server.options import ServerOptions
from penstock.server.videos.video_file import VideoLimits

CACHE_GB = 0.25  # of a model that takes images
ENCODER_CACHE_GB = 0.25
IMAGES, VIDEOS = ImageLimits(), VideoLimits()  # defaults
KEY_VARIABLE = "PENSTOCK_API_KEY"  # seen by fewer than a command line
TRANSPORT_VARIABLE = "PENSTOCK_TENSOR_TRANSPORT"


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser)
    node_args.add(parser)
    _add_server(parser)
    _add_multimodal(parser)
    _add_limits(parser)
    arguments.add_logging(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; 0.0.0.0 is every IPv4 address of this machine (default: %(default)s)",
    )
    add(
        "--port",
        metavar="N",
        type=int,
        default=8000,
        help="Port to listen on; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        default=[],
        help="Names by which clients may call the model; the first is the label model_name of metrics "
        "(default: the directory's name)",
    )
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="Key that requests must carry, any one where the option is repeated "
        f"(default: {KEY_VARIABLE}, or none is needed)",
    )
    add(
        "--api-server-count",
        "-asc",
        metavar="N",
        type=int,
        default=1,
        help="Number of API server processes, which share the port (default: %(default)s)",
    )
    add(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="Seconds to wait at shutdown for open requests to be answered (default: %(default)s)",
    )
    for name, meaning, default in (
        ("origins", "Origins with pages that may send requests from a browser, or *", "none"),
        ("methods", "Methods that pages of these origins may use", "*"),
        ("headers", "Headers that pages of these origins may send", "*"),
    ):
        add(
            f"--allowed-{name}",
            metavar="NAME,…",
            type=listed,
            action="extend",
            default=[],
            help=f"{meaning}: a list in JSON, or names with commas between them (default: {default})",
        )
    add(
        "--allow-credentials",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Let pages of these origins send credentials (default: off)",
    )


def _add_multimodal(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("multimodal").add_argument
    add(
        "--limit-mm-per-prompt",
        metavar="JSON",
        type=media_counts,
        default={},
        help='Maximum numbers of images and videos in a prompt, as in {"image": 4} or image=4,video=1 '
        f"(default: image={IMAGES.count},video={VIDEOS.count})",
    )
    add(
        "--mm-processor-cache-gb",
        metavar="GIB",
        type=float,
        help="Size in GiB of the store for processed images, videos and prompt embeddings, which all processes share; "
        f"0 disables it (default: {CACHE_GB} if the model takes images or --enable-prompt-embeds is given, else 0)",
    )
    add(
        "--mm-encoder-tp-mode",
        choices=ENCODER_MODES,
        help="How images are encoded: weights (each worker of an engine encodes all images), data (the workers of an "
        "engine divide the images among them), or store (as data, and once for all engines) "
        "(default: store on a CPU where images are in a store, else weights)",
    )
    add(
        "--encoder-cache-gb",
        metavar="GIB",
        type=float,
        default=ENCODER_CACHE_GB,
        help="Size in GiB of the store for encodings, which all workers share; with weights and data, of each worker's "
        "own cache of encodings (default: %(default)s)",
    )
    add(
        "--huge-pages",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Use pages of 2 MiB for that store, all of which are claimed at the start (default: off)",
    )
    add(
        "--enable-prompt-embeds",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Take embeddings instead of text in completions, as safetensors or npy in base64 (default: off)",
    )
    add(
        "--tensor-transport",
        metavar="WAY",
        help="How media and prompt embeddings travel: store, inline (in messages), or auto, which is in the store if "
        f"there is one, and inline where it has no room (default: {TRANSPORT_VARIABLE}, or auto)",
    )
    add(
        "--max-concurrent-videos",
        metavar="N",
        type=int,
        default=2,
        help="Maximum number of videos that an API server process decodes at a time, each in a process of its own "
        "(default: %(default)s)",
    )
    add(
        "--media-mb-in-flight",
        metavar="MIB",
        type=int,
        default=2048,
        help="Maximum size in MiB of the images, videos and long bodies that an API server holds at a time, from "
        "the first byte to the store; requests wait for it, and clients take turns (default: %(default)s)",
    )
    add(
        "--allowed-local-media-path",
        metavar="DIR",
        action="append",
        default=[],
        help="Directory beneath which requests may name images and videos by file:// URLs (default: none)",
    )
    add(
        "--allowed-media-domains",
        metavar="HOST",
        nargs="+",
        action="extend",
        default=[],
        help="Hosts on which requests may name images and videos by http:// and https:// URLs (default: none)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    for name, metavar, kind, default, meaning in (
        ("max-open-requests", "N", int, 1024, "Maximum number of open requests of an API server process"),
        ("max-body-mb", "MIB", int, 64, "Maximum size of a request's body in MiB"),
        ("max-image-mb", "MIB", int, 20, "Maximum size of an image in MiB, as it is sent"),
        ("max-image-megapixels", "N", int, 40, "Maximum size of an image in megapixels"),
        ("max-video-mb", "MIB", int, 64, "Maximum size of a video in MiB, as it is sent"),
        ("max-video-megapixels", "N", int, 9, "Maximum size of a frame of a video in megapixels"),
        ("max-video-seconds", "SECONDS", float, VIDEOS.seconds, "Maximum duration of a video in seconds"),
        ("max-video-frames", "N", int, VIDEOS.frames, "Maximum number of frames that the model gets of a video"),
        (
            "video-decode-timeout",
            "SECONDS",
            float,
            VIDEOS.decoder_seconds,
            "Seconds after which the process that decodes a video is killed",
        ),
        (
            "client-timeout",
            "SECONDS",
            float,
            30.0,
            "Seconds after which a client that neither reads nor sends is cut off",
        ),
    ):
        add(f"--{name}", metavar=metavar, type=kind, default=default, help=f"{meaning} (default: %(default)s)")


def listed(text: str) -> list[str]:
    """Names with commas between them, or a list in JSON as vLLM has it."""
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"a list in JSON, or names with commas between them: {error}") from None


def media_counts(text: str) -> dict[str, int]:
    """Returns the numbers of media in `{"image": 4, "video": 0}` or `image=4,video=0`."""
    try:
        if text.startswith("{"):
            counts = msgspec.json.decode(text, type=dict[str, int])
        else:
            pairs = (pair.partition("=") for pair in text.split(","))
            counts = {name.strip(): int(count) for name, _, count in pairs}
    except (msgspec.DecodeError, ValueError) as error:
        message = f'numbers like {{"image": 4}} or image=4,video=1: {error}'
        raise argparse.ArgumentTypeError(message) from None
    others = [name for name, count in counts.items() if name not in ("image", "video") and count]
    if others:
        message = f"numbers of images and videos only, as no model here takes {' or '.join(others)}"
        raise argparse.ArgumentTypeError(message)
    return counts


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises ValueError, TypeError."""
    config = arguments.engine_config(options, "api_server_count", "shutdown_timeout")
    config = msgspec.structs.replace(
        config, data_parallel_size=node_args.groups_of_this_node(options), nodes=node_args.nodes(options)
    )
    transport = options.tensor_transport or os.environ.get(TRANSPORT_VARIABLE) or "auto"
    size = options.mm_processor_cache_gb
    if size is None:
        has_tensors = options.enable_prompt_embeds or takes_images(config)
        size = CACHE_GB if transport == "store" or (transport == "auto" and has_tensors) else 0.0
    return msgspec.structs.replace(
        config,
        store_nbytes=_nbytes("mm_processor_cache_gb", size),
        tensor_transport=transport,
        huge_pages=options.huge_pages,
        mm_encoder_tp_mode=options.mm_encoder_tp_mode,
        encoder_cache_nbytes=_nbytes("encoder_cache_gb", options.encoder_cache_gb),
        enable_prompt_embeds=options.enable_prompt_embeds,
        max_concurrent_videos=options.max_concurrent_videos,
    )


def _nbytes(name: str, gib: float) -> int:
    if not math.isfinite(gib):
        raise ValueError(f"{name} is a finite number, not {gib}")
    return round(gib * 2**30)


def server_options(options: argparse.Namespace) -> ServerOptions:
    """Raises ValueError."""
    for name in (*options.served_model_name, *options.allowed_media_domains):
        if not options.model and os.path.isdir(name):  # it was taken for one more name
            raise ValueError(f"{name!r} is a directory, and no MODEL is given: MODEL comes before the options")
    keys = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    return ServerOptions(
        host=options.host,
        port=options.port,
        api_keys=tuple(keys),
        served_model_name=tuple(options.served_model_name),
        max_open_requests=options.max_open_requests,
        max_body_nbytes=options.max_body_mb << 20,
        client_timeout=options.client_timeout,
        image_limits=ImageLimits(
            count=options.limit_mm_per_prompt.get("image", IMAGES.count),
            nbytes=options.max_image_mb << 20,
            pixels=options.max_image_megapixels * 10**6,
        ),
        video_limits=VideoLimits(
            count=options.limit_mm_per_prompt.get("video", VIDEOS.count),
            nbytes=options.max_video_mb << 20,
            pixels=options.max_video_megapixels * 10**6,
            seconds=options.max_video_seconds,
            frames=options.max_video_frames,
            decoder_seconds=options.video_decode_timeout,
        ),
        media_nbytes_in_flight=options.media_mb_in_flight << 20,
        allowed_local_media_path=tuple(options.allowed_local_media_path),
        allowed_origins=tuple(options.allowed_origins),
        allowed_methods=tuple(options.allowed_methods) or ("*",),
        allowed_headers=tuple(options.allowed_headers) or ("*",),
        allow_credentials=options.allow_credentials,
        allowed_media_domains=tuple(host for hosts in options.allowed_media_domains for host in hosts.split(",")),
    )
