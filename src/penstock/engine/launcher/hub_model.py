"""Models by their names on a hub: downloads the files of a model before any process starts.

`huggingface_hub` heeds HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and HF_HOME. No code of a model is downloaded or run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.engine.cluster.weight_files import ALONE, INDEX, read_index
from penstock.engine.launcher.preflight import OTHER_FILES
from penstock.engine.model_dir import CONFIG_FILES, MODULES
from penstock.engine.protocol.option import Option

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = (
    *(*CONFIG_FILES, *OTHER_FILES, "tokenizer.json", "chat_template.jinja", "video_preprocessor_config.json", INDEX),
    *(MODULES, "1_Pooling/config.json"),
)
FILE_NAME = re.compile(r"[\w.-]+\.safetensors")  # of weights, as an index names it


class HubOptions(msgspec.Struct):
    """Options of a model on a hub."""

    revision: Annotated[str | None, Option("model", metavar="NAME", if_absent="main")] = None
    """Branch, tag or commit of a model on a hub"""
    download_dir: Annotated[str | None, Option("model", metavar="DIR", if_absent="the cache of huggingface_hub")] = None
    """Directory for the files of models of a hub"""


def with_hub_model(options: argparse.Namespace) -> argparse.Namespace:
    """Downloads a model named by the options. Returns the options with the directory of the model, and with the name as
    the served name. Raises ValueError, ImportError."""
    name = options.model
    if options.device_model != "real" or not name or os.path.exists(name) or name.startswith((".", "/", "~")):
        return options
    if name.count("/") != 1:
        return options  # an error names the directory that is missing
    if not NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"expected the directory of a model, or its name on a hub as in Qwen/Qwen3-0.6B, got {name!r}")
    directory = download(name, options.revision, options.download_dir)
    served = {"served_model_name": [name]} if getattr(options, "served_model_name", ()) is None else {}
    return argparse.Namespace(**{**vars(options), "model": directory, **served})


def download(name: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Returns the directory of a model with all files for a server. Raises ValueError, ImportError."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download

    def fetch(commit: str | None, files: list[str]) -> str:
        return snapshot_download(name, revision=commit, cache_dir=download_dir, allow_patterns=files)

    try:
        directory = fetch(revision, list(FILES))
        fetch(Path(directory).name, _weights(Path(directory)))  # of the same commit
    except (OSError, ValueError, RuntimeError) as error:  # errors of HTTP are OSErrors, or RuntimeErrors
        text = " ".join(str(error).split())
        at = "" if revision is None else f" at {revision!r}"
        raise ValueError(f"{name!r} is no directory here, and could not be downloaded{at}: {text:.300}") from None
    return directory


def _weights(directory: Path) -> list[str]:
    """Returns the names of the files of weights. Raises ValueError."""
    path = directory / INDEX
    if not path.exists():
        return [ALONE]
    names = sorted({*read_index(path).values()})
    wrong = [name for name in names if not FILE_NAME.fullmatch(name)]
    if wrong:
        raise ValueError(f"{path} names {wrong[0]!r}: expected names of safetensors files beside it")
    return names
