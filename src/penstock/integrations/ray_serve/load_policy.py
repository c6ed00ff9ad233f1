"""Autoscaling by the load of the engines instead of the number of HTTP requests.

A request may have many sequences (`n`, several prompts), and waits in the engine while all slots are taken: the status
board counts both. Serve pickles this module by value and runs the policy in its controller.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET_LOAD = 0.8  # of a replica: sequences for each slot


class LoadPolicy:
    """As many replicas as bring the mean load down to `target_load`.

    `AutoscalingConfig(policy={"policy_function": "penstock.integrations.ray_serve.load_policy:LoadPolicy"}, …)`.
    Bounds and delays are those of the configuration.
    """

    def __init__(self, target_load: float = TARGET_LOAD) -> None:
        if not (math.isfinite(target_load) and target_load > 0):
            raise ValueError(f"expected a target_load above 0, got {target_load}")
        self._target_load = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas, and no state. Until one has reported, the number stays."""
        loads = (context.aggregated_metrics or {}).get("load", {})
        if not loads:
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target_load, {}
