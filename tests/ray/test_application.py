"""What `deployment` says to Ray Serve, and where `SessionRouter` sends requests; no cluster is started."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.documents import ROOT, fences

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[engine,ray]'"
)
# Of Ray's own modules, when they are imported.
ignored = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def deployed(application: Any) -> Any:
    """The deployment of an application that is nothing else."""
    return application._bound_deployment


@ignored
def test_deployment_has_settings_of_an_engine_and_of_the_caller() -> None:
    from penstock.integrations.ray_serve import app, build, deployment

    plain = deployed(app)
    assert plain.name == "Penstock" and plain.max_ongoing_requests == 1024
    assert plain.ray_actor_options == {"num_cpus": 1}
    assert plain.init_args[0].arguments == ("--queue-timeout=1",)
    own = deployed(
        deployment("/models/x", device="cuda", tensor_parallel_size=2, data_parallel_size=2,
                   serve_options={"num_replicas": 3, "max_ongoing_requests": 7})
    )  # fmt: skip
    assert own.num_replicas == 3 and own.max_ongoing_requests == 7
    assert own.ray_actor_options == {"num_cpus": 1, "num_gpus": 4}
    assert own.init_args[0].arguments[0] == "/models/x"
    built = deployed(build({"model": "/models/y", "tensor_parallel_size": "2"}))
    assert built.init_args[0].arguments == ("/models/y", "--queue-timeout=1", "--tensor-parallel-size=2")
    with pytest.raises(ValueError, match="did you mean max_num_seqs"):
        build({"max_num_seq": 1})


@ignored
@pytest.mark.parametrize("is_haproxy", [False, True])
def test_the_router_is_that_of_sessions_unless_haproxy_chooses(
    is_haproxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.integrations.ray_serve import deployment

    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", str(int(is_haproxy)))
    config = deployed(deployment(device_model="simulated"))._deployment_config.request_router_config
    assert config.request_router_class.endswith("SessionRouter") != is_haproxy


@ignored
def test_the_files_and_programs_of_the_page_are_ones_that_serve_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from penstock.integrations.ray_serve import application, build

    blocks = fences(ROOT / "docs" / "howto" / "nodes.md")
    (file,) = [block.text for block in blocks if block.language == "yaml"]
    (declared,) = ServeDeploySchema.model_validate(yaml.safe_load(file)).applications
    assert declared.import_path == "penstock.integrations.ray_serve:build"
    assert deployed(build(declared.args)).name == declared.deployments[0].name
    programs = [block.text for block in blocks if block.language == "python"]
    assert len(programs) == 3
    run: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda application: run.append(application))
    exec(programs[0], {})
    exec(programs[2], {"deployment": application.deployment})
    assert deployed(run[0]).num_replicas == 4


def replica(name: str, **stats: object) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def ranks(replicas: list[Any], session: str = "") -> list[list[str]]:
    from penstock.integrations.ray_serve.session_router import SessionRouter

    router: Any = SessionRouter.__new__(SessionRouter)
    router.initialize_state()
    request = SimpleNamespace(metadata=SimpleNamespace(session_id=session))
    ranking = asyncio.run(router.choose_replicas(replicas, request))
    return [[each.replica_id.unique_id for each in rank] for rank in ranking]


@ignored
def test_a_session_moves_only_when_its_replica_goes() -> None:
    replicas = [replica(name) for name in "abcd"]
    first = {f"s{number}": ranks(replicas, f"s{number}") for number in range(400)}
    assert all(sorted(name for rank in order for name in rank) == list("abcd") for order in first.values())
    homes = Counter(order[0][0] for order in first.values())
    assert len(homes) == 4 and min(homes.values()) > 50, homes
    for session, order in first.items():
        without = ranks([each for each in replicas if each.replica_id.unique_id != "b"], session)
        assert without == [rank for rank in order if rank != ["b"]]


@ignored
def test_a_replica_none_of_whose_groups_serves_comes_last() -> None:
    replicas = [replica("a", serving_groups=0), replica("b", serving_groups=1), replica("c")]
    for session in map(str, range(20)):
        assert ranks(replicas, session)[-1] == ["a"]
    assert ranks(replicas)[-1] == ["a"]
    assert ranks([replica("a", serving_groups=0)], "s") == [["a"]] == ranks([replica("a", serving_groups=0)])


@ignored
def test_a_request_without_a_session_has_two_replicas_to_choose_from_first() -> None:
    replicas = [replica(name) for name in "abcd"]
    counts = Counter(name for _ in range(300) for name in ranks(replicas)[0])
    assert all(len(ranks(replicas)[0]) == 2 for _ in range(20))
    assert len(counts) == 4 and min(counts.values()) > 80, counts
    assert sorted(ranks(replicas)[1]) == list("abcd")
    assert ranks([]) == []
