"""What tests of deaths share."""

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()
