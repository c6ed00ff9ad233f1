"""Every system call fails once: cases are drawn by a seed, and played by workers that have the library preloaded.

    python -m tests.faults.fault_campaign [--cases N] [--seed N] [--case NAME] [--scene NAME]

prints how many cases broke an invariant, and which. A case's name repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import msgspec

from tests.faults.interposer import CORE, PYTHON, Fault, Interposer, build, errors_of

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds for one case: every step in it has a shorter limit
CALLERS = {CORE: "core", PYTHON: "python"}
# What a machine that is busy with something else can look like; it is believed if it happens again.
TIMED = ("wake-up lost", "hang", "leak", "death unknown")


class Case(msgspec.Struct, frozen=True):
    scene: str
    victim: int  # the number of the actor with the failing call
    fault: Fault | None

    @property
    def name(self) -> str:
        fault = self.fault
        assert fault is not None
        parts = self.scene, self.victim, fault.kind, CALLERS[fault.caller], fault.number, fault.error, fault.times
        return "/".join(map(str, parts))

    @classmethod
    def parse(cls, name: str) -> Case:
        scene, victim, kind, caller, number, error, times = name.split("/")
        callers = {text: caller for caller, text in CALLERS.items()}
        return cls(scene, int(victim), Fault(kind, callers[caller], int(number), error, int(times)))


class Outcome(msgspec.Struct):
    invariant: str = ""  # the one that was broken
    text: str = ""
    fired: int = 0
    actors: int = 0
    errors: list[str] = []
    log: list[str] = []
    counts: list[tuple[str, int, list[int]]] = []  # kind, caller, how many calls after each step that made some
    left: dict[int, dict[str, int]] = {}
    seconds: float = 0.0


class Request(msgspec.Struct):
    case: Case
    usual: dict[int, dict[str, int]] | None = None  # what the actors have in the end where nothing fails


# ── a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def play(interposer: Interposer, request: Request) -> Outcome:
    from tests.faults.fault_scenes import SCENES
    from tests.faults.stage import Broken, Stage

    outcome, began = Outcome(), time.monotonic()
    usual = None if request.usual is None else {actor: Counter(many) for actor, many in request.usual.items()}
    with Stage(interposer, request.case.victim, request.case.fault, usual) as stage:
        try:
            SCENES[request.case.scene](stage)
            outcome.actors = len(stage.actors)
            stage.finish()
            if stage.remarks:
                raise Broken("message", stage.remarks[0])
        except Broken as broken:
            outcome.invariant, outcome.text = broken.invariant, broken.text
        outcome.fired, outcome.errors, outcome.log = stage.fired, stage.errors, stage.log
        outcome.counts = [(kind, caller, ends) for (kind, caller), ends in stage.counts.items()]
        outcome.left = {actor: dict(many) for actor, many in stage.left.items()}
    outcome.seconds = time.monotonic() - began
    return outcome


def work() -> None:
    from tests.faults.stage import warm_up

    warm_up()
    interposer = Interposer()
    for line in sys.stdin:
        outcome = play(interposer, msgspec.json.decode(line, type=Request))
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
        sys.stdout.flush()


# ── the parent ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Worker:
    def __init__(self, library: Path) -> None:
        self.library = library
        self.start()

    def start(self) -> None:
        self.stderr = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "LD_PRELOAD": str(self.library), "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fault_campaign", "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # an interrupt is for the parent, which counts
        )

    def send(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.deadline = time.monotonic() + PATIENCE
        self.request = request
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()

    def outcome(self) -> Outcome:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.stderr.seek(0)
            output = self.stderr.read()[-3000:]
            self.close()
            self.start()
            return Outcome("crash", f"the director ended with status {status}: {output}")
        return msgspec.json.decode(line, type=Outcome)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.stderr.close()


class Campaign:
    def __init__(self, library: Path, jobs: int = 2) -> None:
        self.workers = [Worker(library) for _ in range(jobs)]
        self.usual: dict[tuple[str, int], dict[int, dict[str, int]]] = {}
        self.counts: dict[tuple[str, int], dict[tuple[str, int], list[int]]] = {}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play_all(self, cases: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Each of them by the next worker that is free; in no order."""
        idle, busy = list(self.workers), 0
        with DefaultSelector() as selector:
            while True:
                while idle and (case := next(cases, None)) is not None:
                    worker = idle.pop()
                    worker.send(Request(case, self.usual.get((case.scene, case.victim))))
                    selector.register(worker.process.stdout, EVENT_READ, worker)  # type: ignore[arg-type]
                    busy += 1
                if not busy:
                    return
                for key, _ in selector.select(1.0):
                    worker = key.data
                    selector.unregister(key.fileobj)
                    busy -= 1
                    idle.append(worker)
                    yield worker.request.case, worker.outcome()
                for key in list(selector.get_map().values()):
                    if time.monotonic() > key.data.deadline:
                        key.data.process.kill()  # then its end of the pipe speaks

    def count(self, only: str = "") -> None:
        """Plays each scene for each victim with no call failing: what it calls, and what it leaves."""
        from tests.faults.fault_scenes import SCENES

        scenes = [name for name in SCENES if only in ("", name)]
        rest: list[Case] = []
        tries: Counter[Case] = Counter()

        def first_then_others() -> Iterator[Case]:
            yield from (Case(name, 0, None) for name in scenes)
            while rest:
                yield rest.pop()

        for round_ in (first_then_others(), iter(rest)):
            for case, outcome in self.play_all(round_):
                tries[case] += 1
                if outcome.invariant in TIMED and tries[case] < 3:
                    rest.append(case)  # a machine that is busy with something else
                    continue
                if outcome.invariant:
                    raise AssertionError(f"{case} breaks without a fault: {outcome.invariant}: {outcome.text}")
                key = case.scene, case.victim
                self.usual[key] = outcome.left
                self.counts[key] = {(kind, caller): ends for kind, caller, ends in outcome.counts}
                if case.victim == 0:
                    rest += [Case(case.scene, victim, None) for victim in range(1, outcome.actors)]

    def draw(self, seed: int, many: int) -> list[Case]:
        """So many different cases: a scene and its victim, a kind of call, a step with such calls, one of these."""
        chance = random.Random(seed)
        places = sorted(place for place, counts in self.counts.items() if counts)
        cases: dict[Case, None] = {}
        tries = 0
        while len(cases) < many and tries < 20 * many:
            tries += 1
            scene, victim = chance.choice(places)
            counts = self.counts[scene, victim]
            kinds = sorted(key for key in counts if errors_of(*key))
            kind, caller = chance.choice(kinds)
            ends = [0, *counts[kind, caller]]
            step = chance.randrange(1, len(ends))
            number = chance.randint(ends[step - 1] + 1, ends[step])
            error = chance.choice(errors_of(kind, caller))
            times = chance.choices((1, 3, 1000), (8, 1, 1))[0]
            cases[Case(scene, victim, Fault(kind, caller, number, error, times))] = None
        return list(cases)


