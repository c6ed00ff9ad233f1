"""Nothing that crosses a process boundary is ever executed: a test that greps, and tests that try."""

from __future__ import annotations

import ast
import marshal
import os
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock import Buffer, DecodeError
from penstock.codec import Catalogue, FrameDecoder
from penstock.codec.catalogue import Schema
from penstock.codec.frame import HEAD
from tests.test_architecture import BELOW, EXECUTABLE, SOURCE, sources

CALLS = {"eval", "exec", "compile", "__import__", "import_module", "find_spec", "run_module", "run_path", "get_object"}


class Settings(msgspec.Struct, array_like=True, frozen=True):
    heat: float = 1.0


class Message(msgspec.Struct, array_like=True, frozen=True):
    text: str | int | None = None
    settings: Settings | None = None
    ids: NDArray[np.int32] | None = None
    image: Buffer | None = None
    raw: bytes = b""
    many: dict[str, list[bytes]] = {}


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def executing(source: str) -> list[str]:
    """What a module calls, or imports, that runs what it is given."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_pattern = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "re"
            if name in CALLS and not is_pattern:
                result.append(f"line {node.lineno} calls {name}")
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        result += [f"line {node.lineno} imports {name}" for name in names if name.split(".")[0] in EXECUTABLE]  # type: ignore[attr-defined]
    return result


def test_data_plane_neither_imports_nor_calls_code_that_runs_its_input() -> None:
    modules = [path for path in sources(*(SOURCE / name for name in BELOW)) if path.suffix == ".py"]
    assert len(modules) > 10
    result = [f"{path.name}: {what}" for path in modules for what in executing(path.read_text())]
    assert not result, result
    native = [path for path in sources(SOURCE.parent.parent / "native") if path.suffix in {".h", ".cpp"}]
    for path in native:
        assert not re.search(r"PyRun_|PyEval_Eval|PyMarshal|PyImport_|nb::exec|nb::eval", path.read_text()), path


@pytest.mark.parametrize(
    "source", ["eval(x)", "import pickle", "from marshal import loads", "importlib.import_module(x)", "__import__(x)"]
)
def test_code_that_runs_its_input_is_found(source: str) -> None:
    assert executing(source)


def frames(bomb: bytes) -> list[bytes]:
    """The payload in every place in which something of that kind could stand."""
    pack = msgspec.msgpack.encode
    ext = msgspec.msgpack.Ext
    out = [bomb, b"\x01" + bomb, b"\x81" + bomb]
    for code in (*range(-128, 128, 7), 0, 1, 5, 42):
        out.append(b"\x01" + pack([None, None, ext(code, bomb)]))
        out.append(b"\x01" + pack([ext(code, bomb)]))
    out.append(b"\x01" + pack([None, None, None, None, bomb, {"k": [bomb]}]))
    for settings in (None, [bomb], bomb, ext(3, bomb)):
        body = pack([None, settings, None, len(bomb) << 5])
        gap = b"\0" * (-(HEAD.size + len(body)) % 8)
        out.append(HEAD.pack(0x81, 0, 0, len(body)) + body + gap + bomb)
    return out


def test_pickled_payloads_are_not_executed(tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    payloads = [pickle.dumps(Bomb(struck), protocol) for protocol in range(6)]
    code = compile(f"import os; os.mkdir({str(struck)!r})", "bomb", "exec")
    payloads.append(marshal.dumps(code))
    pickle.loads(payloads[0])
    assert struck.exists(), "the bomb is none"
    struck.rmdir()
    tried = decoded = 0
    with penstock.Ring(Message) as channel:
        raw_end, receiver = channel.open_sender()._end, channel.open_receiver()
        for payload in payloads:
            for frame in frames(payload):
                tried += 1
                raw_end.send(frame)
                try:
                    message = receiver.receive(timeout=5)
                except DecodeError:
                    continue
                decoded += 1
                assert isinstance(message, Message)
                assert isinstance(message.text, (str, int, type(None)))
            with pytest.raises(penstock.LayoutMismatch):
                Schema.decode(payload)
            with pytest.raises(penstock.LayoutMismatch):
                penstock.attach(payload.decode("latin1"))
        raw_end.close()
        receiver.close()
    assert not struck.exists()
    assert tried > 200 and decoded >= len(payloads), (tried, decoded)


def test_a_class_is_never_looked_up_by_a_name_that_came_from_outside() -> None:
    """The description in the segment names classes; the decoder knows only its own."""
    decoder = FrameDecoder(Catalogue(Message))
    for name in ("os.system", "lowlevel.Pool", "builtins.eval"):
        with pytest.raises(DecodeError):
            decoder.decode(b"\x02" + msgspec.msgpack.encode([name]))
        text = decoder.decode(b"\x01" + msgspec.msgpack.encode([name]))
        assert text == Message(name)
