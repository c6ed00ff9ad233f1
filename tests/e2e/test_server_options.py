"""`penstock serve` with the options of vLLM that concern sockets, paths and the log, on a simulated device."""

import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from tests.conftest import eventually
from tests.support.certificates import make_certificates
from tests.support.command import COMMAND, serving

SIMULATED = ("--device-model", "simulated", "--step-ms", "1")
COMPLETION = {"prompt": "abc", "max_tokens": 3, "logprobs": 21}


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def exchanged(connection: http.client.HTTPConnection, path: str, body: Any = None) -> tuple[int, bytes, Any]:
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_server_behind_tls_and_a_path_answers_and_logs(tmp_path: Path) -> None:
    make_certificates(tmp_path, "a")
    tls = [f"--ssl-certfile={tmp_path}/a.pem", f"--ssl-keyfile={tmp_path}/a.key"]
    words = [*SIMULATED, *tls, "--root-path", "/models/a", "--enable-log-requests", "--async-scheduling"]
    context = ssl.create_default_context(cafile=tmp_path / "a-ca.pem")
    context.check_hostname = False
    with serving(*words, "--client-timeout", "2") as (process, port):
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        for path in ("/v1/completions", "/models/a/v1/completions"):
            status, answer, headers = exchanged(connection, path, {**COMPLETION, "logprobs": None})
            assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3
        logged = next(line for line in process.stderr or () if " event=request " in line)
        status, answer, _ = exchanged(connection, "/v1/completions", COMPLETION)
        assert status == 400 and "at most 20 log-probabilities (--max-logprobs), got 21" in answer.decode()
        for path in ("/models/a", "/models/a/"):
            assert exchanged(connection, path)[2]["location"] == "/models/a/dashboard"
        status, answer, _ = exchanged(connection, "/models/a/v1/completions/", COMPLETION)
        assert status == 404 and b"the nearest is /v1/completions" in answer  # a redirect would leave the path
        status, _, _ = exchanged(connection, "/v1/completions", {**COMPLETION, "max_tokens": "x" * 10})
        assert status == 400
        document = json.loads(exchanged(connection, "/openapi.json")[1])
        assert document["servers"] == [{"url": "/models/a"}]
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:  # it begins no handshake
            assert silent.recv(1) == b""
    times = r"first_token_s=[\d.e-]+ seconds=[\d.e-]+"
    expected = rf"request_id=\S+ prompt_tokens=3 cached_tokens=0 completion_tokens=3 {times} reason=length$"
    assert re.search(expected, logged), logged
    assert headers["x-request-id"] not in logged  # of the first of the two


def test_refused_body_of_a_tls_connection_is_answered(tmp_path: Path) -> None:
    make_certificates(tmp_path, "a")
    words = [*SIMULATED, f"--ssl-certfile={tmp_path}/a.pem", f"--ssl-keyfile={tmp_path}/a.key", "--max-body-mb", "1"]
    context = ssl.create_default_context(cafile=tmp_path / "a-ca.pem")
    context.check_hostname = False
    with serving(*words) as (_, port):
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        status, answer, _ = exchanged(connection, "/v1/completions", {"prompt": "a" * (1 << 21)})
        connection.close()
    assert status == 413 and "longer than 1048576 bytes" in answer.decode()


def test_server_on_a_unix_socket_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    command = [*COMMAND, "serve", *SIMULATED, "--uds", str(path), "--api-server-count", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or " event=serving " not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert f"url=unix:{path}" in lines[-1] and "no API key is needed" not in "".join(lines)
            with contextlib.closing(UnixConnection(path)) as connection:
                status, answer, _ = exchanged(connection, "/v1/completions", {**COMPLETION, "logprobs": None})
            assert status == 200 and json.loads(answer)["choices"][0]["finish_reason"] == "length"
            other = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert other.returncode == 2 and "Address already in use" in other.stderr.splitlines()[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert eventually(lambda: not path.exists())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--ssl-keyfile", "a.key"], "TLS needs both"),
        (["--ssl-keyfile", "none.key", "--ssl-certfile", "none.pem"], "cannot be used: [Errno 2]"),
        (["--uds", "/nowhere/a"], "cannot listen on '/nowhere/a'"),
        (["--uds", "."], "cannot listen on '.'"),
        (["--root-path", "a"], "expected root_path like /models/a, got 'a'"),
        (["--default-chat-template-kwargs", '{"messages": 1}'], "messages is set by the server"),
    ],
)
def test_option_that_cannot_work_is_refused_in_one_line(words: list[str], error: str) -> None:
    done = subprocess.run([*COMMAND, "serve", *SIMULATED, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and error in done.stderr and done.stderr.count("\n") == 1, done.stderr
