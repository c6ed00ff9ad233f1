"""What the documents show is done as they show it: every example, and the shell of every page from top to bottom."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import eventually
from tests.support.documents import EXAMPLES, PAGES, ROOT, environment, fences, normalized, sessions

ASKING = ("ask", "see")  # the examples that need a server; the pages with one run them
STATUS = {"first": 1}  # of an example that ends by the error shown in the documents
PORT = "8000"  # of the pages; here it is one that is free


@contextlib.contextmanager
def in_a_session_of_its_own(
    command: list[str], folder: Path, within: float, document: Path
) -> Iterator[tuple[int, str]]:
    """Yields exit status and output of the command, with only the packages that the document installs.

    A process left at the end of the block is killed, and fails the test.
    """
    bin_folder = Path(sys.executable).parent
    more = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    output = folder / "told"
    with output.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **more, **environment(document)},
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(within)
            yield status, output.read_text()
            eventually(lambda: not processes_of(process.pid), within=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def processes_of(number: int) -> list[int]:
    """Returns the processes of a session, without zombies."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == number and fields[0] != "Z":
                pids.append(int(entry.name))
    return pids


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem not in ASKING], ids=lambda path: path.stem)
def test_example_runs_and_leaves_no_process(example: Path, tmp_path: Path) -> None:
    with in_a_session_of_its_own([sys.executable, str(example)], tmp_path, 60, example) as (status, output):
        assert status == STATUS.get(example.stem, 0), output
    for fence in (fence for page in PAGES for fence in fences(page)):
        if fence.printed_by == str(example.relative_to(ROOT)):
            assert normalized(fence.text) in normalized(output), fence.where


@pytest.mark.timeout(tiers.limit(300, soak=3600))
@pytest.mark.parametrize("name", ["death", "data_plane"])
def test_deaths_print_what_the_documents_show_under_load(name: str, tmp_path: Path) -> None:
    def without_pid(text: str) -> str:
        """Nor what the process held, which is given back at the time of the error or shortly after."""
        return re.sub(r"; it held .*", "", re.sub(r"\(pid \d+\)", "(pid N)", text))

    example = ROOT / "examples" / f"{name}.py"
    printer = f"examples/{name}.py"
    (text,) = {without_pid(fence.text) for page in PAGES for fence in fences(page) if fence.printed_by == printer}
    processors = len(os.sched_getaffinity(0))
    programs = processors if os.environ.get("PENSTOCK_BESIDE") else 2 * processors  # other stages are a load, too
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        for _ in range(tiers.DEATH_EXAMPLES):
            with in_a_session_of_its_own([sys.executable, str(example)], tmp_path, 120, example) as (status, output):
                assert (status, without_pid(output)) == (0, text)
    finally:
        for process in load:
            process.kill()
            process.wait()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@tiers.needs_all
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", sessions(), ids=lambda page: page.stem)
def test_the_shell_of_a_page_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("httptools")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = tmp_path / "session"
    ended = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"
    session = sessions()[page]
    script.write_text("set -euo pipefail\n" + ended + session.script.replace(PORT, free_port()))
    with in_a_session_of_its_own(["bash", "-x", str(script)], tmp_path, 200, page) as (status, output):
        assert status == 0, output
    for name, fence in session.shown.items():
        assert normalized((tmp_path / name).read_text()) == normalized(fence.text), fence.where


def test_a_page_without_a_server_would_still_be_found_by_its_port() -> None:
    """The port of the pages is replaced as text: no page may mean something else by it."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if PORT in line:
                assert f":{PORT}" in line or f"port {PORT}" in line or "--port" in line, f"{page}: {line}"
