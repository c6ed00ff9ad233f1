"""Installing penstock in vLLM's environment replaces nothing there: what vLLM brings meets every requirement."""

import importlib.metadata
import json
import subprocess

import pytest
from packaging.requirements import Requirement

from tests.support import peer

VERSIONS = """
import importlib.metadata, json
print(json.dumps({each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}))
"""
BROUGHT = {"numpy": "2.3.5", "msgspec": "0.22.0", "torch": "2.13.0+cpu"}  # by vllm 0.32.0


def unmet(installed: dict[str, str]) -> list[str]:
    """What a resolver would install or replace: requirements, extras aside, that no installed version meets."""
    requirements = map(Requirement, importlib.metadata.requires("penstock") or [])
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert {each.name for each in needed} == {"numpy", "msgspec"}
    return [
        str(each) for each in needed if not each.specifier.contains(installed.get(each.name, "0"), prereleases=True)
    ]


def test_installing_penstock_beside_what_vllm_brings_replaces_nothing() -> None:
    assert not unmet(BROUGHT)


@pytest.mark.parametrize("name", ["numpy", "msgspec"])
def test_a_requirement_that_is_not_met_is_found(name: str) -> None:
    assert [sentence.startswith(name) for sentence in unmet({**BROUGHT, name: "0.1"})] == [True]


def test_installing_penstock_in_the_peer_environment_replaces_nothing() -> None:
    done = subprocess.run([peer.python_of_vllm(), "-c", VERSIONS], check=True, capture_output=True, text=True)
    installed = json.loads(done.stdout)
    assert "torch" in installed
    assert not unmet(installed)
