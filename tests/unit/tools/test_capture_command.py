"""The command `penstock measure`: what it says of files, of processes with and without channels, and of mistakes."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock import cli, lowlevel
from penstock.installing import how_to_install
from penstock.tools.capture import command
from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry, CaptureWriter

F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


def measure(*arguments: object) -> int:
    return cli.main(["measure", *map(str, arguments)])


def recorded(path: Path, *frames: bytes) -> Path:
    writer = CaptureWriter(path, [CapturedChannel("steps", "ring", b"")])
    for sequence, frame in enumerate(frames):
        writer.write(CaptureEntry(0, 0, sequence, sequence, frame))
    writer.close()
    return path


# ── what was recorded ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_recording_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "x.rec", b"hello world", b"hello w0rld")
    assert measure(path, "--json", "--plot", tmp_path / "x.svg") == 0
    channel, message = map(json.loads, capsys.readouterr().out.splitlines())
    assert (channel["channel"], channel["messages"]) == ("steps", 2)
    assert (message["mean_bytes"], message["mean_distance_bytes"]) == (11, 1)
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert measure(path) == 0
    assert "ring 'steps'" in capsys.readouterr().out


def test_cut_off_recording_is_measured_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "x.rec", b"hello world", b"hello w0rld")
    path.write_bytes(path.read_bytes()[:-1])
    assert measure(path, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[0])["messages"] == 1
    assert "was cut off: its last 42 bytes are no whole record" in captured.err


def test_file_that_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "x.rec", b"hello")
    (tmp_path / "y.rec").write_bytes(path.read_bytes().replace(b"recording 1\n", b"recording 2\n"))
    (tmp_path / "z.rec").write_bytes(b"something else\n")
    for arguments, words in (
        ([tmp_path / "none.rec"], "No such file"),
        ([tmp_path / "y.rec"], "is a recording of version '2'"),
        ([tmp_path / "z.rec"], "is not a recording of penstock"),
        ([path, "--channel", "done"], "has no channel 'done'; there are 'steps'"),
        ([path, "--record", tmp_path / "again"], "is a recording already"),
    ):
        assert measure(*arguments) == 2
        captured = capsys.readouterr()
        assert words in captured.err and captured.err.startswith("penstock measure: ")
        assert not captured.out


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_measuring_a_target_without_channels_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with subprocess.Popen(["sleep", "60"]) as idle, lowlevel.Segment.create(4096, name="raw") as segment:
        for target, words in (
            (dead.pid, f"there is no process {dead.pid}"),
            (idle.pid, "has no segment of penstock open"),
            (segment.ticket, "has no channel open, only segment 'raw'"),
            (msgspec.structs.replace(segment.ticket, nonce=segment.ticket.nonce ^ 1), "has closed the segment"),
        ):
            assert measure(target) == 2
            assert words in capsys.readouterr().err
        idle.kill()


def test_a_ticket_of_another_build_is_refused_with_both_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    with penstock.Ring(name="theirs") as ring:
        beginning = bytearray(os.pread(ring.fd, 4096, 0))
        beginning[8] += 1  # the version of the layout
        fd = os.memfd_create("penstock:theirs", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, beginning)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            ticket = msgspec.structs.replace(ring.ticket, fd=fd, inode=os.fstat(fd).st_ino)
            assert measure(ticket) == 2
            assert "both sides need the same build" in capsys.readouterr().err
        finally:
            os.close(fd)


def test_argument_that_is_no_process_ticket_or_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nonsense"], ["penstock:1:2"], ["--seconds", "no", "1"]):
        with pytest.raises(SystemExit):
            measure(*arguments)
    assert "neither a process number, nor a ticket" in capsys.readouterr().err


def test_measure_without_an_argument_names_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure()
    assert ended.value.code == 2
    assert "the following arguments are required: PID|TICKET|FILE" in capsys.readouterr().err


def test_missing_library_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "x.rec", b"hello")
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    assert measure(path) == 2
    assert f"needs rapidfuzz, which is not installed: {how_to_install('measure')}" in capsys.readouterr().err


def test_a_process_number_is_a_process_even_if_a_file_is_called_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "12", b"hello")
    assert command.target_of("12") == 12
    assert command.target_of("./12") == Path("12")
