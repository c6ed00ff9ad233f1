"""What stands on the command line of `penstock serve`, and what the engine and the server are told by it."""

from __future__ import annotations

import argparse
import os

import msgspec

from penstock.engine import cli_args as arguments
from penstock.engine.client.image_processor import ImageLimits
from penstock.engine.model_dir import takes_images
from penstock.engine.protocol.config import EngineConfig
from penstock.server.options import ServerOptions

STORE_MB = 256
KEY_VARIABLE = "PENSTOCK_API_KEY"  # seen by fewer than a command line


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser)
    add = parser.add_argument
    add("--served-model-name", metavar="NAME", default="", help="what clients call it (the directory's name)")
    add("--host", default="127.0.0.1", help="whom it listens to (127.0.0.1: this machine)")
    add("--port", metavar="N", type=int, default=8000, help="0: one that is free (8000)")
    add("--api-key", metavar="KEY", action="append", default=[], help=f"who has one may ask; or {KEY_VARIABLE}")
    add("--api-servers", metavar="N", type=int, default=1, help="server processes, which share the port (1)")
    add("--most-open", metavar="N", type=int, default=1024, help="open requests of a server process (1024)")
    add("--most-body-mb", metavar="N", type=int, default=64, help="of a request's body (64)")
    add("--max-images", metavar="N", type=int, default=16, help="of a request (16)")
    add("--max-image-mb", metavar="N", type=int, default=20, help="of each image, as it is sent (20)")
    add("--max-image-megapixels", metavar="N", type=int, default=40, help="of each image (40)")
    add("--image-store-mb", metavar="N", type=int, help="for images that are ready (256 if the model takes images)")
    add(
        "--allowed-local-media-path",
        metavar="DIR",
        action="append",
        default=[],
        help="clients may name images beneath it by file:// URLs (none)",
    )
    add(
        "--allowed-media-domains",
        metavar="HOST,…",
        action="append",
        default=[],
        help="clients may name images on them by http:// and https:// URLs (none)",
    )
    for name, meaning in (
        ("origins", "Origins of pages that may ask from a browser, or * (default: none)"),
        ("methods", "Methods that they may use (default: *)"),
        ("headers", "Headers that they may send (default: *)"),
    ):
        add(f"--allowed-{name}", metavar="NAME,…", type=listed, action="extend", default=[], help=meaning)
    add("--allow-credentials", action="store_true", help="Pages of these origins may send credentials (default: no)")
    add(
        "--patience", metavar="SECONDS", type=float, default=30.0, help="with a client that takes or sends nothing (30)"
    )
    add("--drain-timeout", metavar="SECONDS", type=float, default=30.0, help="for what is open, at the end (30)")
    add("--blocks", metavar="N", type=int, help="of the cache (as many as can be filled)")
    add("--token-budget", metavar="N", type=int, default=2048, help="of a step (2048)")


def listed(text: str) -> list[str]:
    """Names with commas between them, or a list in JSON as vLLM has it."""
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"a list in JSON, or names with commas between them: {error}") from None


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises ValueError, TypeError."""
    config = arguments.engine_config(options, "api_servers", "drain_timeout", "blocks", "token_budget")
    store_mb = options.image_store_mb
    if store_mb is None:
        store_mb = STORE_MB if takes_images(config) else 0
    return msgspec.structs.replace(config, store_nbytes=store_mb << 20)


def server_options(options: argparse.Namespace) -> ServerOptions:
    """Raises ValueError."""
    keys = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    return ServerOptions(
        host=options.host,
        port=options.port,
        api_keys=tuple(keys),
        served_name=options.served_model_name,
        most_open=options.most_open,
        most_body_nbytes=options.most_body_mb << 20,
        patience=options.patience,
        image_limits=ImageLimits(
            count=options.max_images, nbytes=options.max_image_mb << 20, pixels=options.max_image_megapixels * 10**6
        ),
        media_folders=tuple(options.allowed_local_media_path),
        allowed_origins=tuple(options.allowed_origins),
        allowed_methods=tuple(options.allowed_methods) or ("*",),
        allowed_headers=tuple(options.allowed_headers) or ("*",),
        allow_credentials=options.allow_credentials,
        media_hosts=tuple(host for said in options.allowed_media_domains for host in said.split(",")),
    )
