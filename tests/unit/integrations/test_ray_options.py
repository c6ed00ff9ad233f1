"""Options of a deployment: keywords become the command line of each replica's engine, and mistakes are told at once."""

import ast
import subprocess
import sys

import pytest

from penstock.integrations.ray_serve.engine_options import EngineOptions
from tests.test_architecture import SOURCE


def arguments(**options: object) -> list[str]:
    first, *others = EngineOptions.parse("", options).arguments  # type: ignore[arg-type]
    assert first == "--queue-timeout=1"
    return others


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size=2"]),
        ({"tensor_parallel_size": "2"}, ["--tensor-parallel-size=2"]),
        ({"dtype": "float32", "step_ms": 2.5}, ["--dtype=float32", "--step-ms=2.5"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enforce_eager": "false"}, ["--no-enforce-eager"]),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"api_key": ["a", "-b"]}, ["--api-key=a", "--api-key=-b"]),
        ({"limit_mm_per_prompt": {"image": 2}}, ['--limit-mm-per-prompt={"image": 2}']),
        ({"max_model_len": None}, []),
    ],
)
def test_a_keyword_becomes_the_option_of_that_name(options: dict[str, object], expected: list[str]) -> None:
    assert arguments(**options) == expected


@pytest.mark.parametrize(("value", "timeout"), [(None, "1"), (0, "0"), (2.5, "2.5"), ("600", "600")])
def test_new_requests_wait_one_second_in_a_replica_unless_told_otherwise(value: float | None, timeout: str) -> None:
    assert EngineOptions.parse("", {"queue_timeout": value}).arguments == (f"--queue-timeout={timeout}",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"kv_cache_memory_bytes": 1}, "--kv-cache-memory-bytes is an option of vLLM .*num-gpu-blocks-override"),
        ({"port": 8000}, "port is an option of Ray Serve"),
        ({"nnodes": 2}, "a replica is on one"),
        ({"tensor_parallel_size": "two"}, "invalid int value"),
        ({"device_model": "imaginary"}, "invalid choice"),
        ({"enforce_eager": 2}, "true or false, got 2"),
        ({"tensor_parallel_size": True}, "expected a value of tensor_parallel_size"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        arguments(**options)


def test_the_model_comes_first_and_sizes_follow_from_the_options() -> None:
    options = EngineOptions.parse(
        "/models/x",
        {"tensor_parallel_size": 2, "data_parallel_size": 3, "api_server_count": 2, "max_open_requests": 50,
         "device": "cuda", "shutdown_timeout": 7},
    )  # fmt: skip
    assert options.arguments[0] == "/models/x"
    assert (options.workers, options.max_open_requests, options.is_on_cuda, options.shutdown_timeout) == (
        6,
        100,
        True,
        7,
    )
    assert not EngineOptions.parse("", {"device": "cuda", "device_model": "simulated"}).is_on_cuda


def test_only_integrations_of_ray_import_it() -> None:
    hosts: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} & {"ray", "aiohttp", "yarl"}:
                hosts.setdefault(name, set()).add(str(path.relative_to(SOURCE).parent))
    serve = {"integrations/ray_serve"}
    assert hosts == {"ray": {*serve, "integrations/ray_nodes"}, "aiohttp": serve, "yarl": serve}


def test_the_package_loads_ray_only_for_what_needs_it() -> None:
    script = (
        "import sys, penstock.integrations.ray_serve as package\n"
        "import penstock.integrations.ray_serve.engine_process, penstock.integrations.ray_serve.load_policy\n"
        "assert 'ray' not in sys.modules and 'aiohttp' not in sys.modules\n"
        "assert package.__all__ == ['app', 'build', 'deployment']\n"
        "try: package.applications\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'applications'" in done.stdout
