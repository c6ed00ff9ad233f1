"""Options of the API server: frozen, and validated when they are created. `EngineConfig` has those of the engine."""

from __future__ import annotations

import argparse
import os
import re
from typing import Annotated, Any

import msgspec

from penstock.engine.media.image_processor import ImageLimits
from penstock.engine.media.media_fetcher import AllowedHost
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.protocol.answer_format import REASONING_MARKS, TOOL_FORMATS
from penstock.engine.protocol.option import MAX_SECONDS, MIB, Option, check_options, parse_object
from penstock.environment import API_KEY

RESPONSE_STORE = "responses"  # the name of the store of /v1/responses, which has no tensors
MAX_LOGPROBS = 1024  # a step of 2,048 prompt tokens with as many has 16 MiB
# Parameters of the rendering function, refused in a request: a template of the client would run in this process.
RESERVED = {
    *("conversations", "tools", "documents", "chat_template", "return_assistant_tokens_mask"),
    *("continue_final_message", "add_generation_prompt", "messages"),
}
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def parse_names(text: str) -> list[str]:
    """Returns names with commas between them, or a list in JSON as vLLM has it."""
    if not text.startswith("["):
        return [name.strip() for name in text.split(",")]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        message = f"expected a list in JSON, or names with commas between them: {error}"
        raise argparse.ArgumentTypeError(message) from None


def _names(if_absent: str) -> Option:
    return Option("server", metavar="NAME,…", parse=parse_names, action="extend", if_absent=if_absent)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `penstock serve` that concern HTTP, media and limits."""

    host: Annotated[str, Option("server", metavar="HOST")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of this machine"""
    port: Annotated[int, Option("server", ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one"""
    uds: Annotated[str, Option("server", metavar="PATH", if_absent="none")] = ""
    """Path of a Unix socket to listen on, instead of --host and --port"""
    ssl_keyfile: Annotated[str, Option("server", metavar="PATH", if_absent="not encrypted")] = ""
    """PEM file of the private key of --ssl-certfile, without a passphrase"""
    ssl_certfile: Annotated[str, Option("server", metavar="PATH", if_absent="not encrypted")] = ""
    """PEM file of the server's certificate, and of those that lead to its authority; connections are TLS then"""
    root_path: Annotated[str, Option("server", metavar="PATH", if_absent="none")] = ""
    """Path under which a proxy serves this server, as in /models/a: links of answers begin with this path, and requests
    may"""
    served_model_name: Annotated[
        tuple[str, ...], Option("server", metavar="NAME", nargs="+", if_absent="the directory's name")
    ] = ()
    """Names by which clients may call the model; the first is the label model_name of metrics"""
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "server", name="api-key", metavar="KEY", action="append", if_absent=f"{API_KEY.name}, or none is needed"
        ),
    ] = ()
    """Key that requests must carry, any one where the option is repeated"""
    allowed_origins: Annotated[tuple[str, ...], _names("none")] = ()
    """Origins with pages that may send requests from a browser, or *: a list in JSON, or names with commas between
    them"""
    allowed_methods: Annotated[tuple[str, ...], _names("*")] = ("*",)
    """Methods that pages of these origins may use: a list in JSON, or names with commas between them"""
    allowed_headers: Annotated[tuple[str, ...], _names("*")] = ("*",)
    """Headers that pages of these origins may send: a list in JSON, or names with commas between them"""
    allow_credentials: Annotated[bool, Option("server")] = False
    """Let pages of these origins send credentials"""
    tool_call_parser: Annotated[str, Option("server", choices=("auto", *TOOL_FORMATS))] = "auto"
    """Format in which the model writes tool calls; auto: by the chat template, and hermes if that shows none"""
    reasoning_parser: Annotated[str, Option("server", choices=("none", *REASONING_MARKS))] = "none"
    """Marks between which the model writes its reasoning; none: an answer has no reasoning"""
    chat_template: Annotated[str, Option("server", metavar="FILE", if_absent="the model's")] = ""
    """Chat template: a file, or the template itself"""
    default_chat_template_kwargs: Annotated[
        dict[str, Any], Option("server", metavar="JSON", parse=parse_object, if_absent="none")
    ] = msgspec.field(default_factory=dict)
    """Variables of the chat template for requests that do not set them, as in {"enable_thinking": false}"""
    max_logprobs: Annotated[int, Option("limits", ge=0, le=MAX_LOGPROBS)] = 20
    """Maximum number of log-probabilities of a token that a request may ask for"""
    media_nbytes_in_flight: Annotated[
        int,
        Option("multimodal", name="media-mb-in-flight", unit=MIB, ge=16 << 20, le=1 << 44),
    ] = 2 << 30
    """Maximum size of the images, videos and long bodies that an API server holds at a time, from the first byte
    to the store; requests wait for it, and clients take turns"""
    allowed_local_media_path: Annotated[
        tuple[str, ...], Option("multimodal", metavar="DIR", action="append", if_absent="none")
    ] = ()
    """Directory beneath which requests may name images and videos by file:// URLs"""
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Option("multimodal", metavar="HOST", nargs="+", action="extend", parse=parse_names, if_absent="none"),
    ] = ()
    """Hosts on which requests may name images and videos by http:// and https:// URLs"""
    max_open_requests: Annotated[int, Option("limits", ge=1, le=1 << 20)] = 1024
    """Maximum number of open requests of an API server process"""
    max_body_nbytes: Annotated[int, Option("limits", name="max-body-mb", unit=MIB, ge=1, le=1 << 40)] = 64 << 20
    """Maximum size of a request's body"""
    response_store_nbytes: Annotated[int, Option("limits", name="response-store-mb", unit=MIB, ge=0, le=1 << 40)] = (
        64 << 20
    )
    """Maximum size of the responses of /v1/responses that the server keeps; 0 keeps none"""
    max_stored_responses: Annotated[int, Option("limits", ge=1, le=1 << 15)] = 1024
    """Maximum number of responses that the server keeps; the least recently used ones go first"""
    response_store_seconds: Annotated[float, Option("limits", metavar="SECONDS", ge=1, le=MAX_SECONDS)] = 86400.0
    """Seconds after which a stored response is gone"""
    client_timeout: Annotated[float, Option("limits", metavar="SECONDS", ge=0.1, le=MAX_SECONDS)] = 30.0
    """Seconds after which a client that neither reads nor sends is cut off"""
    enable_log_requests: Annotated[bool, Option("logging")] = False
    """Log a line for each request that ends: id, lengths, times and reason"""
    otlp_traces_endpoint: Annotated[str, Option("logging", metavar="URL", if_absent="none")] = ""
    """Collector of OpenTelemetry to which each API server sends a span for each request that ends"""
    image_limits: ImageLimits = ImageLimits()
    video_limits: VideoLimits = VideoLimits()

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("api_keys", "served_model_name"):
            if not all(getattr(self, name)):
                raise ValueError(f"expected {name} that are not empty, got an empty one")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("TLS needs both ssl_keyfile (--ssl-keyfile) and ssl_certfile (--ssl-certfile)")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(f"expected root_path like /models/a, got {self.root_path!r}")
        for folder in self.allowed_local_media_path:
            if not os.path.isdir(folder):
                raise ValueError(f"expected allowed_local_media_path to be a folder, got {folder!r}")
        for host in self.allowed_media_domains:
            AllowedHost.of(host)
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"expected allowed_origins as in https://example.org:8443, or '*', got {origin!r}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "allow_credentials needs allowed_origins by name: with '*' any page could use its reader's credentials"
            )
