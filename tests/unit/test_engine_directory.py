"""Which words an engine has, by what it was told of its model."""

from pathlib import Path

import numpy as np
import pytest

from penstock.engine.config import EngineConfig, SimulatedDevice
from penstock.engine.directory import completed, vocabulary
from penstock.engine.simulated import Rule


def test_a_simulated_device_alone_speaks_in_the_numbers_of_its_tokens() -> None:
    words = vocabulary(EngineConfig(simulated=SimulatedDevice(vocabulary=20)))
    assert [words.piece(one) for one in (0, 19, 20)] == [b" 0", b" 19", b""]


def save_tokenizer(folder: Path) -> None:
    """Of two words."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġcat": 0, "s": 1}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def test_a_simulated_device_with_a_models_directory_speaks_in_the_models_words(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    words = vocabulary(EngineConfig(model=str(tmp_path), simulated=SimulatedDevice(vocabulary=2)))
    assert [words.piece(one) for one in (0, 1)] == [b" cat", b"s"]


def test_a_simulated_device_with_a_models_directory_gives_ids_of_its_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = completed(EngineConfig(model=str(tmp_path), simulated=SimulatedDevice()))
    assert config.simulated is not None and config.simulated.vocabulary == 2
    answer = Rule(config.simulated).answer(np.arange(5, dtype=np.int32), 50)
    assert set(answer) == {0, 1}
    words = vocabulary(config)
    assert all(words.piece(one) for one in answer)
