"""What MkDocs asks while it builds: adds what is made of the tree itself to pages, and pictures.

Leaves to `charts`, `commands` and `metrics` what stands in them.
"""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import charts  # noqa: E402
import commands  # noqa: E402
import metrics  # noqa: E402

HEADLINES = "<!-- headlines -->"  # where a page wants the charts
COMMANDS = "<!-- commands -->"
METRICS = "<!-- metrics -->"
DESIGN = "<!-- design -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, drawing in charts.drawings().items():
        files.append(File.generated(config, f"charts/{name}.svg", content=drawing))
    return files


def design() -> str:
    """Returns DESIGN.md with links that start in docs/design instead of the root."""
    text = (HERE.parent.parent / "DESIGN.md").read_text()
    return text.replace("](docs/design/", "](").replace("](docs/", "](../")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    marks = ((HEADLINES, charts.page), (COMMANDS, commands.page), (METRICS, metrics.page), (DESIGN, design))
    for mark, content in marks:
        if mark in markdown:
            markdown = markdown.replace(mark, content())
    return markdown
