"""The command that installs what is missing: by where this package came from."""

import importlib.metadata
import json
from typing import Any

import pytest

from penstock.extras import install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'penstock[engine]'"),
        ({"url": "https://host/penstock.whl", "archive_info": {}}, "pip install 'penstock[engine]'"),
        ({"url": "file:///a%20b/clone", "dir_info": {}}, "pip install '/a b/clone[engine]'"),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "pip install --editable '/clone[engine]'"),
    ],
)
def test_the_command_names_what_this_was_installed_from(
    origin: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert install_command("engine") == command
