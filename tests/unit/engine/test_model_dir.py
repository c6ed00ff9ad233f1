"""Which words and sampling defaults an engine has, by what it was told of its model."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.model_dir import (
    classifier_ids,
    is_sigmoid,
    load_tokenizer,
    pooling_of,
    require_encoder,
    require_pooling,
    with_model_defaults,
)
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.lora import LoraConfig
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


def encoder(folder: Path, **config: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512, **config}))
    return with_model_defaults(EngineConfig(model=str(folder)))


def test_model_that_attends_both_ways_computes_whole_prompts(tmp_path: Path) -> None:
    config = encoder(tmp_path, max_position_embeddings=8192, architectures=["BertModel"])
    assert (config.pooling, config.is_encoder, config.max_model_len) == ("embed", True, 4096)
    assert config.max_num_batched_tokens == 4096
    assert not (config.enable_prefix_caching or config.keeps_kv_cache)
    assert pooling_of(config) == ("cls", True)
    config = encoder(tmp_path, model_type="xlm-roberta", architectures=["XLMRobertaForSequenceClassification"])
    assert (config.pooling, config.max_model_len) == ("classify", 510)  # positions begin behind that of padding
    assert encoder(tmp_path, model_type="roberta", pad_token_id=0).max_model_len == 511


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_max_tokens": True}, ""),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ""),
    ],
)
def test_encoder_pools_as_sentence_transformers_say(tmp_path: Path, fields: dict[str, Any], mode: str) -> None:
    (tmp_path / "modules.json").write_text(modules("Transformer", "Pooling"))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    config = encoder(tmp_path)
    if mode:
        assert pooling_of(config) == (mode, False)
        return
    with pytest.raises(ValueError, match=r"asks for pooling by .*: supported are cls and mean and lasttoken"):
        pooling_of(config)


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({}, {"runner": "generate"}, "attend both ways, and generate nothing: --runner pooling"),
        ({"architectures": ["BertForTokenClassification"]}, {}, "supported are BertModel, BertForMaskedLM"),
        ({"architectures": ["BertModel"]}, {"convert": "classify"}, "supported are BertForSequenceClassification"),
        ({}, {"tensor_parallel_size": 2}, "expected tensor_parallel_size 1, got 2"),
        ({}, {"lora": LoraConfig(enable_lora=True)}, "LoRA adapters are not supported"),
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type 'relative_key'"),
    ],
)
def test_encoder_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    config = encoder(tmp_path, **fields)
    changes = {"runner": "pooling", **options}
    with pytest.raises(ValueError, match=words):
        require_encoder(msgspec.structs.replace(config, **changes))


def test_classifiers_with_several_labels_or_other_activations_are_refused(tmp_path: Path) -> None:
    architectures = ["BertForSequenceClassification"]
    for fields, is_logistic in (
        ({"id2label": {"0": "LABEL_0"}}, True),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
    ):
        assert is_sigmoid(encoder(tmp_path, architectures=architectures, **fields)) == is_logistic
    for fields, words in (
        ({"id2label": {"0": "a", "1": "b"}}, "has 2 labels"),
        ({}, "has 2 labels"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.GELU"}, "names the activation"),
    ):
        with pytest.raises(ValueError, match=words):
            is_sigmoid(encoder(tmp_path, architectures=architectures, **fields))


def test_tokenizer_neither_cuts_nor_pads_what_its_file_would(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text())
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    path.write_text(json.dumps({**fields, "truncation": cut, "padding": {**pad, "pad_token": "s"}}))
    assert load_tokenizer(EngineConfig(model=str(tmp_path))).encode("sss").ids == [1, 1, 1]


def test_ids_of_no_and_yes_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), runner="pooling", convert="classify")
    with pytest.raises(ValueError, match="has no token 'no': expected classifier_from_token"):
        classifier_ids(config)
    (tmp_path / "config.json").write_text('{"classifier_from_token": ["s", "Ġcat"]}')
    assert classifier_ids(config) == (1, 0)
