"""The public names of the bridge: each is described, with lines that run, and its users need no private name."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock
from penstock import bridge
from tests.unit.test_api import GLOBALS, must_run, parameters_of

NAMES = {name: getattr(bridge, name) for name in bridge.__all__}
METHODS = {
    f"{name}.{key}": member
    for name, cls in NAMES.items()
    if inspect.isclass(cls)
    for key, member in vars(cls).items()
    if not key.startswith("_") and inspect.isfunction(member)
}


@pytest.mark.parametrize("name", bridge.__all__)
def test_public_name_of_the_bridge_has_an_example_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        **NAMES,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "PenstockError": penstock.PenstockError,
    }.items():
        monkeypatch.setitem(GLOBALS, key, value)
    must_run(name, inspect.getdoc(NAMES[name]) or "")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_bridge_is_described_where_it_has_parameters(name: str) -> None:
    assert inspect.getdoc(METHODS[name]) or not parameters_of(METHODS[name]), f"{name} has no docstring"
