"""What to type where a package is missing."""

from __future__ import annotations

import json
import shlex
import sys
from urllib.parse import unquote


def how_to_install(extra: str) -> str:
    """The command that installs an extra into this environment: from the clone that Penstock was installed from, or by
    its name, where it was no clone."""
    option, source = _source()
    return f"{shlex.quote(sys.executable)} -m pip install {option}{shlex.quote(f'{source}[{extra}]')}"


def _source() -> tuple[str, str]:
    """An option of pip, and what it installs."""
    from importlib import metadata  # 12 ms, which an import of the data plane does without

    try:
        origin = json.loads(metadata.distribution("penstock").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    url = str(origin.get("url", ""))
    if not url.startswith("file://") or "dir_info" not in origin:  # of an index, or a wheel
        return "", "penstock"
    return "--editable " if origin["dir_info"].get("editable") else "", unquote(url.removeprefix("file://"))
