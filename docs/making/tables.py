"""Writes the tables of pages that are made of declarations: options beside those of vLLM, environment variables.

    python docs/making/tables.py

A table stands in its page between `<!-- table NAME -->` and `<!-- end -->`, as pages are read in the repository, too.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.cli import parser
from penstock.cli.vllm_options import ALWAYS_ON, DIFFERENCES, UNSUPPORTED
from penstock.environment import VARIABLES, Variable

DOCS = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def in_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def both() -> str:
    """Returns the table of the options that vLLM and Penstock have, and a list of those that only Penstock has."""
    rows, ours = ["| vLLM | Penstock | what differs |", "|---|---|---|"], []
    for action in parser().commands["serve"][1].arguments:
        names = [name for name in action.option_strings if not name.startswith("--no-")] or [str(action.metavar)]
        if names[0] in DIFFERENCES:
            rows.append(f"| {in_code(names)} | {in_code(names)} | {DIFFERENCES[names[0]]} |")
        elif names[0] != "-h":
            ours.append(names[0])
    rows += [f"| {in_code(row.options.split())} | {row.instead} | {row.difference} |" for row in ALWAYS_ON]
    return "\n".join([*rows, "", f"Only Penstock has: {in_code(ours)}."])


def unsupported() -> str:
    rows = [f"| {in_code(row.options.split())} | {row.instead} |" for row in UNSUPPORTED]
    return "\n".join(["| vLLM | instead |", "|---|---|", *rows])


def variables(variables: Iterable[Variable[str] | Variable[int] | Variable[bool]]) -> str:
    rows = ["| variable | values | default | |", "|---|---|---|---|"]
    for variable in variables:
        default = str(int(variable.default) if isinstance(variable.default, bool) else variable.default)
        rows.append(f"| `{variable.name}` | {variable.values} | {default and f'`{default}`'} | {variable.help} |")
    return "\n".join(rows)


TABLES = {
    "both": both,
    "unsupported": unsupported,
    "environment": lambda: variables(VARIABLES),
    "plugin": lambda: variables(variable for variable in VARIABLES if variable.name.startswith("PENSTOCK_VLLM")),
}


def with_tables(text: str) -> str:
    """Returns a page with its tables as they are declared."""
    return TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main() -> int:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if text != with_tables(text):
            page.write_text(with_tables(text))
            print(page.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
