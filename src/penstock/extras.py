"""How what is missing is installed: errors say it as a command that works where this package came from."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """`pip install 'penstock[engine]'`, or with the directory of the clone that this was installed from."""
    import importlib.metadata
    import json
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    origin = json.loads(importlib.metadata.distribution("penstock").read_text("direct_url.json") or "{}")
    if "dir_info" not in origin:
        return f"pip install 'penstock[{extra}]'"
    editable = "--editable " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}'{url2pathname(urlsplit(origin['url']).path)}[{extra}]'"
