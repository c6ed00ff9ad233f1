"""What to type where a package is missing: it must be true in a clone, and where there is none."""

import importlib.metadata
import sys
from typing import Any

import pytest

from penstock.installing import how_to_install


def installed_from(direct_url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return direct_url

    result: Any = lambda name: Distribution()  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "distribution", result)


@pytest.mark.parametrize(
    ("direct_url", "what"),
    [
        (None, "penstock[engine]"),
        ('{"url": "https://x/penstock.whl", "archive_info": {}}', "penstock[engine]"),
        ('{"url": "file:///tmp/penstock.whl", "archive_info": {}}', "penstock[engine]"),
        ('{"url": "file:///src/penstock", "dir_info": {}}', "/src/penstock[engine]"),
        ('{"url": "file:///my%20src/penstock", "dir_info": {}}', "/my src/penstock[engine]"),
    ],
)
def test_a_hint_names_the_clone_only_where_there_is_one(
    direct_url: str | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(direct_url, monkeypatch)
    assert how_to_install("engine") == f"{sys.executable} -m pip install '{what}'"


def test_a_hint_keeps_an_editable_install_editable(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from('{"url": "file:///src/penstock", "dir_info": {"editable": true}}', monkeypatch)
    assert how_to_install("load").endswith(" -m pip install --editable '/src/penstock[load]'")


def test_a_hint_is_there_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert how_to_install("engine").endswith(" -m pip install 'penstock[engine]'")
