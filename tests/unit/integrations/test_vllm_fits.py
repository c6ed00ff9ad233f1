"""The table of releases of vLLM."""

from pathlib import Path

from penstock.integrations.vllm import seams
from penstock.integrations.vllm.fits import cell, table
from tests.support.documents import ROOT


def test_cell_names_the_first_difference_and_counts_the_others() -> None:
    assert cell([]) == "fits"
    assert cell(["this vLLM has no module:Queue.get"]) == "`Queue.get`"
    differences = ["in this vLLM module:Queue lacks get", "this vLLM has no module:Handle"]
    assert cell(differences) == "`Queue` and 1 more"


def test_table_has_the_newest_release_first() -> None:
    results = [{"version": version, "parts": {part: [] for part in seams.SEAMS}} for version in ("0.9.0", "0.10.0")]
    rows = table(results).splitlines()
    assert [row.split()[1] for row in rows[2:]] == ["0.10.0", "0.9.0"]


def test_page_has_a_column_for_each_part() -> None:
    page = Path(ROOT / "docs" / "howto" / "vllm.md").read_text()
    assert f"| vLLM | {' | '.join(seams.SEAMS)} |" in page
