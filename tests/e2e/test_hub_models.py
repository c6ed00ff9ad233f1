"""`penstock serve OWNER/NAME`: a model of a hub, which is a small server here."""

import hashlib
import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("httptools")

from tests import tiers
from tests.e2e.test_server_models import save_tokenizer
from tests.support.command import COMMAND, _port
from tests.support.models import build_family

NAME = "tiny/llama-1"
COMMIT = "a" * 40
READ = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
OTHERS = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"x", "original/a.safetensors": b"x"}


class Hub(BaseHTTPRequestHandler):
    folder: Path
    requested: list[str]

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        files = {str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file()}
        body, headers, status = b"", {}, 200
        match = re.fullmatch(rf"/{NAME}/resolve/{COMMIT}/(.+)", path)
        if match is not None and match[1] in files:
            body = (self.folder / match[1]).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
            if has_body:
                self.requested.append(match[1])
        elif path in (f"/api/models/{NAME}/revision/{name}" for name in ("main", "v1", COMMIT)):
            body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}).encode()
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            sizes = {file: (self.folder / file).stat().st_size for file in files}
            body = json.dumps(
                [{"type": "file", "path": file, "size": sizes[file], "oid": file} for file in files]
            ).encode()
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound" if NAME not in path else "RevisionNotFound"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands that use the hub."""
    Hub.folder, Hub.requested = tmp_path / "hub", []
    Hub.folder.mkdir()
    build_family("llama", Hub.folder)
    save_tokenizer(Hub.folder)
    for name, content in OTHERS.items():
        (Hub.folder / name).parent.mkdir(exist_ok=True)
        (Hub.folder / name).write_bytes(content)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        server.shutdown()
        thread.join()


def served_models(process: "subprocess.Popen[str]") -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", _port(process), timeout=30)
    connection.request("GET", "/v1/models")
    names = [model["id"] for model in json.loads(connection.getresponse().read())["data"]]
    connection.close()
    return names


def test_model_of_a_hub_is_downloaded_once_and_served_by_its_name(hub: dict[str, str], tmp_path: Path) -> None:
    command = [*COMMAND, "serve", NAME, "--port", "0", "--revision", "v1", "--download-dir", str(tmp_path / "models")]
    sizes = ["--max-model-len", "64", "--num-gpu-blocks-override", "64"]
    for environment in (hub, {**hub, "HF_HUB_OFFLINE": "1"}):
        with subprocess.Popen([*command, *sizes], stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert served_models(process) == [NAME]
                process.terminate()
                process.communicate(timeout=60)
                assert process.returncode == 0
            finally:
                process.kill()
        requested, Hub.requested[:] = [*Hub.requested], []
        expected = {*READ, "generation_config.json"} if environment is hub else set()
        assert set(requested) - {"generation_config.json"} == expected - {"generation_config.json"}, requested
        assert len(requested) == len(set(requested))
    present = {str(file.name) for file in (tmp_path / "models").rglob("snapshots/*/*")}
    assert present >= READ and not present & {Path(name).name for name in OTHERS}


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("tiny/none", {}, "could not be downloaded"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "could not be downloaded"),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not be downloaded"),
        ("tiny/a..b", {}, "its name on a hub as in Qwen/Qwen3-0.6B, got 'tiny/a..b'"),
        *tiers.only_in_all(
            ("tiny/..", {}, "its name on a hub as in Qwen/Qwen3-0.6B, got 'tiny/..'"),
            ("tiny", {}, "expected the directory of a model, got 'tiny'"),
        ),
        ("a/b/c", {}, "expected the directory of a model, got 'a/b/c'"),
    ],
)
def test_name_that_is_of_no_model_is_one_line(name: str, changes: Any, error: str, hub: dict[str, str]) -> None:
    command = [*COMMAND, "serve", name, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**hub, **changes})
    assert done.returncode == 2 and error in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_index_that_leaves_the_directory_is_refused(hub: dict[str, str]) -> None:
    index = {"weight_map": {"a": "../../a.safetensors"}}
    (Hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = subprocess.run([*COMMAND, "serve", NAME], capture_output=True, text=True, timeout=120, env=hub)
    assert done.returncode == 2 and "expected names of safetensors files beside it" in done.stderr, done.stderr
