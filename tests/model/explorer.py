"""Walks through every interleaving of a few processes that share a few words, and reports the shortest way to a fault.

A process is a generator: an almost literal copy of the native code, in which every touch of shared memory is a `yield`
of one operation. What it does between two yields is private, and happens at once. What the words mean, and what is
right, is left to the test that brings the processes.

    def ringer():
        yield store("published", 1, RELEASE)
        yield fence()
        if (yield load("parked")) == 0: ...

Everything else is done here, at every state:
  next step        any process that can run; a futex wakes any of its sleepers, in any order
  store buffers    "sc": none. "tso": first in, first out, seen by the owner alone until flushed, at any later time.
                   "weak": besides, stores to different words are flushed in any order, except that a release waits for
                   all that came before it. A fence, a syscall and a read-modify-write that releases drain the buffer.
  early loads      "weaker": as weak; besides, a process that stands before a relaxed operation may have loaded another
                   word already. When that word changes, it may go on with the value from before, until its next
                   acquire, fence or syscall. One word at a time: two loads change places where one acquire is missing.
                   No load is put off to after a later store, and a read-modify-write is one step, never buffered.
  faults           any process that may die (SIGKILL) or stop (SIGSTOP) does, or does not. What stands in a buffer then
                   still reaches memory, and a death is known to others only after that.

A process is told apart by where it stands and by its local variables, so the walk ends although it may loop. Therefore:
a yield comes first in its expression, and there is one; a loop runs over a range, or over what else tells its place.
"""

import dis
import functools
import gc
import itertools
import re
import types
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = range(5)
ACQUIRING = (ACQUIRE, ACQ_REL, SEQ_CST)
MODELS = ("sc", "tso", "weak", "weaker")
EAGAIN, ETIMEDOUT = -11, -110


class Violation(AssertionError):
    """A state that must not be. The text says which, and lists the steps that led there."""


def must(condition: object, text: str) -> None:
    """For the code of a process: what it found must be so."""
    if not condition:
        raise Violation(text)


class Half(int):
    """An order that has a name, and what it becomes where a scene is walked without one half of that name."""

    name: str
    weaker: dict[str, int]

    def __new__(cls, order: int, name: str, weaker: dict[str, int]) -> "Half":
        self = super().__new__(cls, order)
        self.name, self.weaker = name, weaker
        return self


Without = tuple[str, str] | None  # the name of an order, and "acquire" or "release"


def weakened(order: int, without: Without) -> int:
    if without is None or not isinstance(order, Half) or order.name != without[0]:
        return order
    return order.weaker.get(without[1], order)


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Op(NamedTuple):
    kind: str
    at: Hashable = None
    a: Any = None
    b: Any = None
    order: int = RELAXED


Step = Generator[Op, Any, Any]


def load(at: Hashable, order: int = RELAXED) -> Op:
    return Op("load", at, order=order)


def store(at: Hashable, value: Hashable, order: int = RELAXED) -> Op:
    return Op("store", at, value, order=order)


def cas(at: Hashable, expected: Hashable, desired: Hashable, order: int = ACQ_REL) -> Op:
    """Gives back what was found; it was exchanged if that is `expected`."""
    return Op("cas", at, expected, desired, order)


def exchange(at: Hashable, value: Hashable, order: int = SEQ_CST) -> Op:
    return Op("exchange", at, value, order=order)


def fetch_add(at: Hashable, n: int, order: int = SEQ_CST) -> Op:
    return Op("add", at, n, order=order)


def fetch_or(at: Hashable, bits: int, order: int = SEQ_CST) -> Op:
    return Op("or", at, bits, order=order)


def fetch_and(at: Hashable, bits: int, order: int = SEQ_CST) -> Op:
    return Op("and", at, bits, order=order)


def fence(order: int = SEQ_CST) -> Op:
    """RELEASE: what was stored before it leaves before what is stored after. ACQUIRE: no load is early past it."""
    return Op("fence", order=order)


def futex_wait(at: Hashable, expected: Hashable, may_time_out: bool = False, mask: int = -1) -> Op:
    """0: woken. EAGAIN: the word is not what was seen. ETIMEDOUT, at any time, if that may happen."""
    return Op("wait", at, expected, may_time_out, mask)


