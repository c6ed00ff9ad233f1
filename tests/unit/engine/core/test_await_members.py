"""What a core makes of the Ready messages of its ranks."""

import pytest

from penstock.engine.core.await_members import require_one_model
from penstock.engine.protocol.messages import Ready


def test_ranks_that_have_loaded_one_model_have_its_fingerprint() -> None:
    assert require_one_model([Ready(rank, 9, 9, model=7) for rank in (1, 0)]) == 7
    assert require_one_model([Ready(0, 9, 9)]) == 0


def test_ranks_that_have_loaded_different_models_are_named() -> None:
    ready = [Ready(0, 9, 9, model=7), Ready(2, 9, 9, model=7), Ready(1, 9, 9, model=255)]
    with pytest.raises(RuntimeError, match=r"model_fingerprint 0{15}7 on rank 0 and 0{14}ff on rank 1"):
        require_one_model(ready)
