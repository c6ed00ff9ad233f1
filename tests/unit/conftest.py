"""What unit tests share besides what every test gets."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.models import Family


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Family]":
    """A tiny model by its name, made once, in a folder of its own."""
    from tests.unit.models import made  # here, because it needs torch

    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: made(name, folder / name))
