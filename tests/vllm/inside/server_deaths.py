"""Kills a process of `vllm serve` without a model, busy and idle.

Times each kill until clients with open streams had the error, and until /health said so; where the first process was
killed, also until no process is left. A server takes seconds to start: its processes are forks of a process that has
imported what they import.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import campaign
from offline import keep_method

from penstock.environment import VLLM_DEATHS
from penstock.integrations.vllm import deaths

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.vllm_server import NAME, VllmServer

STREAMS = 6
START = 120.0
END = 30.0
END_AT_SIGNAL = 5.0  # a caller may follow SIGTERM by SIGKILL
SERVES = "Application startup complete."  # of uvicorn
# The number of API servers where a process is killed. A single API server is the first process of the server.
VICTIMS = {"EngineCore": 2, "ApiServer_0": 2, "VllmWorker-0": 2, "VllmWorker-1": 2, "Launcher": 2, "APIServer": 1}
FIRST_PROCESSES = ("Launcher", "APIServer")
SCENES = [f"{victim} {load}" for load in ("busy", "idle") for victim in VICTIMS]
OPTIONS = "--host 127.0.0.1 --dtype float32 --max-model-len 512 --enforce-eager --worker-cls stub_worker.ServedWorker"


def serve(options, api_servers, port, log, fork):
    """The first process of a server, in a session of its own."""
    from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.setsid()
    for signal_number in campaign.ENDING:
        signal.signal(signal_number, signal.SIG_DFL)
    campaign.end_with(fork)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.pop(VLLM_DEATHS.name, None)
    deaths.open_board()
    multiprocessing.get_context = lambda method=None: campaign.FORK  # API servers are always spawned
    words = [options.model, "--served-model-name", NAME, "--port", str(port), "--api-server-count", str(api_servers)]
    words += ["--tensor-parallel-size", str(options.workers), *OPTIONS.split()]
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args(words))


class ForkedServer:
    """A server that has answered. It has ended, with all its processes, at the end of the block."""

    def __init__(self, options, folder, api_servers=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = Path(folder) / "log"
        arguments = options, api_servers, port, log, os.getpid()
        self.process = campaign.FORK.Process(target=serve, args=arguments, name="MainProcess")
        self.process.start()
        self.server, self.api_servers = VllmServer(self.process, port, log), api_servers

    def __enter__(self):
        try:
            self.await_answers()
        except BaseException as error:
            self.end(type(error))
            raise
        return self.server

    def await_answers(self):
        deadline = time.monotonic() + START
        while True:
            try:
                self.server.ask("hello", 1)
                assert self.server.log.read_text(errors="replace").count(SERVES) == self.api_servers
                return
            except (OSError, AssertionError):
                if time.monotonic() > deadline or not self.process.is_alive():
                    text = self.server.log.read_text(errors="replace")
                    raise RuntimeError(f"the server does not answer: {text[-3000:]}") from None
                time.sleep(0.05)

    def __exit__(self, kind, *_):
        self.end(kind)

    def end(self, kind):
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        try:
            self.process.join(END_AT_SIGNAL if kind is SystemExit else END)
        finally:  # a signal may end the wait
            for pid in self.server.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.join()


def pid_of(server, victim):
    if victim == "EngineCore":
        return server.core()
    if victim == "ApiServer_0":
        return server.api_servers()[0]
    if victim in FIRST_PROCESSES:
        return server.process.pid
    return server.workers()[int(victim[-1])]


def sentence_of(victim, pid):
    """Returns the end of each error of a client."""
    if victim == "Launcher":
        return f"MainProcess (pid {pid}), which started this process, has ended"
    rank = f"rank {victim[-1]}, " if victim.startswith("VllmWorker") else ""
    return f"{victim} ({rank}pid {pid}) died: killed by SIGKILL"


def fault_of(server, victim, pid, streams):
    """Returns what is not as promised; None: all is."""
    errors = [stream.error()[1] for stream in streams if stream.has_error()]
    if open_streams := sum(stream.is_alive() for stream in streams):
        return f"{victim}: {open_streams} of {len(streams)} streams have no end"
    if victim == "APIServer":
        return None if not errors else f"{victim}: {errors[0]}"
    if streams and not errors:
        return f"{victim}: no client has an error; {server.log.read_text(errors='replace')[-4000:]}"
    if victim != "ApiServer_0" and len(errors) < len(streams):
        ends = [stream.lines[-2:] for stream in streams if not stream.has_error()]
        return f"{victim}: {len(errors)} of {len(streams)} clients have an error; {ends}"
    text = sentence_of(victim, pid)
    for error in errors:
        if not error.endswith(text):
            return f"{victim} (pid {pid}): {error}"
    return None


def times_of(server, victim, pid, streams):
    """Kills the process. Returns the seconds until each effect."""
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    took = {"/health": server.unhealthy_at() - killed_at}
    for stream in streams:
        stream.join(END)
    if streams:
        ended = [stream.ended_at for stream in streams if not stream.has_error()]
        ended += [stream.error()[0] for stream in streams if stream.has_error()]
        took["the last client's answer"] = max(ended) - killed_at
    if victim in FIRST_PROCESSES:
        while server.pids():
            if time.monotonic() > killed_at + END:
                commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in server.pids()]
                raise RuntimeError(f"left: {commands}; {server.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.01)
        took["no process is left"] = time.monotonic() - killed_at
    return took


def kill_process(options, index, chance):
    scene = options.scenes[index % len(options.scenes)]
    victim, load = scene.split()
    outcome = {"scene": scene, "took": {}, "wrong": None}
    try:
        with tempfile.TemporaryDirectory() as folder, ForkedServer(options, folder, VICTIMS[victim]) as server:
            # One after the other: a server that wakes first accepts all connections that wait.
            streams = [server.streams(1)[0] for _ in range(STREAMS)] if load == "busy" else []
            time.sleep(chance.random() * 0.05)
            pid = pid_of(server, victim)
            outcome["took"] = times_of(server, victim, pid, streams)
            outcome["wrong"] = fault_of(server, victim, pid, streams)
    except Exception:
        outcome["wrong"] = traceback.format_exc()
    return outcome


# ── what processes of a server import ──
def keep_modules(folder):
    """Has each process of a server write the names of its modules as it ends."""
    import vllm.v1.utils
    from vllm.v1.engine.core import EngineCoreProc

    def keeping(run):
        def run_and_write(*arguments, **keywords):
            try:
                run(*arguments, **keywords)
            finally:
                with suppress(FileNotFoundError):  # the folder is that of the first server
                    (Path(folder) / f"{os.getpid()}.modules").write_text("\n".join(sys.modules))

        return run_and_write

    vllm.v1.utils.run_api_server_worker_proc = keeping(vllm.v1.utils.run_api_server_worker_proc)
    EngineCoreProc.run_engine_core = staticmethod(keeping(EngineCoreProc.run_engine_core))


def prepare_forks(options):
    import vllm.entrypoints.cli.serve
    import vllm.v1.engine.async_llm
    import vllm.v1.executor.multiproc_executor  # noqa: F401
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides = lambda: None  # walks over all modules of a worker
    keep_method("fork")
    with tempfile.TemporaryDirectory() as folder:
        keep_modules(folder)
        with ForkedServer(options, folder):
            pass
        names = {name for path in Path(folder).glob("*.modules") for name in path.read_text().split()}
    campaign.import_modules(["stub_worker", *sorted(names)])


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    options = campaign.arguments_of(__doc__, SCENES)
    sys.path.insert(0, campaign.folder_of_this())
    load_general_plugins()
    prepare_forks(options)
    campaign.run(options, lambda index, chance: kill_process(options, index, chance))
