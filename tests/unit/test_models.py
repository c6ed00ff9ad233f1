"""The real device: what it answers is what transformers answers, token for token, however the work is cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'penstock[engine]'")

from penstock import Missing  # noqa: E402
from penstock.engine import vision  # noqa: E402
from penstock.engine.backend import TorchDevice  # noqa: E402
from tests.conftest import spawn  # noqa: E402
from tests.unit.models import BLOCK_SIZE, TEXT, VISION, Asked, Family, ask, made, one_of_the_ranks  # noqa: E402

@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes each one once."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in found:
            found[name] = made(name, folder / name)
        return found[name]

    return get


def device(of: Family, **options: Any) -> TorchDevice:
    given = {"slots": 4, "block_size": BLOCK_SIZE, "blocks": of.blocks, "threads": 1, "fetch": of.images.__getitem__}
    return TorchDevice(of.path, **(given | options))


@pytest.mark.parametrize("name", [*TEXT, *VISION])
def test_greedy_answers_are_those_of_transformers(name: str, family: Callable[[str], Family]) -> None:
    """In chunks, in batches that others join and leave, after preemption, and from blocks that others have filled."""
    of = family(name)
    assert len({tuple(answer) for answer in of.answers}) == len(of.answers), "these prompts show nothing"
    told = ask(device(of), of.asked)
    assert told.answers == of.answers
    assert told.stats.preemptions > 0
    assert told.stats.cached_tokens > 0
