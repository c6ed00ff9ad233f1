"""A cluster of two nodes for all tests of a module, once behind HAProxy and once behind Serve's own proxy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiers

HAS_RAY = importlib.util.find_spec("ray") is not None
NO_RAY = "Ray is not installed: pip install '.[engine,ray]'"
BEHIND = {
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)",
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    },
    "proxy": {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "penstock.integrations.ray_serve.proxy_errors:middlewares"},
}
needs_cluster = [
    pytest.mark.skipif(not HAS_RAY, reason=NO_RAY),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace of its own needs root"),
]


@pytest.fixture(scope="session")
def namespace() -> Iterator[None]:
    """A network with a loopback device alone, for this thread and what it starts, until the last of these tests."""
    from bench.nodes.ray_cluster import network_namespace

    with network_namespace():
        yield


@pytest.fixture(scope="module", params=["proxy", *tiers.only_in_all("haproxy")])
def front(request: pytest.FixtureRequest) -> str:
    """What stands in front of the replicas."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cluster(front: str, namespace: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Two nodes with room for two replicas each."""
    from bench.nodes.ray_cluster import RayCluster

    before = set(Path("/dev/shm").iterdir())
    cluster = RayCluster([3, 3], tmp_path_factory.mktemp("ray"), BEHIND[front])
    try:
        cluster.result()
        yield cluster
    finally:
        left = cluster.close()
    assert not left, left
    assert not {path for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")} - before
