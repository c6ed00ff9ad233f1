"""A new counter is one line: in a process where a class declares another counter, every report has it."""

import io
import os
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

MODULE = "penstock.server.status.counters"
BEFORE = "    OPEN = gauge("
DECLARATION = '    SHEEP = counter("penstock_sheep", "sheep that were counted", "sleep is far")\n'
MAKING = Path(__file__).parents[4] / "docs" / "making"


def declare() -> types.ModuleType:
    """Imports the module of the server's counters with the declaration."""
    spec = find_spec(MODULE)
    assert spec is not None and spec.origin is not None and MODULE not in sys.modules
    source = Path(spec.origin).read_text()
    assert source.count(BEFORE) == 1
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    exec(compile(source.replace(BEFORE, DECLARATION + BEFORE), spec.origin, "exec"), vars(module))
    return module


def require_everywhere() -> None:
    counters = declare()
    from rich.console import Console

    from penstock.server.http import grafana
    from penstock.server.http.metrics import Metrics
    from penstock.tools.top.source import LocalSource
    from penstock.tools.top.view import History, drawn
    from tests.unit.server.status.test_snapshot_reader import Laid

    laid, source = Laid(api_server_count=2), LocalSource(os.getpid(), 60.0)
    row = laid.tally.rows[1]
    source.look()
    row[counters.ProcessCounters.SHEEP] += 3
    assert b'penstock_sheep_total{server="1"} 3.0\n' in Metrics(laid.tally, laid.board, "m").text()
    time.sleep(0.01)  # else there are no rates
    view = source.look()
    assert view.rates is not None and view.rates.total("sheep") > 0
    assert [server["sheep"] for server in view.moment.servers] == [0, 3]
    assert msgspec.json.decode(msgspec.json.encode(view))["moment"]["servers"][1]["counters"]["sheep"] == 3
    text = io.StringIO()
    console = Console(file=text, width=120, color_system=None)
    console.print(drawn(view, History(), console))
    (shown,) = (line.split() for line in text.getvalue().splitlines() if line.startswith("sheep"))
    assert shown[:2] == ["sheep", "3"] and len(shown) == 3
    queries = [target["expr"] for panel in grafana.build()["panels"] for target in panel["targets"]]
    assert "sum by (server) (rate(penstock_sheep_total[$__rate_interval]))" in queries
    sys.path.insert(0, str(MAKING))
    import metrics

    assert "| `penstock_sheep_total` | sheep that were counted | sleep is far |\n" in metrics.page()


def test_new_counter_is_one_declaration() -> None:
    """All reports have it: /metrics, the snapshot, its rates, `penstock top`, both dashboards and the documentation."""
    for module in ("prometheus_client", "rich"):
        pytest.importorskip(module)
    process = subprocess.run(
        [sys.executable, "-m", "tests.unit.server.status.test_new_counter"], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr


if __name__ == "__main__":
    require_everywhere()
