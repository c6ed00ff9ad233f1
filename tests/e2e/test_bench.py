"""The benchmarks of tensors, engine and server as a user starts them, small: all is measured, and all is told."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.conftest import eventually
from tests.support.benches import ROOT, quick_run

OURS = "penstock-store,penstock-produce,pickle-5,penstock-serving"


@tiers.needs_all
def test_a_quick_run_of_the_tensors_measures_every_case_and_loses_nothing(tmp_path: Path) -> None:
    records, tables = quick_run("tensors", "--impl", OURS, "--out", tmp_path)
    assert list(map(json.loads, (tmp_path / "tensors.jsonl").read_text().splitlines())) == records

    def of(case: str, impl: str = "penstock-store") -> list[dict[str, object]]:
        return [record for record in records if record["case"] == case and record["impl"] == impl]

    sizes = {1 << 20, 2 << 20}
    for impl in ("penstock-store", "penstock-produce", "pickle-5"):
        assert {record["nbytes"] for record in of("carry", impl)} == sizes
    assert {record["nbytes"] for record in of("put_and_get")} == sizes
    assert [record["hits"] for record in of("serving", "penstock-serving")][::2] == [0, 1]

    def figure(target: str) -> object:
        return next(record["figure"] for record in of("target", "penstock") if str(record["target"]).startswith(target))

    assert figure("memory for one image") == pytest.approx(1, abs=0.3)  # times its size; 3 would be a copy for each
    assert figure("request message with one image") == 45
    assert "Targets" in tables


@tiers.needs_all
def test_quick_engine_bench_measures_each_cluster_with_exact_answers(tmp_path: Path) -> None:
    ways = {"penstock", "outputs-in-core", "classic-zeromq"}
    records, tables = quick_run("engine", "--impl", ",".join(sorted(ways)), "--out", tmp_path)
    assert list(map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())) == records
    decoded = {record["impl"]: record for record in records if record["case"] == "decode"}
    assert decoded.keys() == ways
    for record in decoded.values():
        assert record["tpot_ms"] > 1.5  # a step takes 2 ms; the first answer that counts may have come late
        assert record["text_nbytes_per_token"] > 150  # chunks, not only their text
    parts = {record["impl"]: record for record in records if record["case"] == "core_parts"}
    assert "outputs_us" in parts["outputs-in-core"] and "outputs_us" not in parts["penstock"]
    assert "whole_state_us" in parts["classic-zeromq"]
    assert "Targets" in tables


def test_quick_server_bench_serves_all_streams_and_forgets_gone_clients() -> None:
    """The real model, and vLLM beside it, take minutes and are not run here."""
    pytest.importorskip("httptools")
    lines, tables = quick_run("serve", "--only", "streams,gone")
    records = {record["case"]: record for record in lines}
    assert records["streams"]["served"] == records["streams"]["open_at_once"] == 50
    assert 0 < records["streams"]["growth_kb"] < 2000 and records["streams"]["tpot_ms"] > 15  # a step takes 20 ms
    assert 0 < records["gone"]["gone_p50_ms"] <= records["gone"]["gone_most_ms"]
    assert records["start"]["first_answer_s"] > 0.1
    assert "Targets" in tables


def run_sources(only: str) -> tuple[list[dict[str, Any]], str]:
    records, tables = quick_run("sources", "--impl", "penstock", "--only", only, within=400)
    assert not [record for record in records if record["case"] == "skipped"], records
    return records, tables


@tiers.needs_all
def test_quick_sources_bench_measures_engine_steps_and_a_broadcast() -> None:
    """Outputs on models that compute take minutes."""
    pytest.importorskip("torch")
    records, tables = run_sources("steps,broadcast")
    steps = {record["way"]: record for record in records if record["case"] == "steps"}
    assert steps["in"]["median_bytes"] <= 24 and steps["out"]["median_bytes"] <= 64
    assert {record["impl"] for record in records if record["case"] == "broadcast"} == {"penstock", "gloo"}
    assert "nccl's broadcast_object_list, times ours" in tables  # not measured without devices, and said so


@tiers.needs_all
@pytest.mark.timeout(420)
def test_quick_sources_measure_both_transports_of_images_and_videos() -> None:
    for package in ("torch", "transformers", "httptools", "av"):
        pytest.importorskip(package)
    records, tables = run_sources("transfer,images,videos,fronts")

    def ways(case: str) -> set[str]:
        return {record["impl"] for record in records if record["case"] == case}

    assert ways("transfer") == ways("images") == ways("videos") == {"store", "inline"}
    assert {record["api_server_count"] for record in records if record["case"] == "fronts"} == {1, 2}
    images = {record["impl"]: record for record in records if record["case"] == "images"}
    for record in images.values():
        assert record["miss_requests_per_s"] > 0 and record["hit_ttft_ms"] > 0
    targets = [record for record in records if record["case"] == "target"]
    assert all({"met", "missing"} & record.keys() for record in targets)
    assert sum("met" in record for record in targets) >= 6  # the others are vLLM's
    assert "transfer in it" in tables


@tiers.needs_all
def test_quick_server_bench_measures_migrations_and_open_dashboards() -> None:
    pytest.importorskip("httptools")
    pytest.importorskip("torch")
    records, _ = quick_run("serve", "--only", "migration,pages", within=400)
    (pages,) = (record for record in records if record["case"] == "pages")
    (idle,) = (record for record in records if record["case"] == "idle pages")
    assert pages["cpu_s_ratio"] > 0.5 and pages["requests_per_s_ratio"] > 0.1
    assert 0 < idle["10 pages"] < 1000 and 0 <= idle["no page"] < 1000
    another, only = (record for record in records if record["case"] == "migration")
    assert another["cluster"] == "another group is there" and another["paused"] > 0 < another["restart_ms"]
    assert only["paused"] == only["streams"] and only["pause_max_ms"] > only["restart_ms"] / 2
    (memory,) = (record for record in records if record["case"] == "migration memory")
    assert {"kept", "not kept", "difference"} <= set(memory)


def test_benchmark_ended_during_start_leaves_nothing_of_its_server(tmp_path: Path) -> None:
    """A stand-in for vLLM has a child, and never answers. Only the benchmark ends the child."""
    peer = tmp_path / "python"
    peer.write_text(textwrap.dedent(f"""\
        #!/bin/sh
        [ "$1" = -c ] && exit  # whether it has vLLM
        echo "$@" > {tmp_path}/asked
        sleep 100 &
        echo $$ $! > {tmp_path}/pids.new && mv {tmp_path}/pids.new {tmp_path}/pids
        wait
    """))  # fmt: skip
    peer.chmod(0o755)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    command = [sys.executable, "-m", "bench.serve", "--quick", "--only", "load", "--impl", "vllm", "--model", tmp_path]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PENSTOCK_PEER_PYTHON": str(peer)}) as run:
        try:
            eventually((tmp_path / "pids").exists, 30)
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            run.terminate()
            assert run.wait(60) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert "--max-model-len 512 " in (tmp_path / "asked").read_text()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
