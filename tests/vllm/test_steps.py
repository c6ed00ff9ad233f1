"""Steps as changes, on schedules of vLLM's own scheduler, and in a server: what arrives is what was sent."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import START

INSIDE = Path(__file__).parent / "inside"
WALK = Path(peer.__file__).parent / "step_walk.py"
STEPS = 300
SEEDS = range(12)
FAULTS = {"failed sends", "lost", "out of step"}
LLAMA_SCENES = {"prefix hits", "chunks", "resumed", "preempted", "finished", "drafts", "adapters", "masks", "aborts"}
QWEN_SCENES = {"images", "encoder inputs", "finished"}

pytestmark = pytest.mark.timeout(3 * START)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peer.python_of_vllm()
    return peer.write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peer.write_model(peer.python_of_vllm(), tiny_models.LLAMA, tmp_path_factory.mktemp("models")).parent


def walk(site: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [peer.python_of_vllm(), str(WALK), str(model), *arguments]
    done = subprocess.run(command, env=peer.environment(site), capture_output=True, text=True, timeout=START)
    print(done.stdout)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("name", "scenes"), [(tiny_models.LLAMA, LLAMA_SCENES), (tiny_models.QWEN2_VL, QWEN_SCENES)])
def test_steps_arrive_equal_over_schedules_with_faults(name: str, scenes: set[str], site: Path, models: Path) -> None:
    walks = walk(site, models / name, "faults", str(STEPS), *map(str, SEEDS))
    assert len(walks) == len(SEEDS)
    total = sum(
        (
            Counter({what: count for what, count in report.items() if what not in {"choices", "seed"}})
            for report in walks
        ),
        Counter(),
    )
    assert not (scenes | FAULTS) - (+total).keys(), "what the seeds were to bring did not happen"


def test_steps_of_continuous_arrivals_go_as_changes_but_for_the_first(site: Path, models: Path) -> None:
    for report in walk(site, models / tiny_models.LLAMA, "plain", str(STEPS), *map(str, SEEDS[:4])):
        assert report["wholes"] == 2, report  # the first step and the first reply


def test_llm_answers_the_same_with_steps_as_changes_that_are_checked(site: Path, models: Path) -> None:
    answers: list[Any] = []
    prompts = json.dumps(["hello", "The quick brown fox", "a" * 60, "import os\nprint(", "0, 1, 2, 3,"])
    for parts in ("0", "queue,steps"):
        variables = {"PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1", "PENSTOCK_VLLM_CHECK_STEPS": "1"}
        command = [peer.python_of_vllm(), str(INSIDE / "offline.py"), str(models / tiny_models.LLAMA), prompts, "spawn"]
        done = subprocess.run(
            command, env=peer.environment(site, **variables), capture_output=True, text=True, timeout=START
        )
        match = re.search(r"^ANSWERS (.*)$", done.stdout, re.MULTILINE)
        assert match is not None, done.stdout[-3000:] + done.stderr[-6000:]
        assert ("replaces of vLLM: queue, steps" in done.stdout + done.stderr) == (parts != "0")
        answers.append(json.loads(match[1]))
    assert answers[0] == answers[1]
