"""A table of which parts fit which releases of vLLM: `scripts/vllm-fits`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.integrations.vllm import seams


def compare(version: str) -> dict[str, Any]:
    """Returns the names that differ in the vLLM of this process, by part."""
    return {"version": version, "parts": {part: seams.misfits(part) for part in seams.SEAMS}}


def cell(sentences: list[str]) -> str:
    """Returns the cell of a part: fits, or the first name that differs and the number of others."""
    if not sentences:
        return "fits"
    name = sentences[0].removeprefix("in this vLLM ").removeprefix("this vLLM has no ").split()[0]
    name = name.rpartition(":")[2] if ":" in name else name
    others = f" and {len(sentences) - 1} more" if len(sentences) > 1 else ""
    return f"`{name}`{others}"


def table(results: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown, the newest release first."""
    results = sorted(results, key=lambda result: [int(number) for number in result["version"].split(".")], reverse=True)
    rows = [["vLLM", *seams.SEAMS], ["---"] * (1 + len(seams.SEAMS))]
    rows += [[result["version"], *(cell(result["parts"][part]) for part in seams.SEAMS)] for result in results]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of these files")
    parser.add_argument("--fail", action="store_true", help="end with 1 where a part does not fit")
    parser.add_argument("values", nargs="+", metavar="VERSION|FILE")
    arguments = parser.parse_args()
    if not arguments.table:
        print(json.dumps(compare(arguments.values[0])))
        return 0
    # vLLM may print before it.
    results = [json.loads(Path(path).read_text().splitlines()[-1]) for path in arguments.values]
    print(table(results))
    return int(arguments.fail and any(any(result["parts"].values()) for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
