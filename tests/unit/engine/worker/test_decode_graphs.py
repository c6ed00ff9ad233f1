"""Recorded steps of decoding: what they answer is what steps that are not recorded answer, whatever pads them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BLOCK_SIZE, Family, ask, batch_of_rows, device, families, stock_of

# isort: split
import torch

from penstock.cli import parser
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.worker import cuda_graphs, decode_graphs, model_runner, paged_attention
from penstock.engine.worker.decode_graphs import DecodeGraphs, GraphBucket, GraphBuckets
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.model import load
from penstock.engine.worker.paged_attention import (
    AttentionStyle,
    DecodeAttention,
    KVCache,
    KVCacheShape,
    PagedAttention,
)
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.engine.worker.worker import recorder_of
from tests import tiers
from tests.support.ranks import ranks_must_answer
from tests.support.tape import Eager, Tape

CPU, META = torch.device("cpu"), torch.device("meta")


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "name",
    families("llama", "mistral", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "llava", "qwen2_vl", "qwen3_vl"),
)
def test_recorded_steps_answer_what_transformers_answers(name: str, family: Callable[[str], Family]) -> None:
    """With all that is in between: chunks, preemption, blocks of others, and images."""
    of, tape = family(name), Tape()
    result = ask(device(of, recorder=tape), of.requests)
    assert result.answers == of.answers
    assert result.preemptions > 0 and result.cached_tokens > 0
    assert len(tape.replays) == 3 and sum(tape.replays) > 30


def test_tables_that_grow_wider_are_answered_alike(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From form to form, and where there is none, back to steps that are not recorded."""
    monkeypatch.setattr(decode_graphs, "LEAST_POSITIONS", BLOCK_SIZE)
    monkeypatch.setattr(decode_graphs, "MAX_POSITIONS", 16 * BLOCK_SIZE)
    monkeypatch.setattr(paged_attention, "MAX_GATHERED", 5 * BLOCK_SIZE)
    of, tape = family("gemma2"), Tape()
    ours = device(of, blocks=64, recorder=tape)
    unrecorded = counting_eager(monkeypatch)
    assert ask(ours, of.requests).answers == of.answers
    assert {form.width for form in ours._decoding._replays} == {1, 8, 16}
    assert {form.rows for form in ours._decoding._replays} == {1, 2, 4}
    assert any(not batch.chunks for batch in unrecorded), "all steps of decoding were recorded"


def counting_eager(monkeypatch: pytest.MonkeyPatch) -> list[InputBatch]:
    batches: list[InputBatch] = []

    class Counted(PagedAttention):
        def __init__(self, memory: KVCache, batch: InputBatch, where: Any) -> None:
            super().__init__(memory, batch, where)
            batches.append(batch)

    monkeypatch.setattr(model_runner, "PagedAttention", Counted)
    return batches


def test_recorded_steps_know_the_random_tokens_of_others(family: Callable[[str], Family]) -> None:
    of = family("mistral")
    assert ask(device(of, recorder=Tape()), of.requests, seed=5).answers == ask(device(of), of.requests, seed=5).answers


@tiers.needs_all  # each rank imports torch; test_rope has ranks of threads
def test_two_ranks_with_recorded_steps_answer_like_one(family: Callable[[str], Family], tmp_path: Path) -> None:
    ranks_must_answer(2, [family("gemma2")], tmp_path, slice(1, 4), is_recording=True)


# ── forms ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_step_has_the_least_form_that_holds_it() -> None:
    forms = GraphBuckets(slots=30, blocks=1000, block_size=16)
    assert forms.rows == [1, 2, 4, 8, 16, 24, 30]
    assert forms.widths == [16, 32, 64, 128, 256, 512, 1000]
    assert [forms.least(*of) for of in [(1, 1), (3, 16), (5, 17), (25, 129)]] == [(1, 16), (4, 16), (8, 32), (30, 256)]
    assert forms.least(31, 1) is None and forms.least(1, 1001) is None
    assert forms.least(16, 1000) == (16, 1000) and forms.least(17, 1000) is None  # 24 rows see more than is recorded


