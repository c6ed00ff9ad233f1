"""`penstock serve` as anybody starts it: a process that says in its log where it listens, and how it ended."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """It and its port. With the block it is told to end, if nobody has told it yet; it must end well."""
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, _port(process)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
            assert process.returncode == 0 and "killed=none" in rest, rest
        finally:
            process.kill()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"event=serving .*url=\S+:(\d+)", line):
            return int(found[1])
    raise AssertionError(f"it does not serve: {said}")
