"""Many deaths in little time: kills in forks of one process, which has imported what its forks would import.

Each fork claims the next kill of one count. While the processes of one kill start or end, the others run.
"""

import argparse
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from penstock.integrations.vllm.left_files import FOLDER, mapped_names

LIMIT = 200.0  # seconds for one kill with its processes; then its fork writes its stacks, and ends
LEAVING = 10.0  # seconds until what ends has let go of all
ENDING = (signal.SIGTERM, signal.SIGINT)
FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1


def arguments_of(description, scenes):
    """Returns the options of a campaign, with its scenes. From now on a signal ends the campaign."""
    exit_at_signals()
    end_with(os.getppid())
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--forks", type=int, default=2, help="kills at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no kill begins after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", default="", help=f"only scenes whose name contains it: {', '.join(scenes)}")
    options = parser.parse_args()
    options.scenes = [scene for scene in scenes if options.scene in scene]
    if not options.scenes:
        parser.error(f"expected a part of a name of --scene, got {options.scene!r}: {', '.join(scenes)}")
    return options


def import_modules(names):
    """Imports here what a process that was forked earlier has imported."""
    for name in names:
        if name not in sys.modules:
            with suppress(Exception):  # a module may refuse another order, or this machine
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages


def exit_at_signals():
    """Has the first SIGTERM or SIGINT end the process, with the servers of its kills."""

    def end(number, _):
        for signal_number in ENDING:
            signal.signal(signal_number, signal.SIG_IGN)
        sys.exit(128 + number)

    for signal_number in ENDING:
        signal.signal(signal_number, end)


def end_with(parent):
    """Has the kernel send SIGTERM to this process when the parent has ended, also by SIGKILL or by faulthandler."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def run(options, kill):
    """Calls `kill(index, chance)` in forks; each returns its scene, seconds until each effect, and what is wrong.

    Prints the figures of each scene, and all of it as JSON in a line that begins with KILLS.
    """
    files, claimed, began = set(os.listdir(FOLDER)), FORK.Value("i", 0), time.monotonic()
    campaign = os.getpid()

    def run_kills(pipe):
        end_with(campaign)
        before = Counter(belongings())
        while time.monotonic() < began + options.seconds:
            with claimed.get_lock():
                index, claimed.value = claimed.value, claimed.value + 1
            if index >= options.kills:
                break
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            pipe.send(kill(index, random.Random(f"{options.seed} {index}")))
            gc.collect()  # an executor, its calls and its threads know each other, and have descriptors
        faulthandler.cancel_dump_traceback_later()
        pipe.send(left_since(before))

    forks = []

    def end(*_):
        claimed.value = options.kills
        for process, _ in forks:
            process.terminate()

    for _ in range(options.forks):
        ours, remote = FORK.Pipe(duplex=False)
        process = FORK.Process(target=run_kills, args=(remote,), name="EngineCore")
        process.start()
        remote.close()
        forks.append((process, ours))
    for signal_number in ENDING:
        signal.signal(signal_number, end)
    outcomes, left = collect({pipe: process for process, pipe in forks})
    left += files_left(files)
    report(outcomes, left, time.monotonic() - began)


def collect(forks):
    """Returns the outcomes of all kills, and what forks have left behind."""
    outcomes, left = [], []
    while forks:
        for pipe in wait(list(forks)):
            try:
                message = pipe.recv()
            except EOFError:
                process = forks.pop(pipe)
                process.join()
                if process.exitcode:
                    left.append(f"a fork ended with {process.exitcode}")
                continue
            if isinstance(message, dict):
                outcomes.append(message)
            else:
                left += message
    return outcomes, left


def left_since(before):
    """Returns what this process has in addition; threads that wait for a death hold an executor for some seconds."""
    deadline = time.monotonic() + LEAVING
    while True:
        gc.collect()
        left = list((Counter(belongings()) - before).elements())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def belongings():
    """Returns the segments and the children of this process."""
    names = [f"child {process.pid}" for process in multiprocessing.active_children()]
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # a thread has closed it
            if (name := os.readlink(f"/proc/self/fd/{number}")).startswith("/memfd:penstock:"):
                names.append(name)
    return names


def files_left(before):
    """Returns names in /dev/shm that are new, and that no process has mapped."""
    deadline = time.monotonic() + LEAVING
    while True:
        new = set(os.listdir(FOLDER)) - before
        left = sorted(new - mapped_names(FOLDER)) if new else []
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def report(outcomes, left, seconds):
    by_effect = {}
    for outcome in outcomes:
        for effect, duration in outcome["took"].items():
            for scene in (outcome["scene"], "all"):
                by_effect.setdefault((scene, effect), []).append(duration)
    for (scene, effect), durations in sorted(by_effect.items()):
        durations = sorted(float("inf") if duration is None else duration for duration in durations)
        p50, p99 = (durations[len(durations) * part // 100] * 1e3 for part in (50, 99))
        count, most = len(durations), durations[-1] * 1e3
        print(f"{scene}, until {effect}: {count} times, p50 {p50:.0f} ms, p99 {p99:.0f}, most {most:.0f}")
    wrong = [outcome["wrong"] for outcome in outcomes if outcome["wrong"]]
    print(f"{len(outcomes)} kills in {seconds:.0f} s; {len(wrong)} wrong; left: {left or 'nothing'}")
    for sentence in wrong[:5]:
        print(f"wrong: {sentence}")
    all_of_it = {f"{scene}, {effect}": durations for (scene, effect), durations in by_effect.items()}
    print("KILLS " + json.dumps({"kills": len(outcomes), "took": all_of_it, "wrong": wrong, "left": left}), flush=True)


def folder_of_this():
    return str(Path(__file__).parent)
