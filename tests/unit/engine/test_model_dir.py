"""Which words and sampling defaults an engine has, by what it was told of its model."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.engine.model_dir import classifier_ids, require_pooling, with_model_defaults
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.text.detokenizer import load_vocabulary
from penstock.engine.worker.simulated_device import TokenRule


def test_a_simulated_device_alone_speaks_in_the_numbers_of_its_tokens() -> None:
    words = load_vocabulary(EngineConfig(simulated=SimulatedDevice(vocabulary=20)))
    assert [words.token_bytes(token) for token in (0, 19, 20)] == [b" 0", b" 19", b""]


def save_tokenizer(folder: Path) -> None:
    """Of two words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġcat": 0, "s": 1}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_simulated_device_with_a_model_directory_uses_its_vocabulary(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    words = load_vocabulary(EngineConfig(model=str(tmp_path), simulated=SimulatedDevice(vocabulary=2)))
    assert [words.token_bytes(token) for token in (0, 1)] == [b" cat", b"s"]


def test_simulated_device_with_a_model_directory_gives_ids_of_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = with_model_defaults(EngineConfig(model=str(tmp_path), simulated=SimulatedDevice()))
    assert config.simulated is not None and config.simulated.vocabulary == 2
    answer = TokenRule(config.simulated).answer(np.arange(5, dtype=np.int32), 50)
    assert set(answer) == {0, 1}
    words = load_vocabulary(config)
    assert all(words.token_bytes(token) for token in answer)


@pytest.mark.parametrize(
    ("file", "sampling"),
    [
        ({}, {}),
        ({"temperature": None, "do_sample": True, "pad_token_id": 0, "num_beams": 4}, {}),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ({"max_new_tokens": 2048, "top_k": -1}, {"max_tokens": 2048, "top_k": 0}),
    ],
)
def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path, file: dict, sampling: dict) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    config = EngineConfig(model=str(tmp_path))
    assert with_model_defaults(config).sampling_defaults.explicit == sampling
    neutral = msgspec.structs.replace(config, generation_config="vllm")
    assert with_model_defaults(neutral).sampling_defaults.explicit == {}


def test_sampling_defaults_are_neutral_without_generation_config(tmp_path: Path) -> None:
    assert with_model_defaults(EngineConfig(model=str(tmp_path))).sampling_defaults.explicit == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"temperature": "hot"}', "Expected `float | null`, got `str`"),
        ('{"top_p": 0}', "expected top_p above 0"),
        ('{"max_new_tokens": 0}', "expected max_tokens between 1 and"),
    ],
)
def test_impossible_sampling_defaults_are_refused_with_a_way_out(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json \(--generation-config vllm") as caught:
        with_model_defaults(EngineConfig(model=str(tmp_path)))
    assert why in str(caught.value)
    with_model_defaults(EngineConfig(model=str(tmp_path), generation_config="vllm"))


# ── pooling ──
def modules(*names: str) -> str:
    return json.dumps([{"type": f"sentence_transformers.models.{name}", "path": f"1_{name}"} for name in names])


def test_model_of_sentence_transformers_pools_unless_told_otherwise(tmp_path: Path) -> None:
    assert with_model_defaults(EngineConfig(model=str(tmp_path))).pooling == ""
    (tmp_path / "modules.json").write_text(modules("Transformer", "Pooling", "Normalize"))
    config = with_model_defaults(EngineConfig(model=str(tmp_path)))
    assert (config.pooling, config.output_processors) == ("embed", 0)
    assert with_model_defaults(EngineConfig(model=str(tmp_path), runner="generate")).pooling == ""


def test_pooling_of_other_tokens_than_the_last_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), runner="pooling")
    (tmp_path / "modules.json").write_text(modules("Transformer", "Pooling"))
    require_pooling(config)  # no file says how: as the last token
    (tmp_path / "1_Pooling").mkdir()
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text('{"word_embedding_dimension": 8, "pooling_mode_lasttoken": true, "pooling_mode_cls_token": false}')
    require_pooling(config)
    path.write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(ValueError, match=r"1_Pooling/config.json asks for pooling by \['mean_tokens'\]"):
        require_pooling(config)
    (tmp_path / "modules.json").write_text(modules("Transformer", "Dense"))
    with pytest.raises(ValueError, match="names a module Dense"):
        require_pooling(config)


def test_ids_of_no_and_yes_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), runner="pooling", convert="classify")
    with pytest.raises(ValueError, match="has no token 'no': expected classifier_from_token"):
        classifier_ids(config)
    (tmp_path / "config.json").write_text('{"classifier_from_token": ["s", "Ġcat"]}')
    assert classifier_ids(config) == (1, 0)
