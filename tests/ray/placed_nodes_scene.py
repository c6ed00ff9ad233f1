"""A server of two nodes that Ray places, in the namespaces of this process: prints what it saw, as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

START = 150.0  # seconds
PORT = 8123
NODE_ARGS = {"num_cpus": 2, "object_store_memory": 80 << 20}


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def serving_nodes() -> list[int]:
    try:
        return [group["node"] for group in ask("/health")["groups"] if group["serves"]]
    except OSError:
        return []


def until(condition: Callable[[], object], within: float = START) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition.__name__} within {within:g} s")
        time.sleep(0.1)


def pids_of(words: str) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if words in command and "engine_keeper" not in command:
            pids.append(int(path.name))
    return pids


def node_launchers() -> list[int]:
    return pids_of("penstock.server.headless_node")


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE_ARGS, "include_dashboard": False})
    cluster.add_node(**NODE_ARGS)
    cluster.wait_for_nodes()
    options = ("--device-model", "simulated", "--nnodes", "2", "--port", str(PORT), "--ray-address", cluster.address)
    serve = subprocess.Popen([sys.executable, "-m", "penstock", "serve", *options])
    report: dict[str, Any] = {}
    try:
        until(lambda: serving_nodes() == [0, 1])
        (first,) = node_launchers()
        os.kill(first, signal.SIGKILL)
        until(lambda: serving_nodes() == [0])
        report["answer"] = ask("/v1/completions", {"prompt": "alone", "max_tokens": 5})["usage"]["completion_tokens"]
        until(lambda: serving_nodes() == [0, 1])
        report["is_another"] = node_launchers() != [first]
        serve.send_signal(signal.SIGTERM)
        report["status"] = serve.wait(60)
        until(lambda: not node_launchers(), 60)
        report["left"] = len(pids_of("-m penstock"))
    finally:
        serve.kill()
        cluster.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
