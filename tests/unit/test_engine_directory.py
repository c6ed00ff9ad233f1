"""Which words an engine has, by what it was told of its model."""

from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig, SimulatedDevice
from penstock.engine.directory import vocabulary


def test_a_simulated_device_alone_speaks_in_the_numbers_of_its_tokens() -> None:
    words = vocabulary(EngineConfig(simulated=SimulatedDevice(vocabulary=20)))
    assert [words.piece(one) for one in (0, 19, 20)] == [b" 0", b" 19", b""]


def test_a_simulated_device_with_a_models_directory_speaks_in_the_models_words(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġcat": 0, "s": 1}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    words = vocabulary(EngineConfig(model=str(tmp_path), simulated=SimulatedDevice(vocabulary=2)))
    assert [words.piece(one) for one in (0, 1)] == [b" cat", b"s"]
