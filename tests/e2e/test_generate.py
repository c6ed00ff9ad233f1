"""`penstock generate`, as a user runs it, on a simulated device."""

import json
import subprocess
import sys

import numpy as np

from penstock.engine.config import SimulatedDevice
from penstock.engine.simulated import Rule

COMMAND = [sys.executable, "-m", "penstock", "generate"]


def generate(lines: str, *options: str) -> tuple[int, list[dict], str]:
    done = subprocess.run([*COMMAND, *options], input=lines, capture_output=True, text=True, timeout=100)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_answers_come_in_the_order_of_the_prompts_and_a_refused_one_says_why() -> None:
    lines = '[1, 2, 3]\n\n{"ids": [9], "max_tokens": 2, "n": 2}\n[]\n"hello"\n'
    status, answers, err = generate(lines, "--device-model", "simulated", "--step-ms", "1", "--max-tokens", "20")
    assert status == 1, err
    rule = Rule(SimulatedDevice())
    assert [one["index"] for one in answers] == [0, 1, 2, 3]
    assert answers[0]["ids"] == rule.answer(np.array([1, 2, 3], np.int32), 20)
    assert answers[0]["text"] == "".join(f" {one}" for one in answers[0]["ids"])
    assert answers[0]["finish_reason"] == "length" and answers[0]["completion_tokens"] == 20
    assert answers[1]["more"][0]["ids"] == rule.answer(np.array([9], np.int32), 2, sample=1)
    assert answers[2]["status"] == 400 and "expected a prompt of 1 to" in answers[2]["error"]
    assert answers[3]["prompt_tokens"] == 5
    assert "event=generated requests=4 failed=1 tokens=44" in err


def test_what_is_no_prompt_and_what_is_no_model_is_said_before_anything_starts() -> None:
    for lines, options, text in (
        (
            '[1]\n{"ids": [1], "max_toks": 3}\n',
            ("--device-model", "simulated"),
            "line 2 of the prompts: unknown options",
        ),
        ("{}\n", ("--device-model", "simulated"), "line 1 of the prompts: expected either"),
        ("[1]\n", (), "model is the directory of a model"),
        ("[1]\n", ("--device-model", "simulated", "--data-parallel", "0"), "data_parallel is between 1 and 16, not 0"),
    ):
        status, answers, err = generate(lines, *options)
        assert (status, answers) == (2, []) and text in err and "process started" not in err
