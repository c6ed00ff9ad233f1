"""Autoscaling by what the status boards say."""

from types import SimpleNamespace

import pytest

from penstock.integrations.ray_serve.load_policy import LoadPolicy


def replicas(policy: LoadPolicy, loads: dict[str, float] | None, current: int = 2) -> float:
    metrics = None if loads is None else {"load": loads, "running": {"a": 1.0}}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=current)
    number, state = policy(context)  # type: ignore[arg-type]
    assert state == {}
    return number


def test_as_many_replicas_are_wanted_as_bring_the_mean_load_to_the_target() -> None:
    policy = LoadPolicy(target_load=0.5)
    assert replicas(policy, {"a": 0.5, "b": 0.5}) == 2
    assert replicas(policy, {"a": 3.0, "b": 0.0}) == 6
    assert replicas(policy, {"a": 0.0, "b": 0.0}) == 0  # min_replicas is the bound


def test_the_number_stays_until_a_replica_has_reported() -> None:
    assert replicas(LoadPolicy(), {}, current=3) == 3
    assert replicas(LoadPolicy(), None, current=4) == 4


@pytest.mark.parametrize("target_load", [0.0, -1.0, float("nan"), float("inf")])
def test_a_target_that_no_replica_can_have_is_refused(target_load: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        LoadPolicy(target_load)
