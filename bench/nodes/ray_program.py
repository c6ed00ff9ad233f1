"""A Ray cluster of several nodes on this machine, with Serve: does what it is told on standard input, until that ends.

Started by `ray_cluster`, in a network namespace. Each line is a command in JSON, and each has one line as its answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from penstock.integrations.ray_serve import build

STORE_NBYTES = 80 << 20  # of each node's object store, the least that Ray takes
NODE = {"object_store_memory": STORE_NBYTES}


def run(name: str, route_prefix: str, args: dict[str, Any]) -> None:
    """Deploys an application, or updates it, and waits until it serves."""
    serve.run(build(args), name=name, route_prefix=route_prefix)


def delete(name: str) -> None:
    serve.delete(name)


def status(name: str) -> dict[str, Any]:
    """How many replicas are in which state."""
    application = serve.status().applications.get(name)
    if application is None:
        return {}
    return {
        str(state): many for each in application.deployments.values() for state, many in each.replica_states.items()
    }


COMMANDS: dict[str, Callable[..., Any]] = {"run": run, "delete": delete, "status": status, "shutdown": serve.shutdown}


def main(nodes: list[int], port: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints goes to the log
    head, *others = nodes
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False, **NODE})
    try:
        for cpus in others:
            cluster.add_node(num_cpus=cpus, **NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        print(json.dumps({"result": "serves"}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"result": COMMANDS[command.pop("command")](**command)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
