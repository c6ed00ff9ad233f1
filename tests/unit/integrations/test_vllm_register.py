"""`register`, the entry point that vLLM calls, where it decides what to replace."""

import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable, Iterator

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


@pytest.fixture
def register(
    replaced: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., list[str]]:
    """Calls `register` with variables of the environment, and returns the lines of the log."""

    def call(**variables: str) -> list[str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.INFO):
            vllm.register()
        return [record.getMessage() for record in caplog.records]

    return call


Replaced, Register = dict[str, Settings], Callable[..., list[str]]


def test_register_replaces_nothing_and_says_nothing_when_it_is_off(replaced: Replaced, register: Register) -> None:
    assert register() == [] and not replaced


def test_register_replaces_the_named_parts_and_says_so_in_one_line(replaced: Replaced, register: Register) -> None:
    assert register(PENSTOCK_VLLM="queue,images,steps") == ["penstock replaces of vLLM: queue, images, steps"]
    assert replaced.keys() == {"queue", "images"}
    assert all(settings.parts == {"queue", "images", "steps"} for settings in replaced.values())


def test_register_leaves_a_part_alone_that_does_not_fit(
    replaced: Replaced, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "misfit", {"queue": None, "images": "images differ", "steps": "steps differ"}.get)
    assert register(PENSTOCK_VLLM="queue,images,steps") == [
        "penstock leaves images to vLLM's own: images differ",
        "penstock leaves steps to vLLM's own: steps differ",
        "penstock replaces of vLLM: queue",
    ]
    assert {part: settings.parts for part, settings in replaced.items()} == {"queue": {"queue"}}


def test_register_leaves_a_part_alone_that_cannot_be_loaded(
    replaced: Replaced, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stand_in_images", None)
    line = register(PENSTOCK_VLLM="tensors,images")[0]
    assert "leaves images to vLLM's own: ModuleNotFoundError" in line and replaced.keys() == {"tensors"}


def test_register_leaves_images_to_a_frontend_in_rust(replaced: Replaced, register: Register) -> None:
    assert (
        "leaves images to vLLM's own: the frontend in Rust"
        in register(PENSTOCK_VLLM="queue,images", VLLM_USE_RUST_FRONTEND="1")[0]
    )
    assert replaced.keys() == {"queue"}


def test_register_warns_of_names_that_no_part_knows(
    replaced: Replaced, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "growths", lambda part: ["in this vLLM Queue also has peek"])
    line = register(PENSTOCK_VLLM="queue")[0]
    assert line == "in this vLLM Queue also has peek, which penstock's queue does not know"
    assert replaced.keys() == {"queue"}


def test_register_runs_vllm_as_it_is_when_a_value_is_wrong(replaced: Replaced, register: Register) -> None:
    text = "expected PENSTOCK_VLLM_VIEWS to be arena, always or never, got 'sometimes'; vLLM runs as it is"
    assert register(PENSTOCK_VLLM="queue", PENSTOCK_VLLM_VIEWS="sometimes") == [text] and not replaced


@pytest.mark.parametrize("wrong", ["value", "misfit"])
def test_register_raises_when_it_is_strict(
    wrong: str, replaced: Replaced, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "misfit", lambda part: "it differs")
    with pytest.raises((ValueError, RuntimeError), match=r"it differs|'queu'"):
        register(PENSTOCK_VLLM="queue" if wrong == "misfit" else "queu", PENSTOCK_VLLM_STRICT="1")
    assert not replaced


def test_register_is_the_entry_point_of_vllm_in_the_installed_package() -> None:
    points = {point.value: point for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert points["penstock.integrations.vllm:register"].load() is vllm.register
