"""The experiment of public issue #6241 at tiny sizes: every format says the same; figures are what was written."""

import json
import pickle
import sys
from collections.abc import Iterator

import msgspec
import pytest

from bench import codec
from bench.impls import Unavailable
from bench.impls import peer as peer_python
from bench.vs_vllm import collective, comparison, formats, ours, vllm2024, vllm_peer
from bench.vs_vllm.peer_process import PeerProcess
from bench.vs_vllm.rounds import Local, Round, take_turns
from bench.vs_vllm.workload import BLOCK, Decode
from penstock.lowlevel import OutOfStep


@pytest.fixture(autouse=True)
def small_and_without_a_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(peer_python.VARIABLE, raising=False)
    monkeypatch.setattr(comparison, "LONG_PROMPT", 400)  # tokens; the edit distance takes their square
    yield
    vllm_peer.close()


# ── the workload ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_spread_workload_needs_one_block_per_request_in_16_steps() -> None:
    decode = Decode(40, is_spread=True)
    due: list[int] = []
    for _ in range(BLOCK):
        advance = decode.step()
        due += advance.due
        for item in decode.running:
            assert len(item.blocks) * BLOCK > item.computed, "the token that is computed has a place"
        decode.finish(advance)
    assert sorted(due) == list(range(40))


def test_the_state_of_2024_has_the_size_that_the_issue_says() -> None:
    params = vllm2024.params_of(4)
    nbytes = len(pickle.dumps(vllm2024.whole_state(Decode(4, is_spread=True), params)))
    assert 2616 <= nbytes <= 2930
    assert 580 <= len(pickle.dumps(vllm2024.SamplingParams())) <= 640


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("is_spread", [False, True])
def test_formats_read_what_they_write(is_spread: bool) -> None:
    for name, way in formats.steps(5, is_spread=is_spread, steps=16).items():
        if isinstance(way, Local) and name != formats.OURS:
            for message in way.make(20):
                assert way.decode(way.encode(message)) == message, name


def test_structs_without_names_hold_what_the_dataclasses_hold() -> None:
    decode, params = Decode(3, is_spread=True), vllm2024.params_of(3)
    state = vllm2024.whole_state(decode, params)
    classes: dict[type, type] = {}
    created = formats.structs_of(vllm2024.ExecuteModelRequest, classes)
    struct = formats.as_structs(state, classes)
    assert type(struct) is created
    named = msgspec.to_builtins(state)

    def flat(value: object) -> object:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return [flat(item) for item in value.values()]
        if isinstance(value, dict):
            return {key: flat(item) for key, item in value.items()}
        return [flat(item) for item in value] if isinstance(value, list) else value

    assert msgspec.to_builtins(struct) == flat(named)


def test_comparison_has_a_row_per_format_and_sizes_grow_with_requests() -> None:
    outcomes = list(comparison.run([2, 6], rounds=2))
    result = comparison.summary(outcomes)
    for key in ("step_steady", "step_blocks"):
        for name in (formats.WHOLE_PICKLE, formats.WHOLE_NAMES, formats.WHOLE_ARRAYS, formats.GRAPH_PICKLE):
            few, more = result[key, 2][name], result[key, 6][name]
            assert 0 < few["bytes"] < more["bytes"]
            assert few["distance_bytes"] < few["bytes"]
            assert few["encode_us"] > 0 and few["decode_us"] > 0
    names = result["step_steady", 2]
    assert names[formats.WHOLE_ARRAYS]["bytes"] < names[formats.WHOLE_NAMES]["bytes"]
    lines = [line for outcome in outcomes for line in comparison.rows_of(outcome)]
    assert all(json.loads(json.dumps(line)) == line for line in lines)
    missing = {line["impl"]: line["missing"] for line in lines if "missing" in line}
    assert "PENSTOCK_PEER_PYTHON" in missing[formats.REAL]
    assert any("PENSTOCK_PEER_PYTHON" in note for note in comparison.table_of(outcomes[0]).notes)


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", [ours.Steps, ours.Steady])
def test_measured_steps_are_applied_by_core_and_worker(kind: type[ours.Steps]) -> None:
    steps = kind(Decode(20, is_spread=kind is ours.Steps, room=0 if kind is ours.Steps else 64))
    before = steps.states()[1].computed.copy()
    for _ in range(3):
        frames = steps.perform(BLOCK).frames
        core, worker = steps.states()
        assert (core.computed == worker.computed).all() and (core.block_counts == worker.block_counts).all()
        assert all((core.blocks_of(slot) == worker.blocks_of(slot)).all() for slot in range(20))
    assert (steps.states()[1].computed == before + 3 * len(frames)).all()


