"""Vectors and scores of models that attend both ways are those of transformers, in batches of mixed lengths."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("tokenizers")

from penstock.engine.model_dir import pooling_of, with_model_defaults  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.worker.encoder_runner import EncoderRunner  # noqa: E402
from penstock.engine.worker.pooler import Pooler  # noqa: E402
from tests.support.encoders import reference_logits, reference_vectors, tokenized, write_encoder  # noqa: E402

LENGTHS = (17, 3, 128, 17, 40, 1, 17)
PAIRS = [("a question", "an answer"), ("?", "x" * 90), ("a question", "no"), ("[SEP]", "a")]


def runner_of(path: Path, **options: Any) -> EncoderRunner:
    config = with_model_defaults(EngineConfig(model=str(path), dtype="float32", **options))
    is_normalized = config.pooling == "classify" or pooling_of(config).is_normalized
    return EncoderRunner(config, Pooler(None, is_normalized=is_normalized))


def computed(runner: EncoderRunner, prompts: list[list[int]]) -> list[Any]:
    """Returns the vectors of a step with these prompts, in slots with gaps between them."""
    slots = np.arange(len(prompts)) * 2 + 1
    by_slot: list[Any] = [None] * (2 * len(prompts))
    for slot, ids in zip(slots.tolist(), prompts, strict=True):
        by_slot[slot] = np.array(ids, np.int32)
    batch: Any = SimpleNamespace(sampled=slots, prompts=by_slot)
    nothing: Any = None
    output = runner.launch(batch, nothing).result()
    assert not output.failed and len(output.vectors) == len(prompts)
    return [np.array(handle.open().value(), np.float32) for handle in output.vectors]


@pytest.mark.parametrize(
    ("name", "mode", "pools"),
    [
        ("bert", "mean_tokens", "mean"),
        ("modernbert", "cls_token", "cls"),
        ("roberta", "", "cls"),
        ("xlm-roberta", "lasttoken", "last"),
    ],
)
def test_vectors_of_mixed_lengths_are_those_of_transformers(name: str, mode: str, pools: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / name, name, mode, max_position_embeddings=130)
    chance = np.random.default_rng(3)
    prompts = [chance.integers(3, 200, length).tolist() for length in LENGTHS]
    runner = runner_of(path)
    expected = reference_vectors(path, prompts, pools)
    for vector, reference in zip(computed(runner, prompts), expected, strict=True):
        assert float(vector @ reference) / float(np.linalg.norm(reference)) >= 0.9999
        assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-5)
    alone = [computed(runner, [ids])[0] for ids in prompts]
    assert np.abs(np.array(alone) - np.array(computed(runner, prompts))).max() <= 1e-5


def test_vectors_keep_their_lengths_without_a_module_that_normalizes(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "bert", "bert", "mean_tokens", normalizes=False)
    prompts = [[1, 5, 6, 7, 2], [1, 9, 2]]
    for vector, reference in zip(
        computed(runner_of(path), prompts), reference_vectors(path, prompts, "mean"), strict=True
    ):
        assert np.abs(vector - reference).max() <= 1e-4 * float(np.linalg.norm(reference)) > 1e-4


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_scores_are_those_of_the_classifier(name: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / name, name, num_labels=1)
    runner = runner_of(path)
    offset = runner.vocabulary // 2 if name == "bert" else 0
    prompts = []
    for pair in PAIRS:
        ids, types = tokenized(path, *pair)
        prompts.append([token + kind * offset for token, kind in zip(ids, types, strict=True)])
    logits = reference_logits(path, PAIRS)
    expected = torch.sigmoid(torch.tensor(logits)).tolist()
    assert [float(score[0]) for score in computed(runner, prompts)] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == len(expected)


def test_bert_with_a_single_type_of_tokens_takes_no_ids_of_second_texts(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "bert", "bert", type_vocab_size=1)
    runner, prompt = runner_of(path), [1, 5, 6, 2]
    assert runner.vocabulary == runner._stock.config.vocab_size  # the core refuses ids beyond: none ends the worker
    (expected,) = reference_vectors(path, [prompt], "cls")
    (vector,) = computed(runner, [prompt])
    assert float(vector @ expected) / float(np.linalg.norm(expected)) >= 0.9999


def test_score_is_the_logit_where_config_json_says_so(tmp_path: Path) -> None:
    path = write_encoder(
        tmp_path / "bert", "bert", num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"
    )
    runner = runner_of(path)
    ids, types = tokenized(path, *PAIRS[0])
    prompt = [token + kind * runner.vocabulary // 2 for token, kind in zip(ids, types, strict=True)]
    assert float(computed(runner, [prompt])[0][0]) == pytest.approx(reference_logits(path, PAIRS[:1])[0], abs=1e-4)


def test_logits_that_are_not_finite_fail_their_row_alone(tmp_path: Path) -> None:
    runner = runner_of(write_encoder(tmp_path / "bert", "bert"))
    with torch.inference_mode():
        runner._stock.embeddings.word_embeddings.weight[77] = float("nan")
    batch: Any = SimpleNamespace(
        sampled=np.array([0, 1]), prompts=[np.array([1, 77, 2], np.int32), np.array([1, 5, 6, 2], np.int32)]
    )
    nothing: Any = None
    assert [*runner.launch(batch, nothing).result().failed] == [0]
