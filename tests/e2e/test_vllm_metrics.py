"""Our `/metrics` beside that of a live vLLM, where `PENSTOCK_PEER_PYTHON` names an interpreter that has one."""

import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from tests.support import peer, tiny_models
from tests.support.vllm_server import START, serving
from tests.unit.server.http.test_metrics import OF_ALL_ENGINES, Pages, shape_of

pytestmark = pytest.mark.timeout(START + 60)


def test_metrics_have_the_names_types_labels_and_buckets_of_a_live_vllm(tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    site, model = peer.write_site(tmp_path / "site"), peer.write_model(python, tiny_models.LLAMA, tmp_path)
    with serving(site, model, tmp_path / "log", "--tensor-parallel-size", "1") as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
            text = response.read()
    there = {family.name: family for family in text_string_to_metric_families(text.decode())}
    ours = {name: family for name, family in Pages().families().items() if name.startswith("vllm:")}
    assert ours.keys() <= there.keys()
    for name, family in ours.items():
        kind, labels, bounds = shape_of(family)
        their_kind, their_labels, their_bounds = shape_of(there[name])
        is_total = name in {f"vllm:{total}" for total in OF_ALL_ENGINES}
        assert (kind, labels) == (their_kind, their_labels - {"engine"} if is_total else their_labels), name
        if "_tokens" in name and bounds and name != "vllm:iteration_tokens_total":
            assert set(their_bounds) <= set(bounds), f"{name}: those up to the length of the model"
        else:
            assert bounds == their_bounds, name
    reasons = [
        {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples}
        for families in (ours, there)
    ]
    assert reasons[0] <= reasons[1]