def test_a_worker_that_does_not_follow_is_an_error_and_not_a_figure() -> None:
    steps = ours.Steps(Decode(4, is_spread=True))
    frame = steps.perform(1).frames[0]
    with pytest.raises(OutOfStep, match="expected change 1000003 of leader 9a7b5c3d, got change 1000002 of"):
        steps.decode(frame)  # again


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Counting:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def perform(self, messages: int) -> Round:
        self.log.append(self.name)
        return Round(1000.0, 2000.0, [b"x" * (index + 1) for index in range(messages)])


def test_ways_take_turns_and_the_first_rounds_are_not_timed() -> None:
    log: list[str] = []
    turns = take_turns({name: Counting(log, name) for name in "abc"}, messages=4, rounds=3)
    assert "".join(log) == "abcbcacababc"
    figures = turns["a"].figures()
    assert (len(turns["a"].encode_ns), figures["bytes"], figures["distance_bytes"]) == (3, 2.5, 1)
    assert (figures["encode_us"], figures["decode_us"], figures["encode_decode_us"]) == (1, 2, 3)


# ── other interpreters ───────────────────────────────────────────────────────────────────────────────────────────────
def test_unusable_peer_interpreter_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, words in (
        ("", "PENSTOCK_PEER_PYTHON names no interpreter"),
        ("/nowhere/python", "is not an executable"),
        (sys.executable, "nowhere is not installed in"),
    ):
        monkeypatch.setenv(peer_python.VARIABLE, named)
        with pytest.raises(Unavailable, match=words):
            peer_python.python_with("nowhere")
    assert peer_python.python_with("json") == sys.executable


def peer(program: str) -> PeerProcess:
    return PeerProcess([sys.executable, "-c", program], "the other")


def test_a_program_answers_line_by_line_and_other_lines_are_passed_over() -> None:
    other = peer("print('log', flush=True); print('{\"x\": 1}', flush=True); print(input(), flush=True)")
    try:
        assert other.receive(20) == {"x": 1}
        other.send({"y": ["é" * 100_000]})
        assert other.receive(20) == {"y": ["é" * 100_000]}
    finally:
        other.close()


def test_a_program_that_dies_is_unavailable_with_its_last_words() -> None:
    other = peer("raise SystemExit('no such thing')")
    try:
        with pytest.raises(Unavailable, match="the other ended: no such thing"):
            other.receive(20)
    finally:
        other.close()


def test_a_program_that_says_nothing_is_unavailable_after_its_time() -> None:
    other = peer("import time; time.sleep(60)")
    try:
        with pytest.raises(Unavailable, match=r"said nothing for 0\.05 s"):
            other.receive(0.05)
    finally:
        other._process.kill()
        other.close()


# ── one broadcast ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_our_side_of_the_broadcast_is_measured_without_torch() -> None:
    import penstock

    with penstock.Broadcast(receivers=2) as channel:
        group = collective.Group("penstock", sys.executable, 2, str(channel.ticket))
        try:
            group.wait_until_ready()
            reports = group.perform("whole", 10, 100)
            assert len(reports) == 3
            assert collective.one_way_us(reports) > 0
            assert collective.per_message_us(reports) > 0
        finally:
            group.close()


def test_the_ratio_is_taken_in_each_round() -> None:
    def figures(gloo: float, ours: float) -> dict[str, float]:
        each = {"gloo_each_us": gloo, "penstock_each_us": ours}
        return {"gloo_one_way_us": gloo, "known_one_way_us": gloo / 2, "penstock_one_way_us": ours, **each}

    result = collective.medians([figures(100, 10), figures(300, 10), figures(1000, 500)])
    assert result["one_way_ratio"] == 10 and result["known_ratio"] == 5
    assert result["gloo_one_way_us"] == 300


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_codec_prints_a_line_of_json_for_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    codec.main(["--json", "--requests", "2,3", "--rounds", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["bench"] for row in rows} == {"codec"}
    assert {row["requests"] for row in rows if row["case"] == "step_steady"} == {2, 3}
    cases = "step_steady step_blocks worker_output api_outputs long_prompt sampling_params".split()
    assert {row["case"] for row in rows} == {"machine", "target", "load", *cases}


def test_codec_prints_tables_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    codec.main(["--requests", "2", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "Decode step of 2 requests, no new blocks" in printed and "times ours" in printed


@pytest.mark.parametrize("words", ["--requests 0", "--requests 4,x", "--rounds 0", "--rounds 100001"])
def test_codec_refuses_a_count_that_is_not_positive(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        codec.main(words.split())
    assert ended.value.code == 2
    assert "1 to 100000, not" in capsys.readouterr().err
