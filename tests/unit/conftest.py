"""What unit tests share besides what every test gets."""

import functools
import itertools
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.models import BuildFamily


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> "BuildFamily":
    """A tiny model by its name, and by what is other than usual, made once, in a folder of its own."""
    from tests.support.models import build_family  # here, because it needs torch

    folder, number = tmp_path_factory.mktemp("models"), itertools.count()
    return functools.cache(lambda name, **changes: build_family(name, folder / f"{name} {next(number)}", **changes))
