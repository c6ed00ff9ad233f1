"""What `scripts/bench serve` asks of a model and says of what it found; that it runs is shown in e2e."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serve import main
from bench.serve_cases import goals
from bench.serve_cases.cases import Load
from bench.serve_cases.model import LONGEST, longest


@pytest.mark.parametrize(
    "config, tokens",
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 1 << 17}, LONGEST),
        ({"text_config": {"max_position_embeddings": 1024}, "vision_config": {}}, 1024),
        ({}, LONGEST),
    ],
)
def test_no_server_is_asked_for_more_than_the_model_knows(config: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest(tmp_path) == tokens


def test_invalid_model_is_refused_before_servers_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("[]")
    for output, why in (("/nowhere", "got '/nowhere'"), (str(tmp_path), "config.json is invalid")):
        with pytest.raises(SystemExit) as ended:
            main(["--model", output])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and why in err and err.count("\n") == 1


def test_a_prompt_and_its_answer_fit_the_model() -> None:
    load = Load(96, 16, "128", "96")
    assert load.within(LONGEST) == load
    assert load.within(256) == Load(96, 16, "112", "96")
    assert load.within(128) == Load(96, 16, "56", "56")


def test_request_served_after_another_ended_is_not_counted_as_concurrent() -> None:
    def met(served: float, open_at_once: float) -> bool:
        result = goals.Found(streams={"served": served, "open_at_once": open_at_once, "growth_kb": 1.0})
        return next(target.is_met for target in goals.targets(result) if target.case.startswith("streams open at once"))

    assert met(1000, 1000) and not met(1000, 999) and not met(999, 1000)
    assert goals.Found().served_at_once() is None
