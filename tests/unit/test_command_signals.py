"""Signals of a command: before, while and after they are delivered, and those of a program that is no command."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from penstock import command_signals
from tests.support.processes import program

END = """
    from penstock import command_signals
    command_signals.receive()
"""


def test_command_imports_nothing_of_ours_before_it_receives_signals() -> None:
    """Until then signals have their default effect. Python's own start is the rest of that time."""
    command = [sys.executable, "-X", "importtime", "-m", "penstock", "serve", "--help"]
    lines = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=True, text=True).stderr
    imported = [line.rpartition("|")[2].strip() for line in lines.splitlines()]
    before = imported[: imported.index("penstock.command_signals") + 1]
    ours = [name for name in before if name.partition(".")[0] == "penstock"]
    assert ours == ["penstock", "penstock.command_signals"]
    assert not {"asyncio", "numpy"} & set(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_end_signal_ends_a_command_that_has_started_nothing(number: int) -> None:
    with program(f'{END}\n    say("ready")\n    time.sleep(30)') as command:
        assert command.hear() == "ready"
        command.kill(number)
        assert command.process.wait() == 0
        assert f"{signal.Signals(number).name} before the engine was started" in command.errors()


def test_hangup_is_kept_until_signals_are_delivered() -> None:
    source = f"""{END}
    say("ready")
    hear()
    with command_signals.delivered_to(lambda number, _: os.write(1, b"%d\\n" % number)) as signals:
        say(signals.has_early_hangup)
        hear()
    say("after")
    hear()
    """
    with program(source) as command:
        assert command.hear() == "ready"
        command.kill(signal.SIGHUP)
        time.sleep(0.1)
        command.say()
        assert command.hear() == "True"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            command.kill(number)
            assert command.hear() == str(int(number))
        command.say()
        assert command.hear() == "after"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            command.kill(number)
        command.say()
        assert command.process.wait() == 0


def test_another_program_handles_signals_as_before_the_block() -> None:
    before = [signal.getsignal(number) for number in command_signals.RECEIVED]
    received: list[int] = []
    with command_signals.delivered_to(lambda number, _: received.append(number)):
        os.kill(os.getpid(), signal.SIGHUP)
    assert received == [signal.SIGHUP]
    assert [signal.getsignal(number) for number in command_signals.RECEIVED] == before


@pytest.mark.parametrize(("is_ignored", "expected"), [(False, signal.SIGTERM), (True, signal.SIGHUP)])
def test_closed_terminal_counts_as_sigterm_unless_hangups_were_ignored(is_ignored: bool, expected: int) -> None:
    reader, writer = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            if is_ignored:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            command_signals.receive()
            with command_signals.delivered_to(lambda number, _: os.write(writer, bytes([number]))):
                os.write(writer, b"r")
                time.sleep(10)
        finally:
            os._exit(0)
    try:
        assert os.read(reader, 1) == b"r"
        os.close(terminal)
        assert os.read(reader, 1) == bytes([expected])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
