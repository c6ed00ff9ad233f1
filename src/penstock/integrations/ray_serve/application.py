"""What a user of the integration calls: applications of Ray Serve, with an engine for each replica."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from penstock.integrations.ray_serve.engine_options import EngineOptions, OptionValue
from penstock.integrations.ray_serve.replica import Replica

NAME = "Penstock"  # of the deployment, as YAML files call it
ROUTER = "penstock.integrations.ray_serve.session_router.SessionRouter"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # set where Ray is started, and so where an application is built
HEALTH_PERIOD, HEALTH_TIMEOUT = 1.0, 10.0  # seconds
STATS_PERIOD = 1.0  # seconds between two reads of a replica's load
# HAProxy is given 30 s to forget a replica before it drains, and open streams end after that.
DRAIN_SECONDS = 120.0


def deployment(
    model: str = "", *, serve_options: Mapping[str, Any] | None = None, **engine_options: OptionValue
) -> Application:
    """Returns an application; each of its replicas runs `penstock serve MODEL` with these options.

    Args:
        model: directory of the model, on each machine that may have a replica; empty: the bundled model.
        serve_options: of `ray.serve.deployment`, such as `num_replicas`, `autoscaling_config` and `ray_actor_options`.
        engine_options: of `penstock serve`, with `_` for `-`, such as `tensor_parallel_size=2`.

    Raises:
        ValueError: for an option that `penstock serve` does not have, or a value of the wrong kind.
    """
    options = EngineOptions.parse(model, engine_options)
    resources: dict[str, Any] = {"num_cpus": 1}
    if options.is_on_cuda:
        resources["num_gpus"] = options.workers
    router: dict[str, Any] = {"request_routing_stats_period_s": STATS_PERIOD}
    if os.environ.get(HAPROXY) != "1":  # it balances by itself, and Serve refuses a router of one's own beside it
        router["request_router_class"] = ROUTER
    settings = {
        "name": NAME,
        "max_ongoing_requests": options.max_open_requests,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS + options.shutdown_timeout,
        "ray_actor_options": resources,
        "request_router_config": RequestRouterConfig(**router),
        **(serve_options or {}),
    }
    return serve.deployment(**settings)(Replica).bind(options)


def build(args: dict[str, Any]) -> Application:
    """Builds an application from `args` of a YAML file, or of `serve run …:build`: the arguments of `deployment`."""
    return deployment(**args)


app = deployment()
