"""`penstock top`, told to end by Ctrl-C: whatever it does just then, it ends well, and the last view is kept."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from penstock.server.status.snapshot_rates import View
from penstock.tools.top import command
from penstock.tools.top.command import Options, show
from tests.unit.tools.test_top_view import busy


class Scene:
    """A server that is looked at, until a Ctrl-C in the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> View:
        self.looks += 1
        if self.looks == 3:
            raise KeyboardInterrupt
        return View.after(busy(10.0), busy(10.0 + self.looks), 5.0)


def options(svg: Path) -> Options:
    return Options(target=None, key="", interval=0.001, seconds=None, is_once=False, is_json=False, svg=svg)


def test_ctrl_c_while_top_reads_ends_top(tmp_path: Path) -> None:
    scene = Scene()
    assert show(options(tmp_path / "svg"), scene) == 0
    assert scene.looks == 3 and "<svg" in (tmp_path / "svg").read_text()


def test_ctrl_c_while_top_draws_ends_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, drawn = Scene(), command.drawn

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(command, "drawn", drawn)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "drawn", interrupted)
    assert show(options(tmp_path / "svg"), scene) == 0
    assert scene.looks == 1 and "<svg" in (tmp_path / "svg").read_text()
