"""`penstock generate`, as a user runs it, on a simulated device."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import cli
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import SHIPPED, SimulatedDevice
from penstock.engine.worker.simulated_device import TokenRule
from tests import tiers

COMMAND = [sys.executable, "-m", "penstock", "generate"]


def generate(lines: str, *options: str) -> tuple[int, list[dict], str]:
    done = subprocess.run([*COMMAND, *options], input=lines, capture_output=True, text=True, timeout=100)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_answers_keep_the_order_of_prompts_and_refusals_have_reasons() -> None:
    lines = '[1, 2, 3]\n\n{"ids": [9], "max_tokens": 2, "n": 2}\n[]\n"hello"\n'
    status, answers, err = generate(lines, "--device-model", "simulated", "--step-ms", "1", "--max-tokens", "20")
    assert status == 1, err
    rule = TokenRule(SimulatedDevice())
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert answers[0]["ids"] == rule.answer(np.array([1, 2, 3], np.int32), 20)
    assert answers[0]["text"] == "".join(f" {token}" for token in answers[0]["ids"])
    assert answers[0]["finish_reason"] == "length" and answers[0]["completion_tokens"] == 20
    assert answers[1]["more"][0]["ids"] == rule.answer(np.array([9], np.int32), 2, sample=1)
    assert answers[2]["status"] == 400 and "expected a prompt of 1 to" in answers[2]["error"]
    assert answers[3]["prompt_tokens"] == 5
    assert "event=generated requests=4 failed=1 tokens=44" in err


def test_engine_that_fails_ends_the_command_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, answers = tmp_path / "prompts", tmp_path / "answers"
    prompts.write_text("[1]\n")
    monkeypatch.setattr(Launcher, "start", lambda launcher: launcher.fail("core 0.0 cannot start"))
    command = ["generate", "--device-model=simulated", f"--prompts={prompts}", f"--output={answers}"]
    assert cli.main(command) == 1 and answers.read_text() == ""


SIMULATED = ("--device-model", "simulated")


def test_invalid_prompt_or_model_is_one_line_before_anything_starts() -> None:
    for lines, options, text in (
        ('[1]\n{"ids": [1], "max_toks": 3}\n', SIMULATED, "line 2 of the prompts: unknown options"),
        ("{}\n", SIMULATED, "line 1 of the prompts: expected either"),
        ('{"ids": [1], "regex": "a"}\n', SIMULATED, "regex: a grammar needs a model with an end id"),
        ('{"prompt": "x", "guided_json": {"not": {}}}\n', (str(SHIPPED),), "guided_json.not"),
        ("[1]\n", (*SIMULATED, "--data-parallel-size", "0"), "to be a whole number from 1 to 16, got 0"),
        ("[1, 3000000000]\n", SIMULATED, "line 1 of the prompts: Expected `int` <= 2147483647"),
        ("[-1]\n", SIMULATED, "line 1 of the prompts: Expected `int` >= 0"),
        ('"hello"\n', ("/nowhere",), "expected the directory of a model, got '/nowhere'"),
        ("[1]\n", (*SIMULATED, "--prompts", "/nowhere"), "No such file or directory: '/nowhere'"),
        ("{\n", SIMULATED, "line 1 of the prompts: Input data was truncated"),
    ):
        status, answers, err = generate(lines, *options)
        assert (status, answers) == (2, []) and err.startswith("penstock generate: ") and err.count("\n") == 1, err
        assert text in err, err


@contextlib.contextmanager
def generating(tmp_path: Path, prompts: int, tokens: int) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Its answers go to a file."""
    prompts_file, answers = tmp_path / "prompts", tmp_path / "answers"
    prompts_file.write_text("".join(f"[{number}]\n" for number in range(prompts)))
    options = ["--device-model", "simulated", "--step-ms", "10", "--max-tokens", str(tokens), "--max-concurrency", "8"]
    command = [*COMMAND, *options, "--prompts", str(prompts_file), "--output", str(answers)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process, answers
    finally:
        process.kill()
        process.communicate()


def first_pid(process: subprocess.Popen, event: str) -> int:
    """Of the process that says so."""
    for line in process.stderr:
        if event in line:
            return int(re.search(r"pid=(\d+)", line)[1])
    raise AssertionError(f"nobody said {event}")


def test_ctrl_c_leaves_the_answers_so_far_and_no_process(tmp_path: Path) -> None:
    with generating(tmp_path, 1000, 20) as (process, answers):
        core = first_pid(process, "core serves")
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in err and "never retrieved" not in err, err
        written = [json.loads(line) for line in answers.read_text().splitlines()]
        assert f"event=interrupted written={len(written)} requests=1000" in err and 0 < len(written) < 1000, err
        assert all(len(line["ids"]) == 20 for line in written)
        assert not Path(f"/proc/{core}").exists()


def test_a_group_that_dies_costs_no_answer(tmp_path: Path) -> None:
    with generating(tmp_path, 40, 40) as (process, answers):
        core = first_pid(process, "core serves")
        time.sleep(0.5)
        os.kill(core, signal.SIGKILL)
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        written = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [line["index"] for line in written] == list(range(40))
        assert all(len(line["ids"]) == 40 and "error" not in line for line in written)


@tiers.needs_all  # in push: test_model_dir and test_request_schema, without processes
def test_sampling_defaults_of_the_model_are_used_and_said_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)
    defaults = {"eos_token_id": 1, "temperature": 5.0, "top_k": 1, "max_new_tokens": 5}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    lines = '[9, 8, 7]\n{"ids": [9, 8, 7], "temperature": 0, "ignore_eos": true}\n{"ids": [9, 8, 7], "max_tokens": 3}\n'
    status, answers, err = generate(lines, str(model))
    assert status == 0, err
    assert len(answers[1]["ids"]) == 5 and answers[0]["ids"] == answers[1]["ids"][: len(answers[0]["ids"])]
    assert answers[2]["ids"] == answers[0]["ids"][:3]  # with top_k 1 the temperature changes nothing
    (line,) = [line for line in err.splitlines() if "default sampling parameters" in line]
    assert "temperature=5 top_k=1 max_tokens=5" in line and "--generation-config vllm" in line


def test_lines_with_a_grammar_have_answers_of_the_grammar() -> None:
    fields = ({"regex": "[0-9]{4}x"}, {"guided_choice": ["yes", "no"]}, {"response_format": {"type": "json_object"}})
    lines = "".join(json.dumps({"prompt": "hello", "max_tokens": 40, **each}) + "\n" for each in fields)
    status, answers, err = generate(lines, str(SHIPPED))
    assert status == 0, err
    assert re.fullmatch("[0-9]{4}x", answers[0]["text"]) and answers[0]["finish_reason"] == "stop"
    assert answers[1]["text"] in ("yes", "no") and answers[2]["text"].startswith("{")
