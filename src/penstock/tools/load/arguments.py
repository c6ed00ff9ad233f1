"""What stands on the command line of `penstock bench serve`, and what a run is told by it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

MOST_PIXELS = 1 << 14  # of a side
KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own client


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", metavar="URL", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    add("--model", metavar="NAME", default="", help="as the server calls it (the first one that it names)")
    add("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE, ""), help=f"or {KEY_VARIABLE}")
    add("--endpoint", choices=["completions", "chat"], help="completions, unless there are images")
    add("--requests", metavar="N", type=whole, default=100, help="in all (100)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--rate", metavar="R", type=above_0, help="requests a second, at random times, whatever is open")
    when.add_argument("--concurrency", metavar="C", type=whole, default=16, help="or so many open at a time (16)")
    add("--input-tokens", metavar="N|N-M", type=between, default="128", help="of a prompt's text, about (128)")
    add("--output-tokens", metavar="N|N-M", type=between, default="128", help="of an answer, at most (128)")
    add("--images", metavar="N", type=count, default=0, help="in each prompt (0)")
    add("--image-size", metavar="WxH", type=image_size, default="256x256", help="in pixels (256x256)")
    add(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help="instead: lines with a text, or {prompt|messages, …}",
    )
    add("--ignore-eos", action="store_true", help="answers are as long as they may be, if the server knows of this")
    add("--seed", metavar="N", type=int, default=0, help="of prompts, images and arrivals (0)")
    add("--warmup", metavar="N", type=count, default=0, help="requests before these, which are not counted (0)")
    add("--timeout", metavar="SECONDS", type=above_0, default=60.0, help="of silence; then a request has failed (60)")
    add("--json", metavar="FILE", type=Path, help="all figures, as one object")


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
    sides = [int(part) for part in text.split("x") if part.isdecimal() and 1 <= int(part) <= MOST_PIXELS]
    if len(sides) != 2 or text.count("x") != 1:
        raise argparse.ArgumentTypeError(f"pixels like 640x480, not {text!r}")
    return sides[0], sides[1]
