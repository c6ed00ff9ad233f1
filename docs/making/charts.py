"""Pictures and tables of `bench/headlines.json`: a handful of rows of the ledger, each with its command.

Leaves to `penstock.tools.bar_chart` how a chart is drawn, and to `bench/RESULTS.md` everything else that was measured.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.tools import bar_chart

HEADLINES = json.loads((Path(__file__).parents[2] / "bench" / "headlines.json").read_text())
FACTORS = {"k": 1e3, "M": 1e6}


def number(figure: str) -> float:
    """Of a figure as the ledger prints it: 1,044 or 12.5k."""
    digits = figure.rstrip("kM").replace(",", "")
    return float(digits) * FACTORS.get(figure[-1], 1.0)


def ratio(row: dict[str, Any]) -> str:
    """Ours to theirs: as the ledger says it, or one through its `×`, which is theirs to ours over the rounds."""
    if "ratio" in row:
        return str(row["ratio"])
    value = 1 / float(row["times"])
    return f"{value:.0f}x" if value >= 10 else f"{value:.2g}x" if value < 0.1 else f"{value:.2f}x"


def table(is_short: bool = False) -> str:
    """The headlines as a table; those of the README alone, under their names there, if it is short."""
    lines = ["| | ours | theirs | ratio | baseline | `scripts/bench` |", "|---|---|---|---|---|---|"]
    for row in HEADLINES["rows"]:
        if is_short and "readme" not in row:
            continue
        what = row["readme"] if is_short else row["what"]
        ours, theirs = f"{row['ours']} {row['unit']}", row["theirs"]
        _, commit, bench = HEADLINES["sources"][row["source"]]["entry"].split(" · ")
        lines.append(f"| {what} | {ours} | {theirs} | {ratio(row)} | {row['baseline']} | `{bench}`, {commit} |")
    return "\n".join(lines)


def drawings() -> dict[str, str]:
    """SVG by name."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for chart in HEADLINES["charts"]:
            source = HEADLINES["sources"][chart["source"]]
            groups = [
                (label, [(who, number(figure)) for who, figure in bars.items()]) for label, bars in chart["groups"]
            ]
            path = Path(folder) / f"{chart['name']}.svg"
            bar_chart.draw(path, chart["title"], f"p50; {source['entry']}; {source['machine']}", chart["unit"], groups)
            found[chart["name"]] = path.read_text()
    return found


def page() -> str:
    lines = [table()]
    for chart in HEADLINES["charts"]:
        source = HEADLINES["sources"][chart["source"]]
        lines += [f"\n## {chart['title']}\n", f"![{chart['title']}, in {chart['unit']}](charts/{chart['name']}.svg)\n"]
        lines += [f"`{source['command']}`", f"({source['entry']}; {source['machine']})"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(is_short=True))
