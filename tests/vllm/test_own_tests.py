"""vLLM's own tests on our parts: as they are, but for those that known.toml names; and without looks inside."""

import importlib.util
from pathlib import Path

import pytest

from penstock.integrations.vllm import MODULES
from tests.support import own_tests, peer, tiny_models

PARTS = sorted(part for part in own_tests.parts() if importlib.util.find_spec(MODULES[part]) is not None)

pytestmark = pytest.mark.timeout(own_tests.LIMIT + 60)


@pytest.mark.parametrize("has_looks", [True, False], ids=["as they are", "without looks inside"])
@pytest.mark.parametrize("part", PARTS)
def test_tests_of_vllm_pass_with_its_part_replaced(part: str, has_looks: bool, tmp_path: Path) -> None:
    python, changed = peer.python_of_vllm(), {}
    tests = own_tests.tests_of_vllm(python)
    entry = own_tests.of_version(own_tests.parts()[part], tests)
    lines = own_tests.lines_to_replace(entry, has_looks)
    if not has_looks and not entry.get("looks"):
        pytest.skip(f"no test of {part} looks inside by a line of its own")
    model = peer.write_model(python, tiny_models.QWEN2_VL, tmp_path) if "{model}" in str(lines) else Path()
    for name, functions in lines.items():
        changed[name] = own_tests.without_lines((tests / name).read_text(), functions).replace("{model}", str(model))
    folder = own_tests.copied(tmp_path / "copy", tests, changed) if changed else tests
    site = peer.write_site(tmp_path / "site")
    outcome = own_tests.run(part, entry, folder, site, tmp_path / "report.xml", entry.get("environment", {}))
    print(f"{part}: {len(outcome.passed)} passed, {len(outcome.failed)} failed")
    assert outcome.passed
    still_known = {} if not has_looks else entry["known"]
    sentences = own_tests.complaints(outcome, still_known)
    assert not sentences, "\n".join(sentences)
