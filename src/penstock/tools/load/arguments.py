"""Command-line options of `penstock bench serve`; those that `vllm bench serve` has, too, carry its names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

MAX_PIXELS = 1 << 14  # of a side
KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own client
BACKENDS = ("openai", "openai-chat")


def add(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_requests(parser)
    _add_load(parser)
    add = parser.add_argument_group("results").add_argument
    add(
        "--result-filename",
        metavar="FILE",
        type=Path,
        help="File for all figures, as one JSON object (default: none is written)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    add(
        "--backend",
        choices=BACKENDS,
        help="Interface to ask: openai is /v1/completions, openai-chat /v1/chat/completions "
        "(default: openai, and openai-chat where prompts have images or videos)",
    )
    add("--model", metavar="NAME", default="", help="Name of the model (default: the first that the server lists)")
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"Key that requests carry (default: {KEY_VARIABLE}, or none)",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add(
        "--input-len",
        metavar="N|N-M",
        type=between,
        default="128",
        help="Number of tokens of a prompt's text, about, or the range from which it is drawn (default: %(default)s)",
    )
    add(
        "--output-len",
        metavar="N|N-M",
        type=between,
        default="128",
        help="Maximum number of tokens of an answer, or the range from which it is drawn (default: %(default)s)",
    )
    add("--images", metavar="N", type=count, default=0, help="Number of images in each prompt (default: %(default)s)")
    add(
        "--image-size",
        metavar="WxH",
        type=image_size,
        default="256x256",
        help="Size of these images in pixels (default: %(default)s)",
    )
    add(
        "--videos",
        metavar="N",
        type=count,
        default=0,
        help="Number of videos in each prompt, which PyAV encodes (default: %(default)s)",
    )
    add(
        "--video-seconds",
        metavar="N|N-M",
        type=between,
        default="4",
        help="Duration of these videos in seconds, or the range from which it is drawn (default: %(default)s)",
    )
    add(
        "--video-size",
        metavar="WxH",
        type=image_size,
        default="320x240",
        help="Size of their frames in pixels, which are even numbers (default: %(default)s)",
    )
    add(
        "--video-fps",
        metavar="N",
        type=whole,
        default=12,
        help="Number of their frames per second (default: %(default)s)",
    )
    add(
        "--dataset-path",
        metavar="FILE",
        type=Path,
        help="File of JSON lines to ask instead: a text each, or an object with prompt or messages (default: none)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="Ask for answers that end only at their maximum length (default: off)",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="Seed of prompts, images, videos and arrival times (default: %(default)s)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--num-prompts", metavar="N", type=whole, default=100, help="Number of requests in all (default: %(default)s)")
    when = group.add_mutually_exclusive_group()
    when.add_argument(
        "--request-rate",
        metavar="R",
        type=above_0,
        help="Requests per second, with random gaps as of a Poisson process, however many are open "
        "(default: as --max-concurrency lets them)",
    )
    when.add_argument(
        "--max-concurrency",
        metavar="C",
        type=whole,
        default=16,
        help="Maximum number of requests open at a time (default: %(default)s)",
    )
    add(
        "--num-warmups",
        metavar="N",
        type=count,
        default=0,
        help="Number of requests before these that are not counted (default: %(default)s)",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        type=above_0,
        default=60.0,
        help="Seconds of silence after which a request has failed (default: %(default)s)",
    )


def count(text: str) -> int:
    return 0 if text == "0" else whole(text)


def whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"a whole number above 0, not {text!r}")
    return int(text)


def above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return number


def between(text: str) -> Any:
    from penstock.tools.load.prompts import Between

    try:
        return Between.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def image_size(text: str) -> tuple[int, int]:
    sides = [int(part) for part in text.split("x") if part.isdecimal() and 1 <= int(part) <= MAX_PIXELS]
    if len(sides) != 2 or text.count("x") != 1:
        raise argparse.ArgumentTypeError(f"pixels like 640x480, not {text!r}")
    return sides[0], sides[1]
