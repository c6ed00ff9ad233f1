"""`register`, the entry point that vLLM calls, where it decides what to replace."""

import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator

import pytest

from penstock import stack_dump
from penstock.environment import VLLM, VLLM_STRICT, VLLM_VIEWS
from penstock.integrations import vllm
from penstock.integrations.vllm import seams, settings
from penstock.integrations.vllm.settings import Settings


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Settings]]:
    """The settings that each part was given, when it was told to replace what is vLLM's; no part needs a vLLM."""
    replaced: dict[str, Settings] = {}
    for part in vllm.MODULES:
        module = types.ModuleType(part)
        module.replace = lambda settings, part=part: replaced.__setitem__(part, settings)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"stand_in_{part}", module)
    monkeypatch.setattr(vllm, "MODULES", {part: f"stand_in_{part}" for part in vllm.MODULES})
    monkeypatch.setattr(stack_dump, "register", lambda: None)  # its descriptor stays open
    monkeypatch.setattr(seams, "misfit", lambda part: None)
    monkeypatch.setattr(seams, "growths", lambda part: [])
    monkeypatch.setattr(settings, "fall_backs", type(settings.fall_backs)())
    for variable in (VLLM, VLLM_STRICT, VLLM_VIEWS):
        monkeypatch.delenv(variable.name, raising=False)
    yield replaced


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_register_replaces_nothing_and_says_nothing_when_it_is_off(
    replaced: dict[str, Settings], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        vllm.register()
    assert not replaced
    assert not lines(caplog)


def test_register_replaces_the_named_parts_and_says_so_in_one_line(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue,images,steps")
    with caplog.at_level(logging.INFO):
        vllm.register()
    assert replaced.keys() == {"queue", "images"}
    assert all(settings.parts == {"queue", "images", "steps"} for settings in replaced.values())
    assert lines(caplog) == ["penstock replaces of vLLM: queue, images, steps"]


def test_register_leaves_a_part_alone_that_does_not_fit(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue,images,steps")
    monkeypatch.setattr(seams, "misfit", {"queue": None, "images": "images differ", "steps": "steps differ"}.get)
    with caplog.at_level(logging.INFO):
        vllm.register()
    assert {part: settings.parts for part, settings in replaced.items()} == {"queue": {"queue"}}
    assert lines(caplog) == [
        "penstock leaves images to vLLM's own: images differ",
        "penstock leaves steps to vLLM's own: steps differ",
        "penstock replaces of vLLM: queue",
    ]


def test_register_leaves_a_part_alone_that_cannot_be_loaded(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "tensors,images")
    monkeypatch.setitem(sys.modules, "stand_in_images", None)
    vllm.register()
    assert replaced.keys() == {"tensors"}
    assert "leaves images to vLLM's own: ModuleNotFoundError" in lines(caplog)[0]


def test_register_runs_vllm_as_it_is_when_a_value_is_wrong(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue")
    monkeypatch.setenv("PENSTOCK_VLLM_VIEWS", "sometimes")
    vllm.register()
    assert not replaced
    assert lines(caplog) == [
        "expected PENSTOCK_VLLM_VIEWS to be arena, always or never, got 'sometimes'; vLLM runs as it is"
    ]


@pytest.mark.parametrize("wrong", ["value", "misfit"])
def test_register_raises_when_it_is_strict(
    wrong: str, replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue" if wrong == "misfit" else "queu")
    monkeypatch.setenv("PENSTOCK_VLLM_STRICT", "1")
    monkeypatch.setattr(seams, "misfit", lambda part: "it differs")
    with pytest.raises((ValueError, RuntimeError), match=r"it differs|'queu'"):
        vllm.register()
    assert not replaced


def test_register_is_the_entry_point_of_vllm_in_the_installed_package() -> None:
    points = {point.value: point for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert points["penstock.integrations.vllm:register"].load() is vllm.register


def test_register_leaves_images_to_a_frontend_in_rust(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue,images")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    vllm.register()
    assert replaced.keys() == {"queue"}
    assert "leaves images to vLLM's own: the frontend in Rust" in lines(caplog)[0]


def test_register_warns_of_names_that_no_part_knows(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_VLLM", "queue")
    monkeypatch.setattr(seams, "growths", lambda part: ["in this vLLM Queue also has peek"])
    vllm.register()
    assert replaced.keys() == {"queue"}
    assert lines(caplog)[0] == "in this vLLM Queue also has peek, which penstock's queue does not know"