@pytest.mark.parametrize(("slots", "blocks", "block_size"), [(1, 1, 1), (3, 7, 4), (256, 65536, 16), (4096, 10**6, 16)])
def test_there_are_not_many_forms_and_each_fits_the_numbers_it_is_told_by(
    slots: int, blocks: int, block_size: int
) -> None:
    forms = GraphBuckets(slots, blocks, block_size)
    shapes = {form for rows in forms.rows for width in forms.widths if (form := forms.least(rows, width)) is not None}
    assert GraphBucket(forms.rows[-1], forms.widths[0]) in shapes
    assert len(shapes) <= 300
    most = decode_graphs.MAX_POSITIONS // block_size
    assert all(form.rows * form.width <= most and form.width <= blocks for form in shapes)
    assert forms.rows[-1] <= slots


# ── what a form is computed from ─────────────────────────────────────────────────────────────────────────────────────
def batch_of_lengths(*lengths: int, seed: int = 1) -> InputBatch:
    """Of requests of which a step computes the last token."""
    return batch_of_rows([(length, 1) for length in lengths], blocks=40, seed=seed)


@pytest.mark.parametrize("window", [None, 1, 6, 9])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("most_gathered", [1, 40, 1 << 16])
def test_attention_from_tensors_alone_is_attention(
    window: int | None, softcap: float | None, most_gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wide the table is, and whatever stands beyond what is a row's own."""
    monkeypatch.setattr(paged_attention, "MAX_GATHERED", most_gathered)
    batch = batch_of_lengths(7, 1, 20, 4, 13)
    torch.manual_seed(3)
    memories = [KVCache({0: KVCacheShape(2, 8, 8)}, 40, BLOCK_SIZE, torch.float32, CPU) for _ in range(2)]
    originals = [torch.randn_like(tensor) for tensor in memories[0].layers[0]]
    places = np.concatenate([own_places(batch, row) for row in range(5)])
    for memory in memories:
        for tensor, original in zip(memory.layers[0], originals, strict=True):
            tensor.fill_(float("nan"))  # whatever others have left there is not seen
            tensor[places] = original[places]
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    how = AttentionStyle(0.9, window, softcap)
    table = torch.tensor(np.pad(batch.table, ((0, 0), (0, 3)), constant_values=39)).long()
    fixed = DecodeAttention(memories[0], torch.from_numpy(batch.lengths), table)
    actual = fixed.attend(0, query, key, value, how)
    torch.testing.assert_close(actual, PagedAttention(memories[1], batch, CPU).attend(0, query, key, value, how))
    for ours, other in zip(memories[0].layers[0], memories[1].layers[0], strict=True):
        assert torch.equal(ours.nan_to_num(9), other.nan_to_num(9))


def own_places(batch: InputBatch, row: int) -> Any:
    positions = np.arange(batch.lengths[row] - 1)
    return batch.table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def test_nothing_of_an_earlier_step_pads_a_later_one(family: Callable[[str], Family]) -> None:
    """Rows without a request write where no request reads, and only there."""
    model = load(family("llama").path, TPGroup(), CPU)
    memory = model.memory(41, BLOCK_SIZE)
    decoding = DecodeGraphs(model, memory, Eager(), slots=8)
    many, few = batch_of_lengths(5, 9, 2, 30, 7, 1, 3, seed=2), batch_of_lengths(6, 3, 11, seed=3)
    decoding.hidden(many, torch.arange(7), many.positions)
    before = {layer: [tensor.clone() for tensor in both] for layer, both in memory.layers.items()}
    outcome = decoding.hidden(few, torch.tensor([4, 5, 6]), few.positions)
    assert outcome is not None and outcome.shape[0] == 3
    inputs = decoding._inputs_of(GraphBucket(4, decoding.forms.widths[0]))
    assert inputs.ids.tolist() == [4, 5, 6, 0]
    assert inputs.positions.tolist() == [5, 2, 10, 0] and inputs.lengths.tolist() == [6, 3, 11, 1]
    assert inputs.table[3].eq(40).all() and inputs.table[:, few.table.shape[1] :].eq(40).all()
    for layer, both in memory.layers.items():
        for now, then in zip(both, before[layer], strict=True):
            changed = (now != then).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert set(changed) <= {*few.places.tolist(), 40 * BLOCK_SIZE}


def test_the_block_that_is_nobodys_is_known_to_nobody(family: Callable[[str], Family]) -> None:
    of = family("llama")
    ours = device(of, recorder=Eager())
    assert ours.blocks == of.blocks
    assert ours._memory.blocks == of.blocks + 1
    assert device(of)._memory.blocks == of.blocks
    limited = device(of, recorder=Eager(), blocks=None, max_blocks_per_request=9)
    assert (limited.blocks, limited._memory.blocks) == (9, 10)


@pytest.mark.parametrize("name", families())
def test_no_form_asks_what_a_number_is(name: str, tmp_path: Path) -> None:
    """On a device that has none: asking fails there, and so does bringing numbers along."""
    stock_of(name).save_pretrained(tmp_path)
    model = load(tmp_path, TPGroup(), CPU, torch.bfloat16, is_recorded=True)
    model.stock.to(META)
    model.device = META
    num_position_axes = 3 if hasattr(model.stock.base_model, "get_rope_index") else 1
    decoding = DecodeGraphs(model, model.memory(65, 16), Eager(), 64, num_position_axes)
    assert decoding._compute(GraphBucket(8, 32)).shape == (8, 64)


# ── what cannot be recorded ──────────────────────────────────────────────────────────────────────────────────────────
def test_a_model_that_waits_for_the_device_is_answered_without_recording(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mixture that runs the experts of a token in turn."""
    of, tape = family("qwen3_moe"), Tape()

    def one_by_one(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        model.stock.set_experts_implementation("eager")
        return model

    monkeypatch.setattr(model_runner.models, "load", one_by_one)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        ours = device(of, recorder=tape)
        assert ask(ours, of.requests).answers == of.answers
    assert not sum(tape.replays)
    records = [record for record in caplog.records if record.message == "decode steps are not recorded"]
    assert len(records) == 1 and "called a synchronizing operation: nonzero" in records[0].fields["why"]  # type: ignore[attr-defined]


def test_a_form_that_fails_later_ends_all_recording(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_graphs, "LEAST_POSITIONS", BLOCK_SIZE)
    of = family("llama")

    class Narrow(Tape):
        def record(self, compute: Any) -> Any:
            if len(self.replays) == 5:
                raise torch.OutOfMemoryError("no memory for that")
            return super().record(compute)

    tape = Narrow()
    ours = device(of, recorder=tape)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        assert ask(ours, of.requests).answers == of.answers
        replayed = list(tape.replays)
        assert ask(ours, of.requests).answers == of.answers
    assert 0 < sum(replayed) and tape.replays == replayed
    assert [record.message for record in caplog.records].count("decode steps are not recorded") == 1


def test_what_another_rank_cannot_record_no_rank_replays(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, tape = family("llama"), Tape()
    ours = device(of, recorder=tape)
    ours._decoding._replays.clear()
    monkeypatch.setattr(ours._model.ranks, "least", lambda _: 0)
    assert ask(ours, of.requests).answers == of.answers
    assert not sum(tape.replays)


def test_only_cuda_steps_are_recorded_and_a_refusal_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", Eager)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        assert recorder_of(EngineConfig(model="m", device="cpu")) is None
        assert isinstance(recorder_of(EngineConfig(model="m", device="cuda")), Eager)
        assert not caplog.records
        assert recorder_of(EngineConfig(model="m", device="cuda", enforce_eager=True)) is None
    assert [record.message for record in caplog.records] == ["decode steps are not recorded"]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_command_line_says_whether_steps_are_recorded(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []
    monkeypatch.setattr("penstock.engine.offline.run", lambda config, *_: configs.append(config))
    monkeypatch.setattr("penstock.server.server_launcher.run", lambda config, *_: configs.append(config))
    for options in ([], ["--enforce-eager"], ["--no-enforce-eager"]):
        parsed = parser().parse_args([command, "--device-model", "simulated", *options])
        parsed.run(parsed)
    assert [config.enforce_eager for config in configs] == [False, True, False]
