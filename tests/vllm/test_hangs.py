"""vLLM's executor hangs on purpose: what `inspect` and `trace` say of it within a second."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import peer, tiny_models
from tests.vllm.test_serving import penstock

SCRIPT = Path(__file__).parent / "inside" / "hangs.py"
START = 400.0
LIMIT = 1.0  # seconds from the hang until `inspect` names the process; a wait counts after half a second
SLACK = 2.0  # on a machine that has other work; the figure itself is printed

pytestmark = pytest.mark.timeout(2 * START)


class Hang(NamedTuple):
    pid: int
    workers: list[int]
    began_at: float


@pytest.fixture
def hang(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hang]:
    python = peer.python_of_vllm()
    model = peer.write_model(python, tiny_models.LLAMA, tmp_path / "models")
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1"}
    environment = peer.environment(peer.write_site(tmp_path / "site"), RENDEZVOUS=str(tmp_path / "group"), **variables)
    command = [python, str(SCRIPT), str(model), request.param]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        workers: list[int] = []
        for line in process.stdout:
            if line.startswith("WORKERS "):
                workers = json.loads(line.removeprefix("WORKERS "))
            if line == "HANGS\n":
                break
        assert workers, (tmp_path / "log").read_text()[-3000:]
        yield Hang(process.pid, workers, time.monotonic())
        process.stdin.write("\n")
    log.close()


def inspected(hang: Hang) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Starts `inspect` at the hang. Returns the snapshot, its sentence about the reply, and when it was printed."""
    command = [sys.executable, "-m", "penstock", "inspect", str(hang.pid), "--json", "--stacks", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                snapshot = json.loads(line)
                for entry in snapshot["verdict"]:
                    if "waits for a reply" in entry["text"]:
                        return snapshot, entry, time.monotonic() - hang.began_at
        finally:
            process.kill()
    raise AssertionError("inspect has ended without the sentence")


@pytest.mark.parametrize("hang", ["collective", "loop", "stopped"], indirect=True)
def test_inspect_names_process_age_and_step_of_a_hang(
    hang: Hang, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    snapshot, entry, after = inspected(hang)
    scene = request.node.callspec.params["hang"]
    print(f"{scene}: named after {after:.2f} s: {entry['text']}")
    print(json.dumps(snapshot["stacks"][0], indent=1)[:1500])
    assert after <= LIMIT + SLACK
    rank_0, rank_1 = hang.workers
    text = rf"receiver 'EngineCore' \(pid {hang.pid}\) waits for a reply since (\S+) (m?s): step (\d+) of broadcast "
    text += (
        rf"'vllm EngineCore', which 'VllmWorker-1' \(pid {rank_1}\) has finished, is with 'VllmWorker-0' \(pid {rank_0}"
    )
    match = re.match(text, entry["text"])
    assert match is not None, entry["text"]
    assert int(match[3]) == (22 if scene == "collective" else 21)
    assert entry["level"] == ("stuck" if scene == "stopped" else "warning")
    (stack,) = snapshot["stacks"]
    functions = [frame.partition(" ")[0] for frame in stack["frames"]]
    if scene == "collective":
        assert stack["collective"] and stack["collective"].startswith("all_reduce (")
        assert "skip_all_reduce" in functions
    elif scene == "loop":
        assert functions[0] == "loop" and stack["collective"] is None
    else:
        assert stack["frames"] or "stopped" in stack["reason"]
    summary = json.loads(penstock("trace", str(hang.pid), "--seconds", "0.2", "-o", str(tmp_path / "t"), "--json"))
    assert [step["step"] for step in summary["open"]] == [int(match[3])]
