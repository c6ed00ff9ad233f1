"""The environment variables of the integration with vLLM."""

import logging
import sys
import types

import pytest

from penstock.integrations.vllm import settings
from penstock.integrations.vllm.settings import Settings, fall_back, fall_backs, read, rebind


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("0", ()),
        ("", ()),
        ("1", ("queue", "images", "tensors")),
        ("queue", ("queue",)),
        ("images, tensors", ("images", "tensors")),
        ("queue,steps", ("queue", "steps")),
    ],
)
def test_settings_name_the_parts_of_the_variable(value: str, parts: tuple[str, ...]) -> None:
    assert read({"PENSTOCK_VLLM": value}).parts == set(parts)


def test_settings_are_off_where_no_variable_is_set() -> None:
    assert read({}) == Settings(frozenset(), latency="auto", views="arena", tensor_mb=256, strict=False)


def test_settings_take_every_variable() -> None:
    environ = {"LATENCY": "spin", "VIEWS": "never", "TENSOR_MB": "64", "STRICT": "1", "CHECK_STEPS": "1"}
    assert read({f"PENSTOCK_VLLM_{name}": value for name, value in environ.items()}) == Settings(
        frozenset(), latency="spin", views="never", tensor_mb=64, strict=True, check_steps=True
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_VLLM", "queues"),
        ("PENSTOCK_VLLM", "2"),
        ("PENSTOCK_VLLM", "steps"),
        ("PENSTOCK_VLLM_LATENCY", "fast"),
        ("PENSTOCK_VLLM_VIEWS", "1"),
        ("PENSTOCK_VLLM_TENSOR_MB", "0"),
        ("PENSTOCK_VLLM_TENSOR_MB", "-1"),
        ("PENSTOCK_VLLM_TENSOR_MB", "1e3"),
        ("PENSTOCK_VLLM_TENSOR_MB", "99999999999"),
        ("PENSTOCK_VLLM_STRICT", "yes"),
        ("PENSTOCK_VLLM_CHECK_STEPS", "yes"),
    ],
)
def test_settings_say_which_variable_has_a_wrong_value(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^expected {variable} to .*, got '{value}'$"):
        read({variable: value})


def test_a_fall_back_is_logged_once_and_counted_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "fall_backs", type(fall_backs)())
    monkeypatch.delenv("PENSTOCK_VLLM_STRICT", raising=False)
    with caplog.at_level(logging.WARNING):
        for sentence in ("65 local readers", "65 local readers", "no memory"):
            fall_back("queue", sentence)
    assert settings.fall_backs == {("queue", "65 local readers"): 2, ("queue", "no memory"): 1}
    assert [record.getMessage() for record in caplog.records] == [
        "penstock leaves queue to vLLM's own: 65 local readers",
        "penstock leaves queue to vLLM's own: no memory",
    ]


def test_a_fall_back_is_an_error_when_it_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "fall_backs", type(fall_backs)())
    monkeypatch.setenv("PENSTOCK_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"^queue: no memory \(PENSTOCK_VLLM_STRICT=1"):
        fall_back("queue", "no memory")
    assert settings.fall_backs == {("queue", "no memory"): 1}


def test_rebind_reaches_modules_outside_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    original, replacement = type("Queue", (), {}), type("Queue", (), {})
    modules = [types.ModuleType(name) for name in ("vllm.stand_in", "another_library")]
    for module in modules:
        vars(module)["Queue"] = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rebind(original, replacement)
    assert [vars(module)["Queue"] for module in modules] == [replacement, replacement]
