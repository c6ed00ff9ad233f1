"""What `scripts/bench vllm` says of what it found, and the environments of its ways; that it runs is shown in e2e."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from bench.harness.turns import Outcome
from bench.impls import Unavailable
from bench.vllm_cases import goals, serving, sleeping, ways
from bench.vllm_cases.queues import MB, VIEWS
from bench.vllm_cases.tables import ratio_to_better, spread
from bench.vllm_cases.ways import AS_IT_IS, OURS, PARKING


def rounds_of(key: str, **by_way: list[float]) -> Outcome:
    return Outcome({name.replace("_", "-"): [{key: value} for value in values] for name, values in by_way.items()})


def met(result: goals.Found) -> dict[str, bool | None]:
    return {target.case: target.is_met for target in goals.targets(result)}


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ratio_to_the_better_takes_the_better_of_each_round() -> None:
    outcome = rounds_of("ms", penstock=[10, 10, 10], vllm=[5, 20, 20], vllm_parking=[20, 5, 10])
    assert ratio_to_better(outcome, OURS, (AS_IT_IS, PARKING), "ms") == 2
    assert ratio_to_better(rounds_of("ms", penstock=[1], vllm=[1]), OURS, (AS_IT_IS, PARKING), "ms") is None


def test_spread_shows_least_and_most_where_there_are_several_rounds() -> None:
    assert spread([0.002, 0.001, 0.004], 1000) == "2 (1–4)"
    assert spread([7]) == "7"


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("latency, limits", [(1.0, (1.05, 0.15)), (1.2, (1.25, 0.06)), (None, (1.25, 0.06))])
def test_worker_may_use_more_processor_when_as_fast_as_a_spinning_one(
    latency: float | None, limits: tuple[float, float]
) -> None:
    assert goals.paced_limits(goals.FAST_PACE, latency) == limits
    assert goals.paced_limits(goals.SLOW_PACE, latency) == (1.0, 0.02)


def test_targets_of_a_way_that_was_left_out_are_not_measured() -> None:
    outcome = rounds_of("round_trip_p50_us", vllm=[1.0, 2.0])
    assert met(goals.Found(steps={(2, 32): outcome})) == {
        "back to back, 2 worker(s), 32 requests: p50, of vLLM's": None
    }


def test_targets_compare_copies_views_and_arena_each_with_its_own_of_vllm() -> None:
    outcome = rounds_of("round_trip_p50_us", vllm=[10], penstock=[10])
    outcome.rounds[AS_IT_IS + VIEWS] = [{"round_trip_p50_us": 4}]
    outcome.rounds[OURS + VIEWS] = [{"round_trip_p50_us": 5}]
    about = "15 MiB in a step, 2 workers: as"
    assert met(goals.Found(tensors={(2, 15 * MB): outcome})) == {
        f"{about} copies, of vLLM's default": True,
        f"{about} views, of vLLM's default": True,
        f"{about} views, of vLLM's arena": False,
    }


def test_targets_of_steps_are_of_a_step_and_its_output_together() -> None:
    def figures(step: float, output: float) -> dict[str, float]:
        return {f"{what}_{unit}": value for unit in ("both_us", "nbytes") for what, value in sizes(step, output)}

    def sizes(step: float, output: float) -> list[tuple[str, float]]:
        return [("step", step), ("output", output)]

    outcome = Outcome({"pickle": [figures(100, 60)], "change": [figures(2, 6)]})
    result = goals.Found(codec={256: outcome})
    assert [target.figure for target in goals.targets(result)] == [0.05, 0.05]
    assert [target.figure for target in goals.targets(goals.Found(codec={256: Outcome()}))] == [None, None]


def test_the_ratio_of_starts_is_of_servers_started_in_the_same_case() -> None:
    result = goals.Found(starts=[{AS_IT_IS: 10.0, OURS: 9.0}, {AS_IT_IS: 30.0}, {AS_IT_IS: 20.0, OURS: 30.0}])
    target = next(target for target in goals.targets(result) if "first answer" in target.case)
    assert target.figure == pytest.approx(1.2)


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_servers_are_refused_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    serving.check_memory(0)
    with pytest.raises(Unavailable, match="100000 servers want"):
        serving.check_memory(100_000)


def test_an_image_load_asks_for_large_images_in_chats() -> None:
    output = serving.IMAGES.loads[0].options()
    assert "--images=1" in output and "--image-size=504x504" in output and "--backend=openai-chat" in output
    assert "--images=0" in serving.TEXT.loads[0].options()
    assert [load.concurrency for load in serving.quick(serving.TEXT).loads] == [4, 16]


# ── the device that sleeps ───────────────────────────────────────────────────────────────────────────────────────────
def test_a_device_runs_steps_one_after_the_other() -> None:
    device = sleeping.Device(5.0)
    first = device.launch()
    assert device.launch() == first + 5.0


def scheduled(tokens: dict[str, int], computed: dict[str, int], **new: int) -> Any:
    """A step of vLLM's scheduler; `new`: the prompt lengths of requests that join."""
    joining = [
        SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=0)
        for name, length in new.items()
    ]
    cached = SimpleNamespace(req_ids=list(computed), num_computed_tokens=list(computed.values()))
    return SimpleNamespace(
        scheduled_new_reqs=joining, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens, finished_req_ids=set()
    )


