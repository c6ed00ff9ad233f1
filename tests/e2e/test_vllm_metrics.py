"""Our `/metrics` beside that of a live vLLM, where `PENSTOCK_PEER_PYTHON` names an interpreter that has one."""

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from bench.impls.peer import Unavailable
from bench.serve_cases.servers import Theirs
from penstock.engine.protocol.config import SHIPPED
from tests.unit.server.http.test_metrics import Pages, shape_of


def test_metrics_have_the_names_types_labels_and_buckets_of_a_live_vllm(tmp_path: Path) -> None:
    try:
        theirs = Theirs.of_model(Path(SHIPPED), tmp_path / "log", longest=512, is_compiled=False)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with contextlib.ExitStack() as ends:
        ends.callback(theirs.stop)
        theirs.wait_for_an_answer()
        status, text = theirs.asked("GET", "/metrics")
    assert status == 200
    there = {family.name: family for family in text_string_to_metric_families(text.decode())}
    ours = {name: family for name, family in Pages().families().items() if name.startswith("vllm:")}
    assert ours.keys() <= there.keys()
    for name, family in ours.items():
        assert shape_of(family) == shape_of(there[name]), name
    reasons = [
        {sample.labels["finished_reason"] for sample in one["vllm:request_success"].samples} for one in (ours, there)
    ]
    assert reasons[0] <= reasons[1]