class Tally:
    """What came of the cases."""

    def __init__(self) -> None:
        self.cases = self.fired = self.refused = 0
        self.seconds = 0.0
        self.broken: list[tuple[Case, Outcome]] = []
        self.late: list[tuple[Case, Outcome]] = []  # and in time when they were played again

    def add(self, case: Case, outcome: Outcome) -> None:
        self.cases += 1
        self.seconds += outcome.seconds
        self.fired += outcome.fired > 0
        self.refused += bool(outcome.errors)
        if outcome.invariant in TIMED:
            self.late.append((case, outcome))
        elif outcome.invariant:
            self.broken.append((case, outcome))

    def play_again(self, campaign: Campaign) -> None:
        """What was late, twice more each, with nothing else going on."""
        late, self.late = self.late, []
        for case, outcome in late:
            again = [second for _, second in campaign.play_all(iter([case])) if second.invariant]
            again = again or [second for _, second in campaign.play_all(iter([case])) if second.invariant]
            (self.broken if again else self.late).append((case, *again[:1]) if again else (case, outcome))

    def lines(self, most: int = 3) -> list[str]:
        invariants: dict[str, list[tuple[Case, Outcome]]] = defaultdict(list)
        for case, outcome in self.broken:
            invariants[outcome.invariant].append((case, outcome))
        lines = [
            f"{self.cases} cases: a call failed in {self.fired}, and an error was raised for it in {self.refused}; "
            f"an invariant was broken in {len(self.broken)}; {len(self.late)} were late once and not again"
        ]
        for invariant, broken in sorted(invariants.items(), key=lambda item: -len(item[1])):
            kinds = Counter(case.fault.kind for case, _ in broken if case.fault)
            lines.append(
                f"  {invariant}: {len(broken)} ({', '.join(f'{kind} {many}' for kind, many in kinds.most_common())})"
            )
            for case, outcome in broken[:most]:
                lines.append(f"    {case.name}: {outcome.text[:600]}")
        for case, outcome in self.late[:most]:
            lines.append(f"  late once: {case.name}: {outcome.invariant}: {outcome.text[:200]}")
        return lines