def test_a_step_samples_for_requests_whose_prompt_it_completes() -> None:
    lengths, token = sleeping.Lengths(), [sleeping.TOKEN]
    assert lengths.sampled(scheduled({"a": 8, "b": 4}, {}, a=8, b=10)) == [token, []]
    assert lengths.sampled(scheduled({"a": 1, "b": 4}, {"a": 8, "b": 4})) == [token, []]
    assert lengths.sampled(scheduled({"b": 2, "a": 1}, {"a": 9, "b": 8})) == [token, token]


# ── ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
LOOK = (
    "import importlib.metadata as m, importlib.util as u; p = m.entry_points(group='vllm.general_plugins');"
    "print(sorted((each.name, each.value) for each in p)); print(u.find_spec('penstock').origin);"
    "print(m.version('penstock'))"
)


def seen_by(way: ways.Way, program: str) -> str:
    """Runs a program that sees what the way gives it, and nothing that is installed."""
    environment = {**os.environ, **way.environment}
    run = subprocess.run([way.python, "-S", "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_ours_has_penstock_and_its_plugin_without_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "python_with", lambda module: sys.executable)
    monkeypatch.delenv("PENSTOCK_VLLM", raising=False)
    way = ways.find(OURS, tmp_path, {"sleeping": "bench.vllm_cases.sleeping:register"})
    points, place, version = seen_by(way, LOOK).splitlines()
    assert "('penstock', 'penstock.integrations.vllm:register')" in points
    assert "('sleeping', 'bench.vllm_cases.sleeping:register')" in points
    assert Path(place) == tmp_path / OURS / "penstock" / "__init__.py" and version == penstock.__version__
    assert list(Path(place).parent.glob("_native.*.so")), "the core lies elsewhere in an editable install"
    assert way.environment["PENSTOCK_VLLM"] == "1"


def test_settings_of_the_environment_hold_for_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "python_with", lambda module: sys.executable)
    monkeypatch.setenv("PENSTOCK_VLLM", "queue,steps")
    assert ways.find(OURS, tmp_path).environment["PENSTOCK_VLLM"] == "queue,steps"
    assert ways.find(PARKING, tmp_path).environment["PENSTOCK_VLLM"] == "0"
    assert ways.find(AS_IT_IS, tmp_path).environment["PENSTOCK_VLLM"] == "0"


def test_ours_is_refused_for_an_interpreter_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho .cpython-399-x86_64-linux-gnu.so\n")
    other.chmod(0o755)
    monkeypatch.setattr(ways, "python_with", lambda module: str(other))
    with pytest.raises(Unavailable, match=r"which loads \*\.cpython-399"):
        ways.find(OURS, tmp_path)