def futex_wake(at: Hashable, most: int, mask: int = -1) -> Op:
    """Wakes so many, any of those that sleep with a bit of the mask. Gives back how many."""
    return Op("wake", at, most, mask)


def is_gone(process: str) -> Op:
    """Whether the process has died (what it still had to store is in memory then)."""
    return Op("gone", None, process)


def until_gone(*processes: str) -> Op:
    """Blocks until one of them has died, and says which."""
    return Op("until_gone", None, processes)


def until(at: Hashable, test: Callable[[Any], bool]) -> Op:
    """Blocks until the word passes the test: for what starts after something else, not for what the code waits for."""
    return Op("until", at, test)


EVERYBODY = 1 << 30

RMW: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cas": lambda old, a, b: b if old == a else old,
    "exchange": lambda old, a, b: a,
    "add": lambda old, a, b: old + a,
    "or": lambda old, a, b: old | a,
    "and": lambda old, a, b: old & a,
}


# ── one process, as a table that grows ───────────────────────────────────────────────────────────────────────────────
def frozen(value: Any) -> Hashable:
    """What a local variable is, for telling states apart."""
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((k, frozen(v)) for k, v in value.items())
    if isinstance(value, types.FunctionType):
        return value.__code__, tuple(frozen(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, types.MethodType):
        return value.__func__.__code__, frozen(value.__self__)
    if isinstance(value, types.GeneratorType):
        return None  # its own frame is part of the key
    if hasattr(value, "__dict__"):
        return type(value).__name__, frozen(vars(value))
    return value  # frozensets and whatever else is hashable


@functools.cache
def live_locals(code: types.CodeType) -> dict[int, frozenset[str]]:
    """The local variables that are still read after each instruction: two places that differ in others are one.

    What a loop runs over cannot be seen, so its variable stands for it, read or not.
    """
    steps = list(dis.get_instructions(code))
    before: dict[int, frozenset[str]] = {each.offset: frozenset() for each in steps}
    after = dict(before)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    leaves = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    is_changed = True
    while is_changed:
        is_changed = False
        for i in range(len(steps) - 1, -1, -1):
            step = steps[i]
            out = frozenset() if step.opname.startswith(leaves) or i + 1 == len(steps) else before[steps[i + 1].offset]
            if step.opcode in jumps:
                out |= before.get(step.argval, frozenset())
            live = out
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for verb, name in reversed(list(zip(VERB.findall(step.opname), names))):
                live = live | {name} if verb == "LOAD" else live - {name}
            is_changed |= live != before[step.offset]
            before[step.offset], after[step.offset] = live, out
    loops: set[str] = set()
    for step, following in itertools.pairwise(steps):
        if step.opname.startswith("FOR_ITER"):
            names = following.argval if isinstance(following.argval, tuple) else (following.argval,)
            assert following.opname.startswith("STORE_FAST"), "a loop of a process has one variable"
            loops.add(names[0])
    return {offset: names | loops for offset, names in after.items()}


VERB = re.compile("(LOAD|STORE|DELETE)_FAST")


class Table:
    """A process as an automaton, computed as far as it is needed: node, result of its operation -> next node."""

    def __init__(self, body: Callable[[], Step], index: dict[Hashable, int], without: Without = None) -> None:
        self.body, self.index, self.without = body, index, without
        self.ops: list[tuple[str, Any, Any, Any, int]] = []  # of each node; "done" and "violated" have no next
        self.edges: list[dict[Any, int]] = []
        self.labels: list[str] = []
        self._histories: list[tuple[Any, ...]] = []
        self._waiting: list[Step | None] = []  # a generator that stands there, until the walk goes on with it
        self._known: dict[Hashable, int] = {}
        self.first = self._arrive(body(), None, ())

    def next(self, node: int, result: Any) -> int:
        target = self.edges[node].get(result)
        if target is None:
            process, self._waiting[node] = self._waiting[node], None
            if process is None:
                process = self.body()
                next(process)
                for each in self._histories[node]:
                    process.send(each)
            target = self.edges[node][result] = self._arrive(process, result, (*self._histories[node], result))
        return target

    def _arrive(self, process: Step, result: Any, history: tuple[Any, ...]) -> int:
        try:
            op = process.send(result)
        except StopIteration as end:
            return self._node(("done", end.value), ("done", None, end.value, None, 0), "", history, None)
        except Violation as fault:
            return self._node(("violated", str(fault)), ("violated", None, str(fault), None, 0), "", history, None)
        key: list[Hashable] = [op]
        at: Any = process
        while at is not None:
            frame = at.gi_frame
            key += (frame.f_code, frame.f_lasti)
            live = live_locals(frame.f_code).get(frame.f_lasti)
            shared = (*frame.f_code.co_cellvars, *frame.f_code.co_freevars)
            for name, value in frame.f_locals.items():
                if live is None or name in live or name in shared:
                    key.append((name, frozen(value)))
            at = at.gi_yieldfrom
        place = -1 if op.at is None else self.index[op.at]
        shown = ", ".join(str(x) for x in (op.at, op.a, op.b) if x is not None and not callable(x))
        order = op.order if op.kind in ("wait", "wake") else weakened(op.order, self.without)
        return self._node(tuple(key), (op.kind, place, op.a, op.b, order), f"{op.kind}({shown})", history, process)

    def _node(self, key: Hashable, op: Any, label: str, history: tuple[Any, ...], process: Step | None) -> int:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = len(self.ops)
            self.ops.append(op)
            self.edges.append({})
            self.labels.append(label)
            self._histories.append(history)
            self._waiting.append(process)
        return known


# ── what is walked ───────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Process:
    name: str
    body: Callable[[], Step]
    may_die: bool = False
    may_stop: bool = False
    is_daemon: bool = False  # may be left waiting when all others have ended


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    ends: int

    def __str__(self) -> str:
        return f"{self.states} states, {self.transitions} transitions, {self.ends} ends"


RUNS, SLEEPS, DONE, DEAD, STOPPED = 0, 1, 2, 3, 4  # STOPPED is added to one of the others


class View:
    """One state, by names: view["word"] is what memory holds, view.result("process") what it returned."""

    def __init__(self, walk: "Walk", state: Any) -> None:
        self._walk, self._state = walk, state

    def __getitem__(self, at: Hashable) -> Any:
        return self._state[0][self._walk.index[at]]

    def _number(self, name: str) -> int:
        return self._walk.numbers[name]

    def is_dead(self, name: str) -> bool:
        return self._state[2][self._number(name)] & 3 == DEAD

    def is_done(self, name: str) -> bool:
        return self._state[2][self._number(name)] == DONE

    def is_stopped(self, name: str) -> bool:
        return self._state[2][self._number(name)] >= STOPPED

    def result(self, name: str) -> Any:
        p = self._number(name)
        return self._walk.tables[p].ops[self._state[1][p]][2] if self.is_done(name) else None


Memory = tuple[Any, ...]


def put(at: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return at if at[i] is value else (*at[:i], value, *at[i + 1 :])


def drained(mem: Memory, buffer: tuple[tuple[int, Any, bool], ...]) -> Memory:
    for place, value, _ in buffer:
        if place != FENCE:
            mem = put(mem, place, value)
    return mem


FENCE = -1  # in a buffer: what stands behind it leaves after all that stands before it


def without_leading_fence(buffer: tuple[tuple[int, Any, bool], ...]) -> tuple[tuple[int, Any, bool], ...]:
    while buffer and buffer[0][0] == FENCE:
        buffer = buffer[1:]
    return buffer


def may_pass(op: Any, place: int) -> bool:
    """Whether a later load of that word may come before this operation."""
    kind, at, _, _, order = op
    return at != place and ((kind == "load" and order == RELAXED) or (kind in RMW and order in (RELAXED, RELEASE)))


def loads_later(table: "Table") -> list[frozenset[int]]:
    """The words that the process loads, from each of its nodes on, before something orders its loads."""
    later: list[frozenset[int]] = [frozenset()] * len(table.ops)
    is_changed = True
    while is_changed:
        is_changed = False
        for node in range(len(table.ops) - 1, -1, -1):
            op = table.ops[node]
            words = frozenset[int]().union(*(later[after] for after in table.edges[node].values()))
            words = frozenset(word for word in words if not ends_early(op, word))
            if op[0] == "load":
                words |= {op[1]}
            is_changed |= words != later[node]
            later[node] = words
    return later


def ends_early(op: Any, place: int) -> bool:
    """Whether what was loaded early of that word is of no use after this operation."""
    kind, at, _, _, order = op
    if kind in ("load", "store") or kind in RMW:
        return at == place or (kind != "store" and order in ACQUIRING) or (kind == "store" and order == SEQ_CST)
    return kind != "fence" or order not in (RELAXED, RELEASE)


class Walk:
    """One exploration. A state: memory; of each process its node, how it stands, its store buffer, what it has loaded
    early; faults left."""

    def __init__(
        self,
        memory: dict[Hashable, Hashable],
        processes: list[Process],
        *,
        model: str = "sc",
        faults: int = 1,
        invariant: Callable[[View], None] | None = None,
        at_end: Callable[[View], None] | None = None,
        must_end: bool = False,
        limit: int = 400_000,
        without: Without = None,
    ) -> None:
        assert model in MODELS, model
        self.places = list(memory)
        self.index = {name: i for i, name in enumerate(memory)}
        self.numbers = {each.name: i for i, each in enumerate(processes)}
        self.processes, self.model = processes, model
        self.tables = [Table(each.body, self.index, without) for each in processes]
        self.invariant, self.at_end, self.must_end, self.limit = invariant, at_end, must_end, limit
        self.loads_later: list[list[frozenset[int]]] | None = None  # None: nothing is loaded early
        n = len(processes)
        start = (tuple(memory.values()), tuple(t.first for t in self.tables), (RUNS,) * n, ((),) * n, faults, ((),) * n)
        self.start = start
        self.states: list[Any] = []
        self.parents: list[tuple[int, int, str]] = []  # state, process, what beyond its operation

    def run(self) -> Explored:
        """Raises Violation at the first state that must not be: there is none on a shorter way.

        What a process may load early is worth trying where it loads that word before anything orders its loads: a walk
        in the order of the program shows where that is.
        """
        gc.disable()  # a walk makes no cycles, and its states are many: collections took a third of its time
        try:
            explored = self._run()
            if self.model == "weaker":
                self.loads_later = [loads_later(table) for table in self.tables]
                explored = self._run()
            return explored
        finally:
            gc.enable()

    def _run(self) -> Explored:
        self.states, self.parents = [self.start], [(-1, 0, "")]
        states, parents = self.states, self.parents
        numbers: dict[Any, int] = {self.start: 0}
        transitions = ends = at = 0
        into: list[list[int]] = [[]]  # the states that lead here without a fault
        terminal: list[int] = []
        moves = self._moves_in_order if self.loads_later is None else self._moves
        while at < len(states):
            state = states[at]
            if self.invariant is not None:
                self._check(at, self.invariant)
            is_end = True
            for p, label, after, is_fault, _ in moves(state):
                transitions += 1
                is_end &= is_fault
                known = numbers.get(after)
                if known is None:
                    known = numbers[after] = len(states)
                    states.append(after)
                    parents.append((at, p, label))
                    into.append([])
                    for table, node in zip(self.tables, after[1]):
                        if table.ops[node][0] == "violated":
                            raise Violation(self._story(known, table.ops[node][2]))
                    if known > self.limit:
                        raise RuntimeError(f"more than {self.limit} states: make the model smaller")
                if self.must_end and not is_fault:
                    into[known].append(at)
            if is_end:
                ends += 1
                terminal.append(at)
                self._check_end(at)
            at += 1
        if self.must_end:
            self._check_progress(into, terminal)
        return Explored(len(states), transitions, ends)

    # ── moves ──
    def _moves(self, state: Any) -> Iterator[tuple[int, str, Any, bool, bool]]:
        """As `_moves_in_order`, with loads that come early."""
        mem, nodes, _, _, _, early = state
        for p, label, (*after, _), is_fault, has_done in self._moves_in_order(state):
            mine = early[p]
            if has_done and mine and ends_early(self.tables[p].ops[nodes[p]], mine[0]):
                early_writes = put(early, p, ())
            else:
                early_writes = early
            yield p, label, (*after, early_writes), is_fault, has_done
            if after[0] is mem:
                continue
            for place, (old, new) in enumerate(zip(mem, after[0])):
                if old is new:
                    continue
                for q, s in enumerate(after[2]):  # has it loaded this word before it changed?
                    if q == p or s != RUNS or early_writes[q] or any(each[0] == place for each in after[3][q]):
                        continue
                    node = after[1][q]
                    if not may_pass(self.tables[q].ops[node], place):
                        continue
                    if node >= len(self.loads_later[q]) or place in self.loads_later[q][node]:
                        how = f"{label} ({self.processes[q].name} has loaded {self.places[place]} early)"
                        yield p, how, (*after, put(early_writes, q, (place, old))), is_fault, has_done

    def _moves_in_order(self, state: Any) -> Iterator[tuple[int, str, Any, bool, bool]]:
        """Process, what it does beyond its operation, the state after that, whether it is a fault, and whether the
        operation is done."""
        mem, nodes, stat, bufs, left, early = state
        for p, s in enumerate(stat):  # a fence with nothing to drain commutes with all else: it may come first
            if s == RUNS and not bufs[p] and self.tables[p].ops[nodes[p]][0] == "fence":
                yield p, "", (mem, *self._advance(nodes, stat, p, None), bufs, left, early), False, True
                return
        for p, s in enumerate(stat):
            if bufs[p]:
                for i in self._may_flush(bufs[p]):
                    place, value, _ = bufs[p][i]
                    rest = put(bufs, p, without_leading_fence(bufs[p][:i] + bufs[p][i + 1 :]))
                    after = (put(mem, place, value), nodes, stat, rest, left, early)
                    yield p, f"flush({place}, {value})", after, False, False
            if s == RUNS:
                op = self.tables[p].ops[nodes[p]]
                if op[0] == "wait" and self._visible(mem, bufs[p], op[1]) == op[2]:
                    after = (drained(mem, bufs[p]), nodes, put(stat, p, SLEEPS), put(bufs, p, ()), left, early)
                    yield p, "sleeps", after, False, True
                else:
                    for result, mem2, bufs2, woken in self._perform(p, op, state):
                        nodes2, stat2 = self._advance(nodes, stat, p, result)
                        for q in woken:
                            nodes2, stat2 = self._advance(nodes2, put(stat2, q, stat2[q] & STOPPED), q, 0)
                        yield p, "", (mem2, nodes2, stat2, bufs2, left, early), False, True
            elif s == SLEEPS and self.tables[p].ops[nodes[p]][3]:  # may time out
                nodes2, stat2 = self._advance(nodes, put(stat, p, RUNS), p, ETIMEDOUT)
                yield p, "times out", (mem, nodes2, stat2, bufs, left, early), False, True
            if left and s in (RUNS, SLEEPS):
                if self.processes[p].may_die:
                    yield p, "dies", (mem, nodes, put(stat, p, DEAD), bufs, left - 1, early), True, True
                if self.processes[p].may_stop:
                    after = (mem, nodes, put(stat, p, s | STOPPED), bufs, left - 1, early)
                    yield p, "is stopped", after, True, True

    def _advance(self, nodes: Any, stat: Any, p: int, result: Any) -> tuple[Any, Any]:
        table = self.tables[p]
        node = table.next(nodes[p], result)
        if table.ops[node][0] == "done" and stat[p] == RUNS:
            stat = put(stat, p, DONE)
        return put(nodes, p, node), stat

    def _perform(self, p: int, op: Any, state: Any) -> Iterator[tuple[Any, Any, Any, tuple[int, ...]]]:
        """What the operation may give back, memory and buffers after it, and the processes that it wakes."""
        mem, nodes, stat, bufs, _, early = state
        kind, place, a, b, order = op
        mine = bufs[p]
        if kind == "load":
            is_early = early[p] and early[p][0] == place
            yield early[p][1] if is_early else self._visible(mem, mine, place), mem, bufs, ()
        elif kind == "store":
            if self.model == "sc":
                yield None, put(mem, place, a), bufs, ()
            elif order == SEQ_CST:
                yield None, put(drained(mem, mine), place, a), put(bufs, p, ()), ()
            else:
                yield None, mem, put(bufs, p, (*mine, (place, a, order == RELEASE))), ()
        elif kind in RMW:
            if mine and (self.model == "tso" or order >= RELEASE or any(each[0] == FENCE for each in mine)):
                mem, bufs = drained(mem, mine), put(bufs, p, ())
            elif mine:  # weak, and it does not release: only what was stored to this very word comes first
                same = tuple(each for each in mine if each[0] == place)
                if any(each[2] for each in same):
                    mem, bufs = drained(mem, mine), put(bufs, p, ())
                elif same:
                    mem, bufs = drained(mem, same), put(bufs, p, tuple(each for each in mine if each[0] != place))
            old = mem[place]
            new = RMW[kind](old, a, b)
            yield old, mem if new == old else put(mem, place, new), bufs, ()
        elif kind == "fence":
            if order == RELEASE and mine and self.model in ("weak", "weaker"):
                yield None, mem, put(bufs, p, (*mine, (FENCE, None, True))), ()
            elif order in (RELAXED, ACQUIRE, RELEASE):
                yield None, mem, bufs, ()
            else:
                yield None, drained(mem, mine), put(bufs, p, ()), ()
        elif kind == "wait":
            yield EAGAIN, drained(mem, mine), put(bufs, p, ()), ()
        elif kind == "wake":
            mem, bufs = drained(mem, mine), put(bufs, p, ())
            waits = [self.tables[q].ops[node] for q, node in enumerate(nodes)]
            asleep = [
                q for q, s in enumerate(stat) if s & 3 == SLEEPS and waits[q][1] == place and waits[q][4] & b != 0
            ]
            for woken in itertools.combinations(asleep, min(a, len(asleep))):
                yield len(woken), mem, bufs, woken
        elif kind == "gone":
            q = self.numbers[a]
            yield stat[q] & 3 == DEAD and not bufs[q], mem, bufs, ()
        elif kind == "until_gone":
            for name in a:
                q = self.numbers[name]
                if stat[q] & 3 == DEAD and not bufs[q]:
                    yield name, mem, bufs, ()
        elif kind == "until":
            value = self._visible(mem, mine, place)
            if a(value):
                yield value, mem, bufs, ()

    def _visible(self, mem: Memory, mine: Any, place: int) -> Any:
        for each in reversed(mine):
            if each[0] == place:
                return each[1]
        return mem[place]

    def _may_flush(self, buffer: Any) -> Iterator[int]:
        if self.model == "tso":
            yield 0
            return
        for i, (place, _, releases) in enumerate(buffer):
            if place == FENCE:
                return
            if i == 0 or (not releases and all(each[0] != place for each in buffer[:i])):
                yield i

    # ── what is looked at ──
    def _check(self, at: int, test: Callable[[View], None]) -> None:
        try:
            test(View(self, self.states[at]))
        except Violation as fault:
            raise Violation(self._story(at, str(fault))) from None

    def _check_end(self, at: int) -> None:
        _, nodes, stat, _, _, _ = self.states[at]
        for p, s in enumerate(stat):
            if s in (RUNS, SLEEPS) and not self.processes[p].is_daemon:
                how = "sleeps and no process will wake it" if s == SLEEPS else "waits for ever"
                text = f"{self.processes[p].name} {how}: {self.tables[p].labels[nodes[p]]}"
                raise Violation(self._story(at, text))
        if self.at_end is not None:
            self._check(at, self.at_end)

    def _check_progress(self, into: list[list[int]], terminal: list[int]) -> None:
        """From every state there is a way to an end that needs no fault: no group is busy for ever."""
        reached = bytearray(len(into))
        todo = list(terminal)
        for each in todo:
            reached[each] = 1
        while todo:
            for each in into[todo.pop()]:
                if not reached[each]:
                    reached[each] = 1
                    todo.append(each)
        stuck = reached.find(0)
        if stuck >= 0:
            raise Violation(self._story(stuck, "busy for ever: there is no way to an end from here"))

    def _story(self, at: int, fault: str) -> str:
        """The steps that led here, one a line."""
        lines: list[str] = []
        while at > 0:
            before, p, label = self.parents[at]
            node = self.states[before][1][p]
            table = self.tables[p]
            now = self.states[at][1][p]
            actual = [str(r) for r, to in table.edges[node].items() if to == now] if not label else []
            step = table.labels[node] + label if label.startswith(" (") else label or table.labels[node]
            lines.append(f"  {self.processes[p].name}: {step}{' -> ' + ' or '.join(actual) if actual else ''}")
            at = before
        return "\n".join([fault, *reversed(lines)])


def explore(memory: dict[Hashable, Hashable], processes: list[Process], **options: Any) -> Explored:
    """Walks through all states; see Walk for the options. Raises Violation with the shortest way to a fault."""
    return Walk(memory, processes, **options).run()