def run(library: Path, seed: int, many: int, only: str = "", show: Any = None) -> Tally:
    tally = Tally()
    with Campaign(library) as campaign:
        campaign.count(only)
        with contextlib.suppress(KeyboardInterrupt):  # the rest is left out, and what was played is counted
            for case, outcome in campaign.play_all(iter(campaign.draw(seed, many))):
                tally.add(case, outcome)
                if show is not None:
                    show(tally, case, outcome)
        tally.play_again(campaign)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fault_campaign", description=__doc__)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, default=500, help="how many cases are played (default: 500)")
    parser.add_argument(
        "--seed", type=int, help="what they are drawn by (default: PENSTOCK_SEED, or another each time)"
    )
    parser.add_argument("--case", help="plays this one and shows its steps")
    parser.add_argument("--scene", default="", help="draws cases of this scene only")
    parser.add_argument(
        "--most", type=int, default=3, help="examples of each broken invariant that are shown (default: 3)"
    )
    options = parser.parse_args()
    if options.work:
        return work()
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        library = build(Path(folder))
        if options.case:
            return show_one(library, Case.parse(options.case))
        seed = (
            options.seed
            if options.seed is not None
            else int(os.environ.get("PENSTOCK_SEED") or random.randrange(2**32))
        )
        print(f"PENSTOCK_SEED={seed} repeats this", flush=True)
        began = time.monotonic()

        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell runs it in the background

        def show(tally: Tally, case: Case, outcome: Outcome) -> None:
            if outcome.invariant:
                print(f"{case.name}: {outcome.invariant}: {outcome.text[:300]}", flush=True)
            if tally.cases % 500 == 0:
                print(f"{time.monotonic() - began:.0f} s: {tally.lines()[0]}", flush=True)

        tally = run(library, seed, options.cases, options.scene, show)
        print("\n".join(tally.lines(options.most)))
        print(f"{time.monotonic() - began:.0f} s, of which a case took {tally.seconds / tally.cases:.3f} s")
        sys.exit(bool(tally.broken))


def show_one(library: Path, case: Case) -> None:
    with Campaign(library, jobs=1) as campaign:
        campaign.count(case.scene)
        for _, outcome in campaign.play_all(iter([case])):
            print("\n".join(outcome.log))
            print(f"{outcome.fired} calls failed; {outcome.errors}")
            print(f"{outcome.invariant}: {outcome.text}" if outcome.invariant else "all holds")
            sys.exit(bool(outcome.invariant))


if __name__ == "__main__":
    main()
